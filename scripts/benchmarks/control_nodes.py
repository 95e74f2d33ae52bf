"""What does a driver spend on 1,000 nodes: their start, heartbeats, the loss of 50, their end?

Figures: SIM.
Method: the driver's own control plane in this process: certificates, coordinator, gRPC server with
    mutual TLS, the wait for main_fun, shutdown. Its nodes are in other processes, "hosts" of 50
    each (simulated_hosts.py), with the default rhythm of heartbeats; nodes have no child, and there
    is no Spark. All register at once. After a time of heartbeats one host is killed, with SIGKILL.
    Then main_fun returns everywhere, and the driver shuts down. Per phase: seconds, and CPU
    milliseconds of this process per node; at the peak its memory, threads and descriptors per node.
Caveats: all hosts share this machine's cores with the driver, so the seconds are an upper bound.
    The loss includes the 3 s in which a closed connection may return.
Bar: none; the seconds that a user waits for, and what the driver's host must have.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import psutil

from rpc.auth.handshake import Credentials
from scripts.benchmarks.harness import Figure, parse_arguments, report
from scripts.benchmarks.simulated_hosts import HOST, hosts_of
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.main_fun_wait import MainFunWait
from tfos.driver.shutdown import Shutdown
from tfos.phases import ClusterPhase
from tfos.topology import Plan, plan

CLUSTER_ID = "simulation"
WAIT_S = 300.0
BEATING_S = 20.0
NUM_PS = 10
PER_HOST = 50
NUM_HOSTS = 20
TOY_HOSTS, TOY_PER_HOST, TOY_PS, TOY_BEATING_S = 2, 3, 1, 0.5


@dataclass
class Measured:
    """Seconds and CPU seconds of each phase, and what the driver held when most was running."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block."""
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.perf_counter() - begun_s
        self.cpu_s[name] = time.process_time() - cpu_s


def held() -> dict[str, float]:
    """Return what this process holds now."""
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss / 1024,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }


class NoJobs:
    """The jobs of a cluster whose nodes are no Spark tasks; see tfos.driver.node_jobs."""

    def end(self, timeout_s: float) -> bool:
        """Return whether every job has ended."""
        del timeout_s
        return True

    def is_bringing(self, ended: Collection[str]) -> bool:
        """Return whether Spark still brings what these nodes have handed over."""
        del ended
        return False

    def values(self) -> dict[str, bytes]:
        """Return what the nodes' tasks brought back."""
        return {}


def simulate(layout: Plan, per_host: int, beating_s: float, config: ClusterConfig) -> Measured:
    """Run one cluster from its keys to its end.

    Args:
        layout: the nodes.
        per_host: nodes of a host.
        beating_s: seconds of heartbeats that are measured.
        config: the cluster's config.
    """
    measured = Measured()
    gc.collect()  # what is freed meanwhile would count for the nodes
    before = held()
    with measured.phase("keys"):
        authority = ClusterAuthority(CLUSTER_ID)
        nodes = [(each.role, each.index, authority.node(each.name)) for each in layout.nodes]
    console = Console(enabled=False)
    coordinator = Coordinator(layout, config, console)
    ending = Shutdown(coordinator, config, console, Credentials.generate())
    ending.begin(NoJobs())  # type: ignore[arg-type]  # all that it asks of them
    address = f"{HOST}:{coordinator.start(HOST, authority.driver())}"
    wait = MainFunWait(coordinator, console, is_fed=False)
    try:
        with hosts_of(address, CLUSTER_ID, nodes, per_host) as hosts:
            with measured.phase("start"):
                hosts.tell_all()
                _await(coordinator, lambda state: state.phase is not ClusterPhase.RESERVED)
            _await(coordinator, _all_train)
            wait.wait(beating_s / 2)  # a connection's first calls cost more
            with measured.phase("heartbeats"):
                wait.wait(beating_s)
            measured.held = {name: value - before[name] for name, value in held().items()}
            with measured.phase("loss"):
                hosts.lose_last()
                _await(coordinator, lambda state: _num(state, NodeStatus.LOST) == per_host)
            with measured.phase("main_fun returns"):
                hosts.tell_all()
                _await(coordinator, lambda state: not state.training())
            with measured.phase("shutdown"):
                ending.shutdown((), grace_s=0.0, timeout_s=WAIT_S)
            _check(coordinator, len(layout.nodes), per_host)
    finally:
        ending.abort("the simulation is over")
    return measured


def _await(coordinator: Coordinator, done: Callable[[ClusterView], bool]) -> None:
    reached = coordinator.wait(lambda state: bool(state.fatal) or done(state), WAIT_S)
    if error := coordinator.error():
        raise error
    if not reached:
        raise RuntimeError(f"not reached within {WAIT_S:.0f} s: {_counts(coordinator)}")


def _all_train(state: ClusterView) -> bool:
    return all(worker.phase == "main_fun" for worker in state.workers)


def _num(state: ClusterView, status: NodeStatus) -> int:
    return sum(member.status is status for member in state.members.values())


def _counts(coordinator: Coordinator) -> dict[str, int]:
    found = coordinator.read(lambda state: {each.value: _num(state, each) for each in NodeStatus})
    return {name: count for name, count in found.items() if count}


def _check(coordinator: Coordinator, num_nodes: int, num_lost: int) -> None:
    """Every node that was not killed has confirmed its end, and none was lost beside those."""
    counts = _counts(coordinator)
    expected = {NodeStatus.LOST.value: num_lost, NodeStatus.ENDED.value: num_nodes - num_lost}
    if counts != expected:
        raise RuntimeError(f"the nodes ended as {counts}, not as {expected}")


def main() -> None:
    """Print the figures."""
    args = parse_arguments(__doc__, repeats=3)
    num_hosts, per_host, num_ps, beating_s = (
        (TOY_HOSTS, TOY_PER_HOST, TOY_PS, TOY_BEATING_S)
        if args.toy
        else (NUM_HOSTS, PER_HOST, NUM_PS, BEATING_S)
    )
    reconnect_s = 0.5 if args.toy else ClusterConfig().reconnect_s
    config = ClusterConfig(verbose=False, reconnect_s=reconnect_s)
    layout = plan(num_hosts * per_host, num_ps)
    count = len(layout.nodes)
    runs = [simulate(layout, per_host, beating_s, config) for _ in range(args.repeats)]
    for name in runs[0].seconds:
        what = f"loss of {per_host}" if name == "loss" else name
        if name != "heartbeats":
            figure = Figure("SIM", f"{what}, {count} nodes", "s", "lower")
            report(figure, [run.seconds[name] for run in runs])
        # Of a phase as long as its nodes train, what counts is a node's cost each second.
        per_s = [run.seconds[name] if name == "heartbeats" else 1.0 for run in runs]
        cpu = [1e3 * run.cpu_s[name] / count / s for run, s in zip(runs, per_s, strict=True)]
        unit = "ms/node/s" if name == "heartbeats" else "ms/node"
        report(Figure("SIM", f"{what}: CPU of the driver", unit, "lower"), cpu)
    for name, unit in (("memory", "KiB"), ("threads", "count"), ("descriptors", "count")):
        figure = Figure("SIM", f"{name} of the driver per node", unit, "lower")
        report(figure, [run.held[name] / count for run in runs])


if __name__ == "__main__":
    main()
