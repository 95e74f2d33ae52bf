"""F15 at every point: Ctrl-C wherever Python looks for signals, from reserve to the end."""

from __future__ import annotations

import dis
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.phases import ClusterPhase

WAIT_S = 30.0
CONFIG = ClusterConfig(verbose=False, abort_s=5.0, slot_wait_s=WAIT_S, slot_settle_s=WAIT_S)
pytestmark = [pytest.mark.socket, pytest.mark.fault("F15")]


def main_fun(args, ctx):
    """Never called: nodes are played."""


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _reserve(spark: FakeSpark) -> TFCluster:
    return TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=CONFIG)


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class Interrupted:
    """Raises KeyboardInterrupt at the n-th moment at which Python would run a signal handler.

    These are the entry of a function, the return from a call and the jump back of a loop (CPython
    3.11 looks for signals nowhere else), here in tfos and threading, on the thread that enters.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.moments = 0
        self.where = ""
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Interrupted:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("tfos.") and name != "threading":
            return None
        if frame.f_code.co_name == "_close_unused":
            return None  # a finalizer: Python itself drops what is raised there
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._moment(frame)
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if self._last.get(frame, "").startswith(("CALL", "JUMP_BACKWARD")):
                self._moment(frame)
            self._last[frame] = name
        return self._step

    def _moment(self, frame: FrameType) -> None:
        self.moments += 1
        if self.moments == self.number:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            raise KeyboardInterrupt


def _start_interrupted(spark: FakeSpark, number: int) -> Interrupted:
    clusters = []
    with Interrupted(number) as moment:
        try:
            with _reserve(spark) as cluster:
                clusters.append(cluster)
                cluster.start(main_fun)
                sys.settrace(None)
        except KeyboardInterrupt:
            assert moment.where, number
        else:
            assert not moment.where, f"moment {number} was swallowed at {moment.where}"
    phases = [cluster.phase for cluster in clusters]
    assert set(phases) <= {ClusterPhase.CLOSED}, f"moment {number} at {moment.where}: {phases}"
    for node in spark.nodes:
        node.join()
    return moment


@pytest.fixture(scope="module")
def num_moments() -> int:
    spark = FakeSpark()
    moment = _start_interrupted(spark, sys.maxsize)
    return moment.moments


def test_a_start_interrupted_at_some_moments_ends_in_order(spark, num_moments):
    for number in random.Random(0).sample(range(1, num_moments), 6):
        _start_interrupted(spark, number)  # a failure names the line


@pytest.mark.long
def test_a_start_interrupted_at_every_moment_ends_in_order(spark, num_moments):
    for number in range(1, num_moments + 1):
        _start_interrupted(spark, number)
