"""What a node task captures, and where it finds itself."""

import cloudpickle
import pytest
from pyspark.resource import ResourceInformation

from rpc.auth.certificates import TlsCredentials
from tests.support.nodes import node_settings
from tfos.errors import NodeStartError
from tfos.node import task
from tfos.node.spec import LaunchStatus, NodeBundle, State
from tfos.node.task import NodeTask, find_executor
from tfos.topology import PlannedNode


def make_bundle(**settings):
    return NodeBundle(
        node=PlannedNode("worker", 1, 1),
        control_keys=TlsCredentials(b"CERT", b"KEY", b"CA"),
        rpc_secret=b"S" * 32,
        main_fun=b"\x80not loaded here",
        settings=node_settings(**settings),
    )


def test_a_task_and_its_bundle_survive_sparks_pickling():
    node_task = NodeTask(hold_slot=True)
    bundle = make_bundle()
    assert cloudpickle.loads(cloudpickle.dumps((node_task, bundle))) == (node_task, bundle)
    assert len(cloudpickle.dumps(node_task)) < 500, "it travels with every task: nothing captured"


@pytest.mark.parametrize("count", [0, 2])
def test_a_partition_without_exactly_one_node_is_refused(count):
    node_task = NodeTask(hold_slot=True)
    with pytest.raises(NodeStartError, match=f"partition 4 holds {count} nodes, expected 1"):
        list(node_task(4, iter([make_bundle()] * count)))


@pytest.fixture
def jvm(monkeypatch):
    """Pretend that this process lies below an executor's JVM."""
    options: dict[str, str] = {}
    monkeypatch.setattr("tfos.node.procfs.java_ancestor", lambda: 4711)
    monkeypatch.setattr(
        "tfos.node.procfs.command_line_option", lambda _, name: options.get(name, "")
    )
    for name in ("SPARK_LOCAL_IP", "LOCAL_DIRS", "SPARK_LOCAL_DIRS", "SPARK_EXECUTOR_DIRS"):
        monkeypatch.delenv(name, raising=False)
    return options


@pytest.mark.parametrize(
    ("hostname", "local_ip", "host"),
    [
        ("[fd00::2]", "", "fd00::2"),
        ("[fd00::2]", "::", "fd00::2"),
        ("host-b", "[fd00::3]", "fd00::3"),
    ],
)
def test_a_literal_ipv6_host_of_spark_loses_its_brackets(
    jvm, monkeypatch, hostname, local_ip, host
):
    """Spark writes --hostname [fd00::2]; nothing but a URL takes that."""
    jvm.update({"--executor-id": "5", "--hostname": hostname})
    if local_ip:
        monkeypatch.setenv("SPARK_LOCAL_IP", local_ip)
    assert find_executor(loopback=False, cores=2).host == host


def test_a_remote_executor_advertises_the_host_that_spark_gave_it(jvm, monkeypatch, tmp_path):
    jvm.update({"--executor-id": "5", "--hostname": "host-b"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARK_EXECUTOR_DIRS", f"/nonexistent:{tmp_path}")
    executor = find_executor(loopback=False, cores=2)
    assert (executor.executor_id, executor.host, executor.jvm_pid) == ("5", "host-b", 4711)
    assert (executor.cores, executor.scratch_dir) == (2, str(tmp_path))
    assert executor.log_dir == executor.cwd == str(tmp_path)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_the_address_of_all_is_never_advertised(jvm, monkeypatch, wildcard):
    jvm.update({"--executor-id": "5", "--hostname": "host-b"})
    monkeypatch.setenv("SPARK_LOCAL_IP", wildcard)
    assert find_executor(loopback=False, cores=1).host == "host-b"


def test_spark_local_ip_wins_and_yarns_log_directory_is_used(jvm, monkeypatch, tmp_path):
    jvm.update({"--executor-id": "5", "--hostname": "host-b"})
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.9")
    monkeypatch.setenv("LOG_DIRS", str(tmp_path))
    executor = find_executor(loopback=False, cores=1)
    assert (executor.host, executor.log_dir) == ("10.0.0.9", str(tmp_path))


def test_local_mode_and_a_local_cluster_stay_on_loopback(jvm):
    local = find_executor(loopback=True, cores=1)
    assert (local.executor_id, local.host, local.log_dir) == ("driver", "127.0.0.1", "")
    jvm.update({"--executor-id": "0", "--hostname": "10.1.2.3"})
    near = find_executor(loopback=True, cores=1)
    assert (near.executor_id, near.host) == ("0", "127.0.0.1")


@pytest.mark.parametrize("java", [None, 4711])
def test_a_process_that_sees_no_executor_above_it_is_refused_where_hosts_differ(
    jvm, monkeypatch, java
):
    """It would tell all peers 127.0.0.1, and would not notice the end of its executor."""
    monkeypatch.setattr("tfos.node.procfs.java_ancestor", lambda: java)
    with pytest.raises(NodeStartError, match="no Java with --executor-id is above process") as told:
        find_executor(loopback=False, cores=2)
    assert "PYSPARK_PYTHON" in str(told.value)


def test_the_gpus_of_a_task_are_those_that_spark_gave_it():
    class FakeTaskContext:
        def resources(self):
            return {"gpu": ResourceInformation("gpu", ["1", "GPU-7"])}

    context = FakeTaskContext()
    assert task.gpus_of(context, "gpu") == ("1", "GPU-7")
    assert [
        task.gpus_of(*each) for each in ((context, "fpga"), (context, None), (None, "gpu"))
    ] == [()] * 3
    executor = find_executor(loopback=True, cores=1, gpus=("1", "GPU-7"))
    assert executor.gpus == ("1", "GPU-7")


class PlayedSupervisor:
    """A supervisor that has ended before it registered."""

    def __init__(self, status: LaunchStatus) -> None:
        self.status = status

    def wait(self, states, timeout_s=None):
        return self.status

    def close(self) -> None:
        pass


@pytest.mark.fault("F14")
@pytest.mark.parametrize("is_cut_off", [True, False])
def test_a_node_that_did_not_reach_the_driver_fails_its_task_so_that_spark_tries_another_host(
    monkeypatch, is_cut_off
):
    status = LaunchStatus(State.ENDED, "h did not reach the driver", is_cut_off)
    monkeypatch.setattr("tfos.node.launch.launch", lambda spec: PlayedSupervisor(status))
    bundle = make_bundle(driver_address="127.0.0.1:1", loopback=True)
    if is_cut_off:
        with pytest.raises(
            NodeStartError, match=r"worker:1 on executor driver \(127\.0\.0\.1\): h did"
        ):
            NodeTask(hold_slot=False).at_driver(bundle)
    else:  # refused: another attempt is at work
        assert NodeTask(hold_slot=False).at_driver(bundle).reason == status.reason


@pytest.mark.fault("F14")
def test_a_task_whose_node_a_signal_ends_just_behind_the_start_does_not_fail(monkeypatch):
    """The driver decides about a node of a cluster that runs; the task of a job fails them all."""
    ends = (State.RELEASED, State.ENDED)
    told = [LaunchStatus(State.REGISTERED), *(LaunchStatus(each, "SIGTERM", True) for each in ends)]
    supervisor = PlayedSupervisor(told[0])
    supervisor.wait = lambda states, timeout_s=None: told.pop(0)  # type: ignore[method-assign]
    monkeypatch.setattr("tfos.node.launch.launch", lambda spec: supervisor)
    bundle = make_bundle(driver_address="127.0.0.1:1", loopback=True)
    result = NodeTask(hold_slot=True).at_driver(bundle)
    assert (result.outcome, result.reason) == ("ended", "SIGTERM")


def test_result_names_are_what_the_driver_reads():
    fields = set(task.NodeResult.__dataclass_fields__)
    assert fields == {"name", "outcome", "reason", "value"}
