"""Training never fails because of TensorBoard."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.nodes import wait_forever
from tfos.config import TensorBoardConfig
from tfos.control import messages
from tfos.node import procfs

pytestmark = pytest.mark.process


@pytest.mark.fault("F58")
def test_a_killed_tensorboard_is_told_and_training_goes_on(bed):
    run = bed.start(
        bed.bundle("worker:0", wait_forever, tensorboard=TensorBoardConfig(is_wanted=True))
    )
    bed.release("worker:0")
    bed.event("worker:0", messages.TensorBoardUp, lambda event: event.url != "")
    child = bed.child_pid("worker:0")
    (board,) = [
        pid
        for pid in bed.processes()
        if procfs.parent_of(pid) == bed.registered("worker:0").pid and pid != child
    ]
    os.kill(board, signal.SIGKILL)
    bed.event(
        "worker:0",
        messages.TensorBoardUp,
        lambda event: event.url == "" and event.reason.startswith("TensorBoard killed by SIGKILL"),
    )
    bed.order("worker:0", messages.FinishFeed("input"))
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F58")
def test_a_tensorboard_that_cannot_start_is_a_reason_and_no_failure(bed, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_PORT", "not-a-port")
    run = bed.start(
        bed.bundle(
            "worker:0", lambda args, ctx: None, tensorboard=TensorBoardConfig(is_wanted=True)
        )
    )
    bed.event(
        "worker:0",
        messages.TensorBoardUp,
        lambda event: "TensorBoard ended with exit code" in event.reason,
    )
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()
