"""F16 as a state machine: the public calls in any order, twice, late, from two threads at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.fake_spark import WAIT_S, FakeRdd, FakeSpark
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.errors import NodeFailedError, PhaseError
from tfos.phases import ClusterPhase

pytestmark = pytest.mark.socket

FEEDS = ("input", "second")
CONFIG = ClusterConfig(verbose=False, abort_s=5.0)


def main_fun(args, ctx):
    """Never called: nodes are played."""


class Calls(RuleBasedStateMachine):
    """The model: the phase, and whether the failure of a node still has to be raised, once."""

    def __init__(self) -> None:
        super().__init__()
        self.spark = FakeSpark()
        self.phase = ClusterPhase.RESERVED
        self.owes_failure = False
        self.is_ended = False
        self.cluster = self._reserve()

    def _reserve(self) -> TFCluster:
        return TFCluster.reserve(
            self.spark, 3, 1, input_mode=InputMode.SPARK, config=CONFIG, queues=FEEDS
        )

    def teardown(self) -> None:
        self.cluster.abort()
        self.spark.close()

    def _expect(self, call: Any, *allowed: ClusterPhase) -> Any:
        """Make a call that needs a phase, and take off what it must raise."""
        if call.__name__ != "start" and self.owes_failure:
            self.owes_failure = False
            with pytest.raises(NodeFailedError, match="ValueError: played"):
                call()
        elif self.phase not in allowed:
            with pytest.raises(PhaseError, match=f"it is {self.phase.name}"):
                call()
        else:
            return call()
        return None

    @rule()
    def start(self) -> None:
        def start() -> None:
            self.cluster.start(main_fun)

        if self.phase is ClusterPhase.RESERVED:
            start()
            self.phase = ClusterPhase.RUNNING
        else:
            self._expect(start)

    @rule(epochs=st.integers(1, 2), feed=st.sampled_from(FEEDS))
    def train(self, epochs: int, feed: str) -> None:
        def train() -> Any:
            rdd = FakeRdd(self.spark, [1, 2])
            return self.cluster.train(rdd, epochs, qname=feed)

        report = self._expect(train, ClusterPhase.RUNNING)
        assert report is None or report.fed_rows == 2 * epochs

    @rule()
    def inference(self) -> None:
        def inference() -> Any:
            return self.cluster.inference(FakeRdd(self.spark, [1]))

        self._expect(inference, ClusterPhase.RUNNING)

    @precondition(lambda self: self.phase is ClusterPhase.RUNNING)
    @rule()
    def a_worker_fails(self) -> None:
        self.spark.nodes[-1].fail("played")
        self.phase = ClusterPhase.FAILED
        self.owes_failure = True

    @rule(by_block=st.booleans())
    def shutdown(self, by_block: bool) -> None:
        owed, self.owes_failure = self.owes_failure, False
        expected = (
            pytest.raises(NodeFailedError, match="ValueError: played")
            if owed
            else contextlib.nullcontext()
        )
        with expected:
            if by_block:
                with self.cluster:
                    pass
            else:
                self.cluster.shutdown()
        self._end(ClusterPhase.CLOSED)

    @rule()
    def two_shutdowns_at_once(self) -> None:
        owed, self.owes_failure = self.owes_failure, False
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(self.cluster.shutdown) for _ in range(2)]
            errors = [error for call in calls if (error := call.exception(WAIT_S)) is not None]
        assert all(isinstance(error, NodeFailedError) for error in errors)
        assert bool(errors) is owed
        self._end(ClusterPhase.CLOSED)

    @rule()
    def abort(self) -> None:
        self.cluster.abort()
        failed = self.phase is ClusterPhase.FAILED
        self._end(ClusterPhase.FAILED if failed else ClusterPhase.CLOSED)

    @rule()
    def fail_in_the_block(self) -> None:
        with pytest.raises(ZeroDivisionError), self.cluster:
            raise ZeroDivisionError
        failed = self.phase is ClusterPhase.FAILED
        self._end(ClusterPhase.FAILED if failed else ClusterPhase.CLOSED)

    @precondition(lambda self: self.is_ended)
    @rule()
    def another_cluster(self) -> None:
        self.cluster = self._reserve()
        self.phase = ClusterPhase.RESERVED
        self.owes_failure = self.is_ended = False

    def _end(self, phase: ClusterPhase) -> None:
        self.phase = phase
        self.is_ended = True
        for node in self.spark.nodes:
            node.join()
        self.spark.nodes.clear()
        assert self.spark.busy == 0

    @invariant()
    def what_can_be_asked_agrees(self) -> None:
        assert self.cluster.phase is self.phase
        assert self.cluster.status().phase == self.phase.name
        assert self.cluster.tensorboard_url() is None
        assert self.phase.name in repr(self.cluster)
        failed = [failure.message for failure in self.cluster.failures]
        assert failed in ([], ["played"])


Calls.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=12,
    derandomize=True,  # it runs real connections: the same sequences each time
)
TestCalls = pytest.mark.slow(pytest.mark.fault("F16")(Calls.TestCase))
