"""What train() and status() return: short in a console, tables in a notebook, never obeyed."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from tests.support.cluster_states import node_id, running
from tfos.console import html
from tfos.control import messages
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import NodeFailure, NodeId
from tfos.monitor.history import History, TrainedEpoch
from tfos.monitor.reports import ClusterReport, EpochReport, NodeReport, TrainReport
from tfos.monitor.status import cluster_report
from tfos.node_memory import NODE_MEMORY_MIB, overhead_mib
from tfos.topology import plan

EVIL = "<script>alert('x')</script>\x1b[2J"


class Page(HTMLParser):
    """The tags of some HTML, and its text by table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.links: list[str | None] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def node(**fields: object) -> NodeReport:
    given: dict[str, object] = {
        "name": "worker:0",
        "status": "running",
        "phase": "main_fun",
        "host": "h",
        "executor_id": "1",
        "pid": 7,
        "attempt": 0,
        "silent_s": 0.5,
        "rss_mib": 724.2,
        "steps": 360.0,
        "rows": 27568,
        "loss": 2.301,
    }
    return NodeReport(**{**given, **fields})  # type: ignore[arg-type]


def cluster(**fields: object) -> ClusterReport:
    given = {"cluster_id": "c", "phase": "RUNNING", "nodes": (node(),), "tensorboard_url": None}
    return ClusterReport(**{**given, "failures": (), **fields})  # type: ignore[arg-type]


def test_a_report_adds_up_and_counts_epochs_from_one():
    one = EpochReport("input", 0, 10, 8, 2, 0, 2.0)
    two = EpochReport("input", 1, 10, 10, 0, 1, 0.0)
    report = TrainReport((one, two))
    assert (report.fed_rows, report.trained_rows, report.dropped_rows) == (20, 18, 2)
    assert str(report).splitlines() == [
        "epoch 1 of input: 10 rows fed, 8 trained, 2 dropped in 2.0 s (4 rows/s)",
        "epoch 2 of input: 10 rows fed, 10 trained, 0 dropped in 0.0 s (0 rows/s), 1 repeated",
    ]
    assert repr(report) == str(report)
    assert repr(one) == f"<{one}>"
    assert str(TrainReport(())) == "no epoch was fed"
    assert "no epoch was fed" in TrainReport(())._repr_html_()


def test_rows_of_validation_are_read_not_trained():
    trained = EpochReport("input", 0, 10, 10, 0, 0, 1.0)
    validated = EpochReport("validation", 0, 4, 4, 0, 0, 1.0, is_validation=True)
    report = TrainReport((trained,), (validated,))
    assert str(report).splitlines()[1] == (
        "epoch 1 of validation: 4 rows fed, 4 read, 0 dropped in 1.0 s (4 rows/s)"
    )
    _, first, second = Page(report._repr_html_()).rows
    assert first == ["epoch 1 of input", "10", "10", "0", "0", "1.0", "10"]
    assert second[:3] == ["epoch 1 of validation", "4", "4 read"]


def test_a_notebook_shows_the_metrics_below_the_rows():
    epochs = (EpochReport("input", 0, 10, 10, 0, 0, 1.0),)
    history = History((TrainedEpoch(1, 0, {"loss": 0.5}, 1.0, 5, 10, "input"),))
    assert TrainReport(epochs)._repr_html_().count("<table") == 1
    rows = Page(TrainReport(epochs, history=history)._repr_html_()).rows
    assert rows[1][0] == "epoch 1 of input"
    assert rows[3] == ["fit 1, epoch 1", "0.5", "5", "1.0"]


def test_the_status_is_a_table_in_a_console_and_in_a_notebook():
    report = cluster(nodes=(node(), node(name="worker:1", loss=None)), notes=("worker:1 is slow",))
    assert repr(report) == str(report)
    assert max(map(len, repr(report).splitlines())) < 160
    page = Page(report._repr_html_())
    assert page.rows[0] == str(report).splitlines()[1].split()
    assert [row[0] for row in page.rows[1:]] == ["worker:0", "worker:1"]
    assert page.rows[1][-1] == "2.301"
    assert page.rows[2][-1] == "-"
    assert "worker:1 is slow" in page.text
    assert repr(node()) == (
        "<worker:0: status running, phase main_fun, host h, executor 1, pid 7, silent 0.5 s, "
        "MiB 724, steps 360, rows 27568, loss 2.301>"
    )
    assert Page(node()._repr_html_()).rows[1][0] == "worker:0"


def test_text_of_a_node_is_escaped_in_html():
    failure = NodeFailure(NodeId("worker", 0), "h", 1, EVIL, message=f"{EVIL}\n{'x' * 10_000}")
    report = cluster(
        nodes=(dataclasses.replace(node(), phase=EVIL, host=EVIL),),
        notes=(EVIL,),
        failures=(failure,),
        tensorboard_url='http://h/"onmouseover="x',
    )
    shown = report._repr_html_()
    page = Page(shown)
    assert set(page.tags) <= {"div", "b", "a", "table", "tr", "td", "th"}
    assert page.links == ['http://h/"onmouseover="x']
    assert "\x1b" not in shown
    assert page.rows[1][2] == "<script>alert('x')</script>\\x1b[2J"
    assert len(shown) < 5000


def test_only_web_addresses_become_links():
    assert Page(html.link("https://h:1/")).links == ["https://h:1/"]
    assert Page(html.link("javascript:alert(1)")).tags == []


def measured(room_mib: float, *, executors: tuple[str, ...]) -> ClusterState:
    nodes = plan(3, 1)
    rooms_mib = {node.name: room_mib for node in nodes.nodes}
    state = running(nodes, executors=executors, rooms_mib=rooms_mib)
    for name in state.members:
        beat = messages.Heartbeat(node_id(name), 1, "main_fun", rss_bytes=900 << 20)
        state.on_heartbeat(beat, 0.0)
    return state


def test_memory_is_summed_by_executor_and_one_without_room_is_told_with_both_numbers():
    report = cluster_report("c", measured(1408.0, executors=("3", "3", "4")), 1.0)
    both, one = report.executors
    assert (both.nodes, both.rss_mib, both.is_over) == (("ps:0", "worker:0"), 1800.0, True)
    assert (one.nodes, one.rss_mib, one.is_over) == (("worker:1",), 900.0, False)
    (note,) = report.notes
    assert note == (
        "executor 3 on host-b: 1,800 MiB of 1,408 MiB beside Java's heap: ps:0, worker:0. The host "
        "or the cluster manager may end it: raise spark.executor.memoryOverhead to 4096m or more"
    )
    assert str(report).count("executor 3 on host-b") == 1


def test_what_nodes_hold_raises_the_advice_only_above_what_was_told_at_the_start():
    assert overhead_mib(1) == overhead_mib(1, 558.0) == NODE_MEMORY_MIB
    assert overhead_mib(2, 3000.0) == 2 * NODE_MEMORY_MIB
    assert overhead_mib(1, 2000.0) == 2560
    assert overhead_mib(1, 4096.0) == 5120


def test_without_containers_the_sum_is_told_and_nobody_is_warned():
    report = cluster_report("c", measured(0.0, executors=("3", "3", "driver")), 1.0)
    assert report.notes == ()
    assert [each.nodes for each in report.executors] == [("ps:0", "worker:0")]
    assert "executor 3 on host-b: 1,800 MiB: ps:0, worker:0" in str(report)


def test_rows_that_a_main_fun_reads_itself_are_those_that_it_reports():
    state = measured(0.0, executors=("1", "2", "3"))
    beat = messages.Heartbeat(NodeId("worker", 0), 2, "main_fun", progress={"rows": 640.0})
    state.on_heartbeat(beat, 0.0)
    fed = messages.FeedSnapshot("input", 100, 90, trained_rows=64)
    state.on_heartbeat(messages.Heartbeat(NodeId("worker", 1), 2, "main_fun", feeds=(fed,)), 0.0)
    rows = {each.name: each.rows for each in cluster_report("c", state, 1.0).nodes}
    assert (rows["worker:0"], rows["worker:1"]) == (640, 64)


def test_metrics_of_main_fun_are_shown_and_change_no_number_of_tfos():
    state = measured(0.0, executors=("1", "2", "3"))
    metric = messages.METRIC
    progress = {"rows": 640.0, f"{metric}auc": 0.75, f"{metric}rows": 1.0, f"{metric}a\x1b[2J": 2.0}
    state.on_heartbeat(messages.Heartbeat(NodeId("worker", 0), 2, "", progress=progress), 0.0)
    report = cluster_report("c", state, 1.0)
    (worker,) = [each for each in report.nodes if each.name == "worker:0"]
    assert worker.rows == 640
    assert worker.metrics == {"auc": 0.75, "rows": 1.0, "a\\x1b[2J": 2.0}
    assert "worker:0: auc 0.75, rows 1, a\\x1b[2J 2" in str(report).splitlines()
    assert "auc 0.75" in report._repr_html_()
