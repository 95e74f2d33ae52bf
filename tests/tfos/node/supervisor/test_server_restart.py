"""A cluster's parameter server is killed: its supervisor starts it again, or says why not."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from ps.checkpoint.reader import latest, read_manifest
from tests.support.nodes import NodeBed, send_signal
from tests.support.ps_cluster import wait_until
from tests.support.snapshot_skew import torn_by
from tfos.config import Checkpoints
from tfos.control import messages

pytestmark = pytest.mark.process


def push_until_told(args, ctx):
    """Push ones; at each file that appears, say how many were acknowledged."""
    import pathlib

    import numpy as np

    from ps.manifest.manifest import Add, GroupSpec, Hyper, Manifest, ParamSpec

    size = 10_000
    group = GroupSpec("trainable", "float32", Add(), (ParamSpec("w", (size,)),))
    manifest = Manifest(groups=(group,), bucket_bytes=4096, consistency=args["consistency"])
    client = ctx.ps_client()
    client.seed(manifest, {"trainable": np.zeros(size, np.float32)})
    client.attach()
    ones, values = {"trainable": np.ones(size, np.float32)}, {"trainable": np.empty(size, "f4")}
    root, acknowledged = pathlib.Path(args["root"]), 0
    while not (root / "end").exists():
        client.push_pull(ones, values, hyper=Hyper(0.1), rows=1)
        acknowledged += 1
        ctx.report_progress(acknowledged, acknowledged)
    (stats,) = client.stats()
    lost, step = stats.lost_requests, stats.restored_step
    least, most = int(values["trainable"].min()), int(values["trainable"].max())
    text = f"values {least} to {most} acknowledged {acknowledged} lost {lost} since {step}"
    print(text, flush=True)  # noqa: T201 - what the test reads at the driver


def plan_for(tmp_path: Path, **changes) -> Checkpoints:
    return Checkpoints(directory=str(tmp_path / "saves"), every_s=3600.0, **changes)


def steps_of(bed: NodeBed, at_least: int) -> int:
    beat = bed.heartbeat("worker:0", lambda beat: beat.progress.get("steps", 0) >= at_least)
    return int(beat.progress["steps"])


@pytest.mark.fault("F08")
@pytest.mark.parametrize("consistency", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_a_killed_server_is_started_again_and_the_loss_reaches_the_driver(
    bed: NodeBed, tmp_path: Path, consistency: str
):
    plan = plan_for(tmp_path, ps_restarts=1)
    args = {"root": str(tmp_path), "consistency": consistency}
    server = bed.start(bed.bundle("ps:0", checkpoints=plan))
    worker = bed.start(bed.bundle("worker:0", push_until_told, args, checkpoints=plan))
    bed.release("ps:0", "worker:0")
    wait_until(lambda: latest(plan.directory) is not None, "the first checkpoint")
    steps_of(bed, (latest(plan.directory) or 0) + 5)
    first_pid = bed.child_pid("ps:0")
    send_signal(first_pid, signal.SIGKILL)
    restarted = bed.event("ps:0", messages.Restarted)
    assert (restarted.count, restarted.limit) == (1, 1)
    assert restarted.failure.message.startswith("ps:0 killed by SIGKILL")
    second_pid = bed.heartbeat("ps:0", lambda beat: beat.child_pid not in (0, first_pid)).child_pid
    lost = bed.event("ps:0", messages.UpdatesLost).text
    assert re.fullmatch(r"ps:0: \d+ s, [\d,]+ updates? lost since step \d+", lost)
    steps_of(bed, steps_of(bed, 1) + 5)
    (tmp_path / "end").touch()
    bed.event("worker:0", messages.Done)
    line = bed.log_line("acknowledged")
    pattern = r"values (\d+) to (\d+) acknowledged (\d+) lost (\d+) since (\d+)"
    found = re.search(pattern, line)
    assert found, line
    least, value, acknowledged, number, step = map(int, found.groups())
    assert value == acknowledged - number
    torn = torn_by(plan.directory, step, 0)
    assert least >= value - torn
    assert consistency == "async" or not torn
    assert (f"{number:,} update" in lost, f"step {step}" in lost) == (True, True)
    # The last save, after main_fun. A push under way at the cut may be in all buckets uncounted.
    assert read_manifest(plan.directory).step >= value - (consistency == "async")
    send_signal(second_pid, signal.SIGKILL)
    failed = bed.failure("ps:0")
    assert "killed by SIGKILL" in failed.message
    assert "(its server was restarted 1 of 1 times within 10 minutes)" in failed.message
    server.wait()
    bed.order("worker:0", messages.Stop("over"))
    worker.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
def test_a_server_without_a_checkpoint_of_this_run_fails_typed(bed: NodeBed, tmp_path: Path):
    plan = plan_for(tmp_path, ps_restarts=2)
    bed.start(bed.bundle("ps:0", checkpoints=plan))
    bed.release("ps:0")
    send_signal(bed.child_pid("ps:0"), signal.SIGKILL)
    failed = bed.failure("ps:0")
    assert failed.error_type == "ps.errors.CheckpointError"
    assert f"no complete checkpoint in {plan.directory}" in failed.message
    assert "(its server was restarted 1 of 2 times within 10 minutes)" in failed.message
    bed.assert_nothing_left()
