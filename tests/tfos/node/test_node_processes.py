"""A node from its task to its last file: supervisors and children against a real control server."""

import json
import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from feeding.config import FeedConfig
from feeding.sender.task import FeedTarget, FeedTask
from tfos.config import TensorBoardConfig
from tfos.control import messages, return_values
from tfos.monitor.stragglers import server_counters

pytestmark = pytest.mark.process


def test_a_ps_node_serves_and_stops_in_order(bed):
    run = bed.start(bed.bundle("ps:0"))
    bed.release("ps:0")
    beat = bed.heartbeat("ps:0", lambda beat: server_counters(beat) is not None)
    assert beat.phase == "serving"
    assert beat.rss_bytes > 10_000_000
    assert run.is_running
    limits = Path(f"/proc/{beat.child_pid}/limits").read_text()
    assert re.search(r"Max core file size +0 ", limits), "a core dump would hold the secret"
    bed.order("ps:0", messages.Stop("over", 5.0))
    assert run.wait().outcome == "ended"
    assert run.wait().reason == "over"
    assert not bed.event("ps:0", messages.Done).hands_over
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
        ctx.report_progress(3, 96, 0.5, {"accuracy": 0.25})
        ctx.hand_over(b"large")
        return {"epochs": args["epochs"]}

    bed.start(bed.bundle("ps:0"))
    run = bed.start(bed.bundle("worker:0", main_fun, {"epochs": 2}))
    server, entry = bed.release("ps:0", "worker:0")
    done = bed.event("worker:0", messages.Done)
    assert return_values.decode(done.result) == {"epochs": 2}
    assert done.hands_over
    address = f"127.0.0.1:{entry.free_port}"
    assert entry.free_port not in (0, entry.endpoint.port)
    assert bed.log_line("args") == "args {'epochs': 2} of worker:0 chief True"
    assert json.loads(bed.log_line("cluster {").removeprefix("cluster ")) == {
        "ps": [f"127.0.0.1:{server.endpoint.port}"],
        "worker": [address],
    }
    assert json.loads(bed.log_line("tf_config").removeprefix("tf_config ")) == {
        "cluster": {"worker": [address]},
        "task": {"type": "worker", "index": 0},
    }
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO user: logged at info",
        bed.log_line("logged at info"),
    )
    beat = bed.heartbeat("worker:0", lambda beat: "loss" in beat.progress)
    reported = {"steps": 3.0, "rows": 96.0, "loss": 0.5, f"{messages.METRIC}accuracy": 0.25}
    assert reported.items() <= beat.progress.items()
    assert (beat.progress["epochs_begun"], beat.progress["epoch_steps"]) == (1.0, 0.0)
    assert run.is_running, "the worker still takes rows that nobody reads"
    bed.order("worker:0", messages.Stop("over", 5.0))
    bed.order("ps:0", messages.Stop("over", 5.0))
    assert run.wait().value == b"large"
    bed.assert_nothing_left()


def test_tensorboard_runs_beside_the_chief_and_ends_with_it(bed, tmp_path):
    events = str(tmp_path / "events")
    board = TensorBoardConfig(is_wanted=True, log_dir=events, names=("jupyter.example",))
    bundle = bed.bundle("worker:0", lambda args, ctx: None, tensorboard=board)
    bed.start(bundle)
    url = bed.event("worker:0", messages.TensorBoardUp, lambda event: event.url != "").url
    assert url.startswith("http://127.0.0.1:")
    by_proxy = urllib.request.Request(url, headers={"Host": "jupyter.example"})
    for asked in (url, by_proxy):
        with urllib.request.urlopen(asked, timeout=60) as page:
            assert b"TensorBoard" in page.read()
    rebound = urllib.request.Request(url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(rebound, timeout=60)
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("over"))
    bed.assert_nothing_left()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)


def feed(bed, entry, epoch, rows, name="input"):
    """Feed rows to one worker as a Spark task would."""
    target = FeedTarget(worker=entry.rank, name=entry.node.name, endpoint=entry.endpoint)
    task = FeedTask(
        targets=(target,),
        credentials=lambda: bed.credentials,
        epoch=epoch,
        config=FeedConfig(),
        feed=name,
    )
    (report,) = task(0, rows)
    return report


def test_rows_reach_main_fun_and_epochs_end_in_order(bed):
    def sum_epochs(args, ctx):
        import sys

        data = ctx.get_data_feed()
        total = 0
        while not data.should_stop():
            total += sum(data.next_batch(7))
        sys.stdout.write(f"total {total}\n")

    run = bed.start(bed.bundle("worker:0", sum_epochs))
    (entry,) = bed.release("worker:0")
    for epoch in range(2):
        assert feed(bed, entry, epoch, range(100)).rows == 100
        bed.order("worker:0", messages.Flush("input", epoch))
        reached = bed.event(
            "worker:0", messages.FlushReached, lambda event, epoch=epoch: event.epoch == epoch
        )
        assert (reached.feed, reached.stats.taken_rows) == ("input", 100 * (epoch + 1))
    bed.order("worker:0", messages.FinishFeed("input"))
    bed.event("worker:0", messages.Done)
    assert bed.log_line("total") == f"total {2 * sum(range(100))}"
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()


def test_rows_after_main_fun_are_counted_as_dropped(bed):
    run = bed.start(bed.bundle("worker:0", lambda args, ctx: None))
    (entry,) = bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    report = feed(bed, entry, 0, range(50))
    assert (report.rows, report.dropped_rows) == (50, 50)
    bed.order("worker:0", messages.Stop("over"))
    run.wait()
    bed.assert_nothing_left()


def test_a_worker_trains_against_the_parameter_server_of_another_node(bed):
    def descend(args, ctx):
        import sys

        import numpy as np

        from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec

        manifest = Manifest(
            groups=(GroupSpec("trainable", "float32", SGD(), (ParamSpec("w", (4,)),)),)
        )
        client = ctx.ps_client()
        client.seed(manifest, {"trainable": np.zeros(4, np.float32)})
        client.attach(timeout_s=10)
        values = {"trainable": np.empty(4, np.float32)}
        for _ in range(5):
            gradient = {"trainable": np.ones(4, np.float32)}
            client.push_pull(gradient, values, hyper=Hyper(0.5), rows=1)
        sys.stdout.write(f"values {values['trainable'].tolist()}\n")

    servers = bed.start(bed.bundle("ps:0"))
    workers = bed.start(bed.bundle("worker:0", descend))
    bed.release("ps:0", "worker:0")
    assert bed.log_line("values") == "values [-2.5, -2.5, -2.5, -2.5]"
    bed.event("worker:0", messages.Done)
    beat = bed.heartbeat("ps:0", lambda beat: getattr(server_counters(beat), "clock", 0) == 5)
    stats = server_counters(beat)
    assert stats is not None
    assert stats.latency("push").count == stats.workers[0].pushes == 5
    for name in ("worker:0", "ps:0"):
        bed.order(name, messages.Stop("over"))
    assert {servers.wait().outcome, workers.wait().outcome} == {"ended"}
    bed.assert_nothing_left()


def take_rows(ask):
    """Return a main_fun that takes one epoch, whose rows its model would be trained on."""

    def main_fun(args, ctx):
        ask(ctx)
        data = ctx.get_data_feed()
        while not data.should_stop():
            data.next_batch(7)

    return main_fun


def seeds(ctx):
    import numpy as np

    from ps.manifest.manifest import SGD, GroupSpec, Manifest, ParamSpec

    groups = (GroupSpec("trainable", "float32", SGD(), (ParamSpec("w", (4,)),)),)
    with ctx.new_ps_client() as client:
        client.seed(Manifest(groups=groups), {"trainable": np.zeros(4, np.float32)})


@pytest.mark.parametrize(
    ("ask", "num_rows", "is_refused"),
    [
        (lambda ctx: None, 50, True),
        (lambda ctx: None, 0, False),
        (seeds, 50, False),
    ],
    ids=["forgotten", "no-rows", "seeded-by-another"],
)
def test_rows_of_train_that_no_server_learned_from_end_in_an_error(bed, ask, num_rows, is_refused):
    bed.start(bed.bundle("ps:0"))
    bed.start(bed.bundle("worker:0", take_rows(ask)))
    _, entry = bed.release("ps:0", "worker:0")
    if num_rows:
        feed(bed, entry, 0, range(num_rows))
    bed.order("worker:0", messages.Flush("input", 0))
    bed.order("worker:0", messages.FinishFeed("input"))
    if is_refused:
        failure = bed.failure("worker:0")
        assert failure.error_type == "tfos.errors.NotDistributed"
        assert "50 rows" in failure.message
        assert "model = ctx.distribute(model)" in failure.message
        assert "num_ps=0" in failure.message
    else:
        bed.event("worker:0", messages.Done)
    for name in ("worker:0", "ps:0"):
        bed.order(name, messages.Stop("over"))
    bed.assert_nothing_left()


def test_a_lone_worker_imports_ahead_takes_its_arguments_and_ends_by_exit_zero(
    bed, monkeypatch, tmp_path
):
    says = "import sys; print('keras ahead of main_fun, pyspark', 'pyspark' in sys.modules)"
    (tmp_path / "keras.py").write_text(says)
    monkeypatch.syspath_prepend(tmp_path)

    def main_fun(args, ctx):
        import sys

        import keras  # noqa: F401

        sys.stdout.write(f"argv {sys.argv} same {sys.argv == args}\n")
        sys.exit(0)

    run = bed.start(bed.bundle("worker:0", main_fun, ["prog", "--steps", "3"]))
    # Before there is a roster, without which no main_fun runs.
    assert bed.log_line("keras ahead") == "keras ahead of main_fun, pyspark False"
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    assert bed.log_line("argv") == "argv ['prog', '--steps', '3'] same True"
    bed.order("worker:0", messages.Stop("over"))
    run.wait()


def test_a_tasks_slot_is_free_once_the_roster_is_complete(bed):
    run = bed.start(bed.bundle("worker:0", lambda args, ctx: None), hold_slot=False)
    bed.event("worker:0", messages.Listening)
    assert run.is_running, "the next node would land on the same executor"
    bed.release("worker:0")
    assert run.wait().outcome == "released"
    bed.order("worker:0", messages.Stop("over"))
    bed.assert_nothing_left()


def test_the_supervisor_and_the_server_stay_light(bed):
    bed.start(bed.bundle("ps:0"))
    bed.event("ps:0", messages.Listening)
    supervisor = bed.registered("ps:0").pid
    libraries = Path(f"/proc/{supervisor}/maps").read_text()
    assert "grpc" in libraries
    for heavy in ("numpy", "numba", "tensorflow", "pyspark"):
        assert heavy not in libraries
    server = Path(f"/proc/{bed.child_pid('ps:0')}/maps").read_text()
    assert "numpy" in server
    for forbidden in ("tensorflow", "grpc"):
        assert forbidden not in server
    bed.order("ps:0", messages.Stop("over"))
    bed.assert_nothing_left()
