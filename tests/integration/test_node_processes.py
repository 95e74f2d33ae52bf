"""A node from its task to its last file: supervisors and children against a real control server."""

import json
import os
import sys

import pytest

from tfos.control import messages

pytestmark = pytest.mark.slow


def test_a_ps_node_serves_and_stops_in_order(bed):
    run = bed.start(bed.bundle("ps:0"))
    bed.release("ps:0")
    beat = bed.heartbeat("ps:0", lambda beat: "connections" in beat.progress)
    assert beat.phase == "serving"
    assert beat.rss_bytes > 10_000_000
    assert run.is_running
    bed.order("ps:0", messages.Stop("over", 5.0))
    assert run.wait().outcome == "ended"
    assert run.wait().reason == "over"
    bed.event("ps:0", messages.Done)
    bed.assert_nothing_left()


def test_a_worker_runs_main_fun_and_says_done(bed):
    def main_fun(args, ctx):
        import logging

        lines = [
            f"args {args} of {ctx.job_name}:{ctx.task_index} chief {ctx.is_chief}",
            f"cluster {json.dumps(ctx.cluster_spec)}",
            f"tf_config {os.environ['TF_CONFIG']}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        logging.getLogger("user").info("logged at info")
        ctx.report_progress(3, 96, 0.5, accuracy=0.25)

    run = bed.start(bed.bundle("worker:0", main_fun, {"epochs": 2}))
    (entry,) = bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    address = f"127.0.0.1:{entry.endpoint.port}"
    assert bed.log_line("args") == "args {'epochs': 2} of worker:0 chief True"
    assert json.loads(bed.log_line("cluster {").removeprefix("cluster ")) == {"worker": [address]}
    assert json.loads(bed.log_line("tf_config").removeprefix("tf_config ")) == {
        "cluster": {"worker": [address]},
        "task": {"type": "worker", "index": 0},
    }
    assert bed.log_line("logged at info") == "INFO user: logged at info"
    beat = bed.heartbeat("worker:0", lambda beat: bool(beat.progress))
    assert beat.progress == {"steps": 3.0, "rows": 96.0, "loss": 0.5, "accuracy": 0.25}
    assert run.is_running, "the worker still takes rows that nobody reads"
    bed.order("worker:0", messages.Stop("over", 5.0))
    run.wait()
    bed.assert_nothing_left()
