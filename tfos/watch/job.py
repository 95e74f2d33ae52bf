"""Job: what both doors, the terminal's and the page's, may see and do: one snapshot, two actions.

A third one, the end of streams alone, is for another process of the user.

Covers: the snapshot under the state's lock, lines of a node's log, saving and stopping, answers to
an operator as JSON.
Does not: authenticate (tfos.control.server, tfos.watch.page_app), make the snapshot's content.
Runs in: the driver.      Threads: any; one save at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.failure import NodeId
from tfos.phases import ClusterPhase
from tfos.watch.snapshot import NOTHING_SEEN, JobInfo, Json, Seen, snapshot

SAVE_S = 60.0
"""Seconds to wait for the end of a requested save."""
STOP_REASON = "the operator asked for it"
STREAMS_REASON = "another process asked for it"


class Outcome(NamedTuple):
    """What became of an action, in a sentence for the user."""

    is_done: bool
    text: str

    def as_json(self) -> Json:
        """Return `{"is_done": bool, "text": str}`."""
        return {"is_done": self.is_done, "text": self.text}


class Job:
    """One running cluster, as its user's other processes see it.

    Args:
        coordinator: the cluster's coordinator.
        info: what never changes.
    """

    def __init__(self, coordinator: Coordinator, info: JobInfo) -> None:
        self.info = info
        self.coordinator = coordinator
        self._saving = threading.Lock()

    def snapshot(self, seen: Seen = NOTHING_SEEN) -> Json:
        """Return the job as it is now; see tfos.watch.snapshot.

        Args:
            seen: what the reader has already.
        """
        now_s = self.coordinator.now_s()
        return snapshot(self.info, self.coordinator.copied(), now_s, seen)

    def log(self, node: str, after: int) -> Json:
        """Return newer lines of a node's output: `{"node", "lines", "last", "skipped"}`.

        `last` is the number to go on from, `skipped` lines were forgotten before they were read; a
        node that does not exist has `{"error": text}`.

        Args:
            node: `worker:1`.
            after: number of the last line that the reader has; 0: it has none.
        """
        found = self.coordinator.log_after(node, after)
        if found is None:
            names = ", ".join(self.coordinator.read(lambda state: list(state.members)))
            return {"error": f"the cluster has no node {node!r}; it has {names}"}
        last = found[-1][0] if found else after
        skipped = found[0][0] - after - 1 if found and after else 0
        lines = [line for _, line in found]
        return {"node": node, "lines": lines, "last": last, "skipped": skipped}

    def save(self, timeout_s: float = SAVE_S) -> Outcome:
        """Save a checkpoint now, and return where it is.

        Args:
            timeout_s: seconds to wait for its end.
        """
        if refusal := self.coordinator.read(_why_no_save):
            return Outcome(False, refusal)
        if not self._saving.acquire(blocking=False):
            return Outcome(False, "a save is in progress already")
        try:
            return self._save(timeout_s)
        finally:
            self._saving.release()

    def _save(self, timeout_s: float) -> Outcome:
        chief = self.coordinator.read(lambda state: state.workers[0].node)
        self.coordinator.act(ClusterState.save_now)
        number = self.coordinator.read(lambda state: state.saves_asked)

        def is_over(state: ClusterView) -> bool:
            saved = state.epochs.saved
            is_carried_out = saved is not None and saved.number >= number
            return is_carried_out or bool(_why_no_answer(state, chief))

        self.coordinator.wait(is_over, timeout_s)
        saved = self.coordinator.read(lambda state: state.epochs.saved)
        if saved is None or saved.number < number:
            reason = self.coordinator.read(lambda state: _why_no_answer(state, chief))
            return Outcome(
                False,
                reason
                or f"the chief has not reported a save within {timeout_s:.0f} s; it may still "
                "be saving: `tfos status` shows the last save",
            )
        if saved.error:
            return Outcome(False, f"nothing was saved: {saved.error}")
        return Outcome(True, f"the parameters are saved in {saved.path}")

    def stop(self) -> Outcome:
        """Ask main_fun on every worker to end its training, as `model.stop_training` does."""
        if refusal := self.coordinator.read(_why_no_stop):
            return Outcome(False, refusal)
        self.coordinator.act(lambda state: state.stop_training(STOP_REASON))
        return Outcome(
            True,
            "the training stops: a distributed fit at the end of its epoch, a loop over "
            "ctx.get_data_feed() with its batch, another loop where it asks ctx.stop_asked",
        )

    def end_streams(self) -> Outcome:
        """Ask the streams that train the cluster to end; main_fun goes on."""
        self.coordinator.act(lambda state: state.end_streams(STREAMS_REASON))
        return Outcome(True, "the streams that train this cluster end")

    def answer(self, ask: messages.Ask) -> bytes:
        """Return the JSON answer to an operator."""
        answers: dict[str, Callable[[], Json]] = {
            "status": lambda: self.snapshot(Seen(curve_at_s=ask.after)),
            "log": lambda: self.log(ask.node, whole(ask.after)),
            "save": lambda: self.save().as_json(),
            "stop": lambda: self.stop().as_json(),
            "end_streams": lambda: self.end_streams().as_json(),
        }
        return msgspec.json.encode(answers[ask.what]())


def whole(number: float) -> int:
    """Return a line's number as given; 0 if it is not a number."""
    return int(number) if math.isfinite(number) and number > 0 else 0


def _why_no_save(state: ClusterView) -> str:
    if state.phase is not ClusterPhase.RUNNING:
        return f"the cluster is {state.phase.name}: nothing can be saved now"
    if state.tensorflow_servers:
        return (
            "TensorFlow's own servers hold the parameters: main_fun saves them itself, with "
            "tf.train.CheckpointManager"
        )
    if state.config.checkpoints is None:
        return (
            "the cluster was made without a place for checkpoints: pass "
            "ClusterConfig(checkpoints=Checkpoints(directory)) to reserve()"
        )
    return ""


def _why_no_answer(state: ClusterView, chief: NodeId) -> str:
    """Return why no answer to an order to save will come.

    Args:
        state: the cluster's state.
        chief: the attempt that was given the order.
    """
    if state.phase is not ClusterPhase.RUNNING:
        return f"the cluster is {state.phase.name}, and the chief has not reported a save"
    now = state.workers[0]
    if now.status is NodeStatus.DONE:
        return "nothing was saved: main_fun has returned on the chief"
    if now.status is not NodeStatus.RUNNING or now.node != chief:
        return "the chief was lost before it reported a save; ask again once it trains again"
    return ""


def _why_no_stop(state: ClusterView) -> str:
    if state.phase is not ClusterPhase.RUNNING:
        return f"the cluster is {state.phase.name}: no training is running"
    if not state.training():
        return "main_fun has returned on every worker: no training is running"
    if state.needs_all_workers or state.tensorflow_servers:
        return (
            "TensorFlow's own strategy trains here, and its workers end together or not at all: "
            "stop in main_fun with a callback, or end the program"
        )
    return ""
