"""What main_fun finds in its ctx."""

import logging
import socket
import threading

import pytest

from ps.client.client import PSClient
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tests.support.nodes import node_settings
from tests.support.waiting import WAIT_S
from tfos.collectives.offers import Offers
from tfos.config import Checkpoints
from tfos.control.messages import METRIC, RosterEntry
from tfos.errors import (
    NoServersError,
    NotDistributed,
    PhaseError,
    SettingsError,
    UnsupportedError,
)
from tfos.failure import NodeId
from tfos.native.reserved_port import ReservedPort
from tfos.node.spec import NO_KEYS, ChildSpec, Executor, NodeBundle
from tfos.tensorflowonspark import TFNode
from tfos.topology import PlannedNode
from tfos.worker.context import NodeContext
from tfos.worker.feeds import WorkerFeeds
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.reports.progress_meter import ProgressMeter
from tfos.worker.roster import training_nodes

ENDPOINT = Endpoint("h", 11)


WORKER_1 = PlannedNode("worker", 1, 1)
CHIEF = PlannedNode("worker", 0, 0, is_chief=True)
EVALUATOR = PlannedNode("evaluator", 0, 2)


def make_context(
    roster=(), on_progress=lambda _: None, reserved_port=None, node=WORKER_1, **settings
):
    spec = ChildSpec(
        attempt=3,
        bundle=NodeBundle(
            node=node,
            control_keys=NO_KEYS,
            rpc_secret=b"S" * 32,
            settings=node_settings(**{"num_workers": 2, "num_ps": 0, **settings}),
        ),
        executor=Executor("7", "h", 0, 1, "/work", "", "/tmp", ""),
        link_fd=-1,
        socket_dir="/tmp",
        log_dir="/logs",
    )
    return NodeContext(
        spec,
        roster,
        feeds=WorkerFeeds(spec, lambda _: None, ProgressMeter(), threading.Event()),
        credentials=Credentials("c", b"S" * 32),
        on_progress=on_progress,
        epochs=EpochReports(lambda _: None),
        offers=Offers(1),
        reserved_port=reserved_port,
    )


def entry(role, index, port):
    return RosterEntry(NodeId(role, index), index, "h", Endpoint("h", port))


@pytest.mark.parametrize("resume_epochs", [True, False])
@pytest.mark.parametrize("has_own", [True, False])
def test_a_rate_is_resumed_with_servers_and_with_own_shards_and_fed_epochs_with_servers_alone(
    has_own: bool, resume_epochs: bool
):
    plan = Checkpoints(directory="/runs/7", resume=True, resume_epochs=resume_epochs)
    ctx = make_context(checkpoints=plan)
    assert not ctx.servers.resumes_rate, "no servers yet"
    ctx.servers._endpoints = [ENDPOINT]
    ctx.servers._own_shard = object() if has_own else None
    assert ctx.servers.resumes_rate == resume_epochs
    assert ctx.servers.resumes_epochs == (resume_epochs and not has_own)


def test_names_of_tensorflowonspark_mean_what_they_say():
    ctx = make_context(default_fs="hdfs://nn")
    assert (ctx.job_name, ctx.task_index, ctx.executor_id) == ("worker", 1, "7")
    assert (ctx.rank, ctx.worker_rank, ctx.worker_num, ctx.num_workers) == (1, 1, 1, 2)
    assert (ctx.is_chief, ctx.defaultFS, ctx.working_dir) == (False, "hdfs://nn", "/work")
    assert ctx.absolute_path("/x") == "hdfs://nn/x"
    assert (ctx.log_dir, ctx.cluster_log_dir) == ("/logs/worker-1", "/logs")
    assert ctx.release_port() is None


def test_the_cluster_spec_orders_nodes_by_index():
    ctx = make_context([entry("worker", 1, 12), entry("ps", 0, 10), entry("worker", 0, 11)])
    assert ctx.cluster_spec == {"ps": ["h:10"], "worker": ["h:11", "h:12"]}


def test_an_ipv6_address_in_the_cluster_spec_is_in_brackets():
    endpoint = Endpoint("fd00::2", 11)
    ctx = make_context([RosterEntry(NodeId("worker", 0), 0, "fd00::2", endpoint)])
    assert ctx.cluster_spec == {"worker": ["[fd00::2]:11"]}
    assert str(endpoint) == "[fd00::2]:11"


def test_a_workers_address_is_the_port_that_it_holds_for_main_fun():
    held = ReservedPort()
    roster = [
        entry("ps", 0, 10),
        RosterEntry(NodeId("worker", 0), 0, "h", ENDPOINT, held.port),
    ]
    ctx = make_context(roster, reserved_port=held)
    assert ctx.cluster_spec == {"ps": ["h:10"], "worker": [f"h:{held.port}"]}
    ctx.release_port()
    with socket.socket() as exclusive:
        exclusive.bind(("", held.port))


def test_asking_for_servers_where_there_are_none_says_what_to_do():
    with pytest.raises(NoServersError, match=r"num_ps=0.*num_ps=1"):
        make_context([entry("worker", 0, 11)]).ps_client()


def test_without_servers_another_mode_than_sync_is_refused_before_anything_is_served():
    ctx = make_context([entry("worker", 0, 11), entry("worker", 1, 12)])
    with pytest.raises(SettingsError, match=r'num_ps=0.*"sync", got \'async\'.*num_ps=1'):
        ctx.distribute(object())
    assert isinstance(SettingsError(""), ValueError)
    ctx.servers.finish()  # nothing was served, so it waits for nobody


def test_the_client_is_one_object():
    ctx = make_context([entry("ps", 0, 10)], num_ps=1)
    client = ctx.ps_client()
    assert ctx.ps_client() is client
    client.close()


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(60.0, 600.0), (1200.0, 1200.0)])
def test_a_server_that_restores_is_waited_for_as_long_as_a_save(timeout_s: float, waits_s: float):
    plan = Checkpoints(directory="/runs/7", timeout_s=timeout_s)
    ctx = make_context([entry("ps", 0, 10)], num_ps=1, checkpoints=plan)
    with ctx.ps_client() as client:
        assert client._servers.times.restore_s == waits_s


def test_training_without_the_servers_names_the_line_to_add():
    ctx = make_context([entry("ps", 0, 10), entry("ps", 1, 11)], num_ps=2)
    with pytest.raises(NotDistributed) as caught:
        ctx.servers.check_used("fit() trains this model")
    assert str(caught.value).startswith("fit() trains this model on worker:1 alone: ")
    assert "model = ctx.distribute(model)" in str(caught.value)
    assert "2 parameter servers" in str(caught.value)
    ctx.ps_client().close()
    ctx.servers.check_used("fit() trains this model")


def test_training_without_servers_is_each_workers_own_where_there_are_none():
    make_context([entry("worker", 0, 11)]).servers.check_used("fit() trains this model")


def test_tensorflows_servers_want_a_strategy_of_tensorflow(monkeypatch, caplog):
    ctx = make_context([entry("ps", 0, 10)], has_tensorflow_servers=True)
    with pytest.raises(NoServersError, match=r"servers are TensorFlow's.*ps='tensorflow'"):
        ctx.ps_client()
    for check in (ctx.servers.check_used, ctx.servers.check_seeded):
        with pytest.raises(NotDistributed, match=r"fit\(\) trains.*alone: .*ParameterServerStra"):
            check("fit() trains this model")
    ctx.servers.finish()
    assert "has not built a strategy" in caplog.text
    caplog.clear()
    monkeypatch.setattr("tfos.worker.server_access.is_connected_to_servers", lambda: True)
    ctx.servers.check_used("fit() trains this model")
    ctx.servers.check_seeded("fit() trains this model")
    ctx.servers.finish()
    assert not caplog.text
    assert ctx.servers.saver() is None


@pytest.mark.parametrize(
    ("node", "settings", "has_joined", "is_told"),
    [
        (CHIEF, {"is_mirrored": True}, False, True),
        (CHIEF, {"is_mirrored": True}, True, False),
        (CHIEF, {"is_mirrored": True, "num_workers": 1}, False, False),
        (CHIEF, {}, False, False),
        (WORKER_1, {"is_mirrored": True}, False, False),
    ],
)
def test_a_chief_that_has_joined_no_other_worker_is_told_once(
    node, settings, has_joined, is_told, caplog
):
    ctx = make_context([entry("worker", 0, 11), entry("worker", 1, 12)], node=node, **settings)
    ctx.servers.finish(has_joined=has_joined)
    told = [each for each in caplog.messages if "has not built a strategy" in each]
    assert len(told) == is_told
    assert all("joins the 2 workers: whatever it trained is its own model" in each for each in told)


def test_tensorflows_servers_take_no_part_in_collective_calls():
    roster = [entry("chief", 0, 9), entry("ps", 0, 10), entry("worker", 0, 11)]
    assert make_context(roster, has_tensorflow_servers=True).rank_group().size == 2
    roster.append(entry("worker", 2, 12))
    assert make_context(roster, has_tensorflow_servers=True).rank_group().size == 2
    assert make_context(roster[2:]).rank_group().size == 3


def test_progress_becomes_numbers():
    seen: list[dict[str, float]] = []
    ctx = make_context(on_progress=seen.append)
    ctx.report_progress(3, 96, None, {"accuracy": 1})
    assert seen == [{"steps": 3.0, "rows": 96.0, f"{METRIC}accuracy": 1.0}]


def test_a_metric_of_any_name_is_none_of_tfos_own_numbers():
    seen: list[dict[str, float]] = []
    names = ("epoch", "at_s", "compute_s", "steps", "rows", "loss")
    make_context(on_progress=seen.append).report_progress(3, 96, 0.5, dict.fromkeys(names, 7))
    own = {"steps": 3.0, "rows": 96.0, "loss": 0.5}
    assert seen == [{**{f"{METRIC}{name}": 7.0 for name in names}, **own}]


def test_progress_that_is_no_number_never_stops_training(caplog):
    seen: list[dict[str, float]] = []
    with caplog.at_level(logging.WARNING):
        make_context(on_progress=seen.append).report_progress(3, 96, "nan?")
    assert seen == []
    assert "nan?" in caplog.text


@pytest.mark.fault("F36")
@pytest.mark.parametrize(
    ("feeds", "name", "sentence"),
    [
        ((), "input", "no rows are fed .*InputMode.SPARK"),
        (("input", "extra"), "inptu", r"'inptu' is not a feed .*\['input', 'extra'\].* queues="),
    ],
)
@pytest.mark.parametrize("how", ["get_data_feed", "dataset"])
def test_a_feed_that_nobody_feeds_is_refused_instead_of_awaited(how, feeds, name, sentence):
    ctx = make_context(feeds=feeds)
    ask = ctx.get_data_feed if how == "get_data_feed" else ctx.dataset
    options = {"qname_in": name} if how == "get_data_feed" else {"batch_size": 8, "feed": name}
    with pytest.raises(SettingsError, match=sentence):
        ask(**options)


def test_the_feeds_of_the_cluster_are_given():
    assert make_context(feeds=("input", "extra")).get_data_feed(qname_in="extra").qname_in


@pytest.mark.fault("F34")
@pytest.mark.parametrize("feeds", [(), ("input",)])
def test_a_worker_that_never_used_the_servers_is_not_waited_for_but_told(feeds, caplog):
    credentials = Credentials("c", b"S" * 32)
    server = PSServer(ServerSettings(rank=0, num_servers=1, num_workers=2), credentials)
    server.bind_tcp("127.0.0.1")
    server.start()
    roster = [RosterEntry(NodeId("ps", 0), 0, "h", server.endpoint)]
    chief = PSClient([server.endpoint], credentials, Identity(Role.WORKER, 0), num_workers=2)
    with server, chief:
        make_context(roster, num_ps=1, feeds=feeds).servers.finish()
        assert chief.rendezvous("epoch", b"0", timeout_s=WAIT_S) == {0: b"0"}
    # With a feed nothing is told: rows of train() that were taken are an error, others no training.
    assert ("ctx.distribute(model) after model.compile" in caplog.text) is not bool(feeds)


def test_finishing_without_servers_is_nothing():
    make_context().servers.finish()


def test_the_socket_of_the_port_is_shown_to_programs_that_ask_for_it():
    held = ReservedPort()
    assert make_context(reserved_port=held).tmp_socket is None
    ctx = make_context(reserved_port=held, release_port=False)
    assert ctx.tmp_socket is held.socket
    ctx.release_port()
    assert ctx.tmp_socket is None


def test_the_manager_opens_the_contexts_feed_and_has_no_queue():
    ctx = make_context()
    assert ctx.mgr is ctx.mgr
    feed = TFNode.DataFeed(ctx.mgr, False, input_mapping={"b": "y", "a": "x"})
    assert (type(feed).__name__, feed.train_mode, feed.qname_in) == ("DataFeed", False, "input")
    ctx.mgr.set("key", 1)
    assert (ctx.mgr.get("key"), ctx.mgr.get("state")) == (1, "running")
    with pytest.raises(UnsupportedError, match=r"feed = ctx\.get_data_feed\(\)"):
        ctx.mgr.get_queue("input")
    with pytest.raises(SettingsError, match="'other' is not a feed"):
        TFNode.next_batch(ctx.mgr, 1, "other")


def test_calls_of_tensorflow_1_say_what_to_write():
    ctx = make_context()
    with pytest.raises(UnsupportedError, match=r"ctx\.distribute\(model\) after model\.compile"):
        ctx.start_cluster_server(1, rdma=False)
    with pytest.raises(UnsupportedError, match=r"ctx\.export\(model, '/m'\)"):
        ctx.export_saved_model(None, "/m", ["serve"], {})


def test_the_evaluator_stands_alone_and_says_what_it_is_for():
    roster = [entry("ps", 0, 10), entry("worker", 0, 11), entry("evaluator", 0, 12)]
    ctx = make_context(roster, node=EVALUATOR, num_ps=1, feeds=("input",))
    assert (ctx.job_name, ctx.task_index, ctx.is_chief) == ("evaluator", 0, False)
    assert (ctx.rank, ctx.num_workers, ctx.local_rank) == (0, 1, 0)
    assert (ctx.log_dir, ctx.servers.saver()) == ("/logs/evaluator", None)
    assert ctx.cluster_spec == {"ps": ["h:10"], "worker": ["h:11"], "evaluator": ["h:12"]}
    for refused in (ctx.ps_client, ctx.rank_group, ctx.get_data_feed, lambda: ctx.distribute(None)):
        with pytest.raises(NoServersError, match=r"evaluator:0 has no .*evaluate_checkpoints"):
            refused()
    with pytest.raises(SettingsError, match=r"needs a directory of checkpoints"):
        ctx.evaluate_checkpoints(None, [])
    ctx.servers.finish()


def test_a_worker_does_not_wait_for_checkpoints():
    with pytest.raises(PhaseError, match=r'if ctx.job_name == "evaluator"'):
        make_context().evaluate_checkpoints(None, [])


def test_an_evaluator_is_no_worker_of_the_others():
    roster = [entry("worker", 0, 11), entry("worker", 1, 12), entry("evaluator", 2, 13)]
    assert sorted(training_nodes(roster, has_tensorflow_servers=False)) == [0, 1]
