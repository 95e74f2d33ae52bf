"""What a cluster shows TensorFlowOnSpark's programs at the driver, and its STOP; without Spark."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rpc.auth.certificates import TlsCredentials
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.control import messages
from tfos.control.client import ControlClient
from tfos.control.identity import OPERATOR_NAME
from tfos.driver import server_address, stream_stop
from tfos.errors import ControlError, ControlRefused, NodeFailedError, SettingsError
from tfos.failure import NodeFailure, NodeId
from tfos.tensorflowonspark import TFParallel, reservation
from tfos.watch import operator, ticket

pytestmark = pytest.mark.socket


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def cluster(spark, _own_cache):
    reserved = TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK)
    yield reserved
    reserved.abort()


def nothing(args, ctx):
    """Return at once."""


def left(cluster_id: str, port: int, keys: TlsCredentials) -> Path:
    """Leave a ticket of a stream, as the driver that listens at this port would."""
    made = ticket.DriverTicket.of_this(
        cluster_id=cluster_id,
        name="words",
        application_id="app-7",
        started_at=1e9,
        address=f"127.0.0.1:{port}",
        cert_pem=keys.cert_pem,
        key_pem=keys.key_pem,
        ca_pem=keys.ca_pem,
    )
    return ticket.write(made, ticket.directory_of_streams())


def test_the_attributes_of_a_running_cluster(spark):
    cluster = TFCluster.run(
        spark, nothing, {}, 3, 1, False, InputMode.SPARK, None, False, "chief", 60,
        ["input", "output", "error", "more"], False, False,
    )  # fmt: skip
    assert cluster.sc is spark
    assert cluster.input_mode is InputMode.SPARK
    assert cluster.queues == ["input", "more", "output", "error"]
    assert len(cluster.nodeRDD.elements) == 3
    meta = cluster.cluster_meta
    assert meta["cluster_template"] == {"ps": [0], "chief": [1], "worker": [2]}
    assert (meta["num_executors"], meta["release_port"]) == (3, False)
    assert meta["default_fs"] == "file://", "programs join it to an absolute path"
    assert cluster.meta == meta
    host, port = meta["server_addr"]
    with socket.create_connection((host, port), timeout=10):
        pass
    names = [(each["job_name"], each["task_index"]) for each in cluster.cluster_info]
    assert names == [("ps", 0), ("chief", 0), ("worker", 0)]
    assert all(each["authkey"] == b"" for each in cluster.cluster_info)
    assert not cluster.server.done
    cluster.shutdown()
    assert cluster.server.done


def test_another_process_of_the_user_stops_the_stream(cluster, tmp_path):
    address = cluster.cluster_meta["server_addr"]
    client = reservation.Client(address)
    with pytest.raises(SettingsError, match="no cluster of this user reads a stream at"):
        client.request_stop()
    stream_stop.publish(cluster._reserved)
    (path,) = (tmp_path / "tfos" / "streams").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    client.request_stop()
    assert cluster.server.done
    assert cluster._coordinator.read(lambda state: state.streams_stop)
    assert not cluster._coordinator.read(lambda state: state.training_stop)
    cluster.abort()
    assert not path.exists()


@pytest.mark.attack("A15")
def test_a_streams_ticket_does_nothing_but_stop_the_stream(cluster):
    """It lies in the home directory, which other hosts may share."""
    answered = {}
    stream_stop.publish(cluster._reserved)
    [found] = ticket.read_streams(cluster.cluster_meta["server_addr"][1])
    with operator.Operator(found) as holder:
        for what in ("status", "log", "save", "stop"):
            with contextlib.suppress(ControlRefused):
                answered[what] = holder.ask(messages.Ask(what, node="worker:0"))
    assert answered == {}
    assert not cluster._coordinator.read(lambda state: state.training_stop)


def test_a_ticket_of_another_cluster_stops_nothing(spark, cluster, monkeypatch):
    second = TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK)
    _, port = second.cluster_meta["server_addr"]
    left("other", port, cluster._reserved.keys.authority.node(OPERATOR_NAME))
    monkeypatch.setattr(operator, "_ASK_S", 0.5)
    with pytest.raises(ControlError):
        operator.end_streams("127.0.0.1", port)
    assert not second.server.done
    second.abort()


def test_a_node_may_not_stop_streams(cluster):
    settings = cluster._reserved.settings
    _, port = cluster.cluster_meta["server_addr"]
    left(settings.cluster_id, port, cluster._reserved.keys.authority.node("worker:0"))
    with pytest.raises(ControlRefused, match="'worker:0' may not ask"):
        operator.end_streams("127.0.0.1", port)
    assert not cluster.server.done


def test_a_cache_that_others_can_write_holds_no_ticket(cluster, tmp_path, capsys):
    os.makedirs(tmp_path / "tfos" / "streams")
    os.chmod(tmp_path / "tfos" / "streams", 0o777)
    stream_stop.publish(cluster._reserved)
    assert "no other process can stop this stream" in capsys.readouterr().err
    cluster.server.stop()
    assert cluster.server.done


def test_the_driver_listens_where_the_environment_says(spark, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("TFOS_SERVER_PORT", str(port))
        with pytest.raises(ControlError, match=f"cannot listen on .*:{port}"):
            TFCluster.reserve(spark, 2, 1)
        monkeypatch.setenv("TFOS_SERVER_PORT", f"{port}-{port + 50}")
        monkeypatch.setenv("TFOS_SERVER_HOST", "localhost")
        cluster = TFCluster.reserve(spark, 2, 1)
        host, found = cluster.cluster_meta["server_addr"]
        assert host == "localhost"
        assert port < found <= port + 50
        cluster.abort()


@pytest.mark.parametrize("text", ["x", "0", "70000", "9-", "-9", "9999-9997"])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(SettingsError, match="TFOS_SERVER_PORT="):
        server_address.wanted_ports({"TFOS_SERVER_PORT": text})
    assert server_address.wanted_ports({}) == (0,)


def test_ten_epochs_for_none_are_said(spark, capsys):
    cluster = TFCluster.run(spark, nothing, {}, 2, 1, input_mode=InputMode.SPARK)
    cluster.train(spark.parallelize([1], 1))
    assert "num_epochs=0 feeds the data 10 times" in capsys.readouterr().err
    cluster.shutdown()


def test_run_takes_the_settings_of_reserve(spark):
    config = ClusterConfig(reservation_timeout_s=77, verbose=False)
    cluster = TFCluster.run(spark, nothing, {}, 1, 0, config=config)
    cluster.abort()
    assert cluster._settings.config == config
    with pytest.raises(SettingsError, match="reservation_timeout=60 beside config=: write"):
        TFCluster.run(spark, nothing, {}, 1, 0, reservation_timeout=60, config=config)
    with pytest.raises(SettingsError, match=r"config must be a tfos\.ClusterConfig or None"):
        TFCluster.run(spark, nothing, {}, 1, 0, config={})  # type: ignore[arg-type]


class Parallel:
    """A cluster whose end is played."""

    def __init__(self, *failures, error=None):
        self.failures, self.error, self.aborted = failures, error, False

    def run(self, sc, main_fun, args, num_executors, num_ps):
        self.main_fun, self.args = main_fun, (args, num_executors, num_ps)
        return self

    def shutdown(self, timeout=259_200.0):
        self.timeout_s = timeout
        if self.error is not None:
            raise self.error

    def abort(self, reason):
        self.aborted = True


def test_parallel_runs_are_a_cluster_without_servers_and_without_tf_config(monkeypatch):
    cluster = Parallel()
    monkeypatch.setattr(TFParallel, "TFCluster", cluster)
    monkeypatch.setenv("TF_CONFIG", "{}")
    TFParallel.run(None, lambda args, ctx: (args, ctx, os.environ.get("TF_CONFIG")), ["x"], 4)
    assert (cluster.args, cluster.timeout_s) == ((["x"], 4, 0), None)
    assert cluster.main_fun("args", "ctx") == ("args", "ctx", None)


def test_a_parallel_run_that_fails_or_is_lost_is_an_error(monkeypatch):
    failing = Parallel(error=ValueError("no such file"))
    monkeypatch.setattr(TFParallel, "TFCluster", failing)
    with pytest.raises(ValueError, match="no such file"):
        TFParallel.run(None, nothing, {}, 2, use_barrier=False)
    assert failing.aborted
    lost = Parallel(NodeFailure(NodeId("worker", 1), "h", 7, message="killed"))
    monkeypatch.setattr(TFParallel, "TFCluster", lost)
    with pytest.raises(NodeFailedError, match="killed"):
        TFParallel.run(None, nothing, {}, 2)


def test_tickets_of_killed_drivers_are_removed_and_not_tried(cluster, capfd, monkeypatch):
    """A fixed TFOS_SERVER_PORT: each killed driver of that port had left a file with a key."""
    _, port = cluster.cluster_meta["server_addr"]
    keys = cluster._reserved.keys.authority.node(OPERATOR_NAME)
    killed = [left(f"0-killed-{number}", port, keys) for number in range(20)]
    for path in killed:
        found = msgspec.msgpack.decode(path.read_bytes(), type=ticket.DriverTicket)
        earlier = msgspec.structs.replace(found, started="1")  # of this pid, long ago
        path.write_bytes(msgspec.msgpack.encode(earlier))
    asked: list[str] = []

    def noted(address: str, name: str, *rest: Any) -> ControlClient:
        asked.append(name)
        return ControlClient(address, name, *rest)

    monkeypatch.setattr(operator, "ControlClient", noted)
    stream_stop.publish(cluster._reserved)
    assert not any(path.exists() for path in killed)
    reservation.Client(("127.0.0.1", port)).request_stop()
    cluster._reserved.console.flush(5.0)
    # The old name of the module is there for those alone who have installed its forwarders.
    assert "from tfos.tensorflowonspark import reservation;" in capfd.readouterr().err
    assert asked == [cluster.cluster_id]


def test_a_host_with_the_same_home_stops_the_stream_by_the_address_that_it_names(cluster):
    """Whether the driver of another host lives cannot be told; another port's is not asked."""
    stream_stop.publish(cluster._reserved)
    (path,) = ticket.directory_of_streams().iterdir()
    found = msgspec.msgpack.decode(path.read_bytes(), type=ticket.DriverTicket)
    _, port = cluster.cluster_meta["server_addr"]
    there = msgspec.structs.replace(found, kernel="another", address=f"driver.example:{port}")
    path.write_bytes(msgspec.msgpack.encode(there))
    with pytest.raises(SettingsError, match="no cluster of this user reads a stream at"):
        reservation.Client(("127.0.0.1", port + 1)).request_stop()
    reservation.Client(("127.0.0.1", port)).request_stop()
    assert cluster.server.done
