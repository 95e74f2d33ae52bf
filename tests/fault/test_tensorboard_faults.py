"""Training never fails because of TensorBoard."""

from __future__ import annotations

import signal

import pytest

from tests.node_bed import send_signal, wait_forever
from tfos.control import messages
from tfos.node import procs

pytestmark = pytest.mark.slow


@pytest.mark.fault("F58")
def test_a_killed_tensorboard_is_told_and_training_goes_on(bed):
    run = bed.start(bed.bundle("worker:0", wait_forever, tensorboard=True))
    bed.release("worker:0")
    bed.event("worker:0", messages.TensorBoardUp, lambda event: event.url != "")
    child = bed.child_pid("worker:0")
    (board,) = [
        pid
        for pid in bed.processes()
        if procs.parent_of(pid) == bed.registered("worker:0").pid and pid != child
    ]
    send_signal(board, signal.SIGKILL)
    down = bed.event("worker:0", messages.TensorBoardUp, lambda event: event.url == "")
    assert down.reason.startswith("TensorBoard killed by SIGKILL")
    bed.order("worker:0", messages.FinishFeed("input"))
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F58")
@pytest.mark.parametrize(
    ("settings", "variables", "reason"),
    [
        ({"log_dir": "hdfs://nn/logs"}, {}, "cannot read log_dir='hdfs://nn/logs'"),
        ({}, {"TENSORBOARD_PORT": "not-a-port"}, "TensorBoard ended with exit code"),
    ],
    ids=["remote log_dir", "bad port"],
)
def test_a_tensorboard_that_cannot_start_is_a_reason_and_no_failure(
    bed, monkeypatch, settings, variables, reason
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = bed.start(bed.bundle("worker:0", lambda args, ctx: None, tensorboard=True, **settings))
    assert reason in bed.event("worker:0", messages.TensorBoardUp).reason
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()
