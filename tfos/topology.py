"""Topology: roles, indexes and ranks of a cluster's nodes, planned before anything starts.

Covers: the arithmetic of cluster_size and num_ps and its refusals.
Does not: know Spark (tfos.slots.offer), start anything (tfos.spark.jobs). Pure.

An evaluator stands beside the training: nobody waits for it, it has no rows and no servers, and its
end costs nothing. Its rank is the number of workers, so that servers take no request of it.

With `ps="tensorflow"` the nodes `ps:N` and `worker:N` run TensorFlow's servers, and main_fun runs
on the chief alone: `servers` is empty then, and the chief is the one worker.

The order is TensorFlowOnSpark's: parameter servers first, then the chief under the name the user
chose (`chief` or `master`), then workers. Without such a name `worker:0` is the chief. Worker ranks
count the chief as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tfos.errors import SettingsError, UnsupportedError

PS_ROLE = "ps"
CHIEF_ROLES = ("chief", "master")
WORKER_ROLE = "worker"
TRAINING_ROLES = (*CHIEF_ROLES, WORKER_ROLE)
"""Roles whose nodes wait for each other."""
EVALUATOR_ROLE = "evaluator"
ServersOf: TypeAlias = Literal["tfos", "tensorflow"]
"""Whose parameter servers the nodes `ps:N` are."""


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node of the plan; `rank` counts servers for a PS and workers otherwise."""

    role: str
    index: int
    rank: int
    is_chief: bool = False
    serves_tensorflow: bool = False
    """Runs `tf.distribute.Server` instead of a server of tfos or of main_fun."""

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return f"{self.role}:{self.index}"

    @property
    def is_ps(self) -> bool:
        """Whether this is a parameter server of tfos."""
        return self.role == PS_ROLE and not self.serves_tensorflow

    @property
    def is_evaluator(self) -> bool:
        """Whether this node runs main_fun beside the training."""
        return self.role == EVALUATOR_ROLE

    @property
    def runs_main_fun(self) -> bool:
        """Whether main_fun runs here."""
        return not self.is_ps and not self.serves_tensorflow


@dataclass(frozen=True, slots=True)
class Plan:
    """All nodes of a cluster, parameter servers first."""

    servers: tuple[PlannedNode, ...]
    """Parameter servers of tfos."""
    workers: tuple[PlannedNode, ...]
    """Nodes that run main_fun, the chief first."""
    tensorflow_servers: tuple[PlannedNode, ...] = ()
    """Nodes that run TensorFlow's servers, its parameter servers first."""
    evaluators: tuple[PlannedNode, ...] = ()
    """At most one: it runs main_fun beside the training."""
    servers_at_driver: bool = False
    """Whether parameter servers run beside the driver and take no task slots."""
    is_mirrored: bool = False
    """Whether no worker can go on without another: TensorFlow sums gradients among all of them."""

    @property
    def nodes(self) -> tuple[PlannedNode, ...]:
        """Servers, then workers in rank order, then the evaluator."""
        return self.servers + self.tensorflow_servers + self.workers + self.evaluators

    @property
    def on_executors(self) -> tuple[PlannedNode, ...]:
        """Nodes that are Spark tasks: all but servers beside the driver."""
        return self.nodes[len(self.servers) :] if self.servers_at_driver else self.nodes

    @property
    def num_ps(self) -> int:
        """Parameter servers of tfos."""
        return len(self.servers)

    @property
    def num_workers(self) -> int:
        """Workers that run main_fun, the chief included."""
        return len(self.workers)

    def __str__(self) -> str:
        served = [node.role for node in self.tensorflow_servers]
        if served:
            num_ps, count = served.count(PS_ROLE), served.count(WORKER_ROLE)
            workers = f"{count} worker{'s' if count > 1 else ''}"
            return f"{num_ps} ps + {workers} of TensorFlow + 1 chief"
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        where = " beside the driver" if self.servers_at_driver else ""
        return f"{self.num_ps} ps{where} + {workers}{' + 1 evaluator' if self.evaluators else ''}"


def plan(
    cluster_size: int,
    num_ps: int,
    *,
    master_node: str | None = None,
    ps: ServersOf = "tfos",
    eval_node: bool = False,
    driver_ps_nodes: bool = False,
) -> Plan:
    """Return the nodes of a cluster.

    Args:
        cluster_size: nodes in total, >= 1.
        num_ps: number of parameter servers among them, 0 <= num_ps < cluster_size.
        master_node: role name of the chief, `chief` or `master`; None: `worker:0` is the chief.
        ps: "tfos" or "tensorflow": whose parameter servers these are.
        eval_node: whether one of the nodes is an evaluator.
        driver_ps_nodes: whether parameter servers run beside the driver.

    Raises:
        SettingsError: an argument is not an integer, or the numbers leave no worker.
        UnsupportedError: an unknown role.
    """
    _check_count("cluster_size", cluster_size, at_least=1)
    _check_count("num_ps", num_ps, at_least=0)
    _check_workers_left(cluster_size, num_ps, eval_node)
    if master_node is not None and master_node not in CHIEF_ROLES:
        raise UnsupportedError(
            f"master_node={master_node!r} is not a role of tfos. Use 'chief', 'master', or None: "
            "then worker:0 is the chief."
        )
    if ps not in get_args(ServersOf):
        raise SettingsError(f"ps must be 'tfos' or 'tensorflow', got {ps!r}.")
    if ps == "tensorflow":
        _check_tensorflow(eval_node=eval_node, driver_ps_nodes=driver_ps_nodes)
    if ps == "tensorflow" and num_ps:
        return _tensorflow_plan(cluster_size, num_ps, master_node)
    servers = tuple(PlannedNode(PS_ROLE, index, index) for index in range(num_ps))
    named_chief = [PlannedNode(master_node, 0, 0, is_chief=True)] if master_node else []
    first = len(named_chief)
    workers = [
        PlannedNode(WORKER_ROLE, rank - first, rank, is_chief=rank == 0)
        for rank in range(first, cluster_size - num_ps - eval_node)
    ]
    evaluators = (PlannedNode(EVALUATOR_ROLE, 0, first + len(workers)),) if eval_node else ()
    return Plan(
        servers,
        (*named_chief, *workers),
        evaluators=evaluators,
        servers_at_driver=_are_at_driver(driver_ps_nodes, num_ps),
        is_mirrored=ps == "tensorflow",
    )


def _check_workers_left(cluster_size: int, num_ps: int, eval_node: object) -> None:
    if not isinstance(eval_node, bool):
        raise SettingsError(f"eval_node must be True or False, got {eval_node!r}.")
    if num_ps + eval_node < cluster_size:
        return
    hint = "Use cluster_size >= 2 for one ps and one worker"
    if eval_node:
        hint = f"Use cluster_size >= {num_ps + 2}, of which one node evaluates"
    elif cluster_size > 1:
        hint = f"Use num_ps <= {cluster_size - 1}"
    evaluator = " with eval_node=True" if eval_node else ""
    raise SettingsError(
        f"num_ps={num_ps}{evaluator} leaves no worker: cluster_size={cluster_size}. {hint}."
    )


def _are_at_driver(driver_ps_nodes: object, num_ps: int) -> bool:
    if not isinstance(driver_ps_nodes, bool):
        raise SettingsError(f"driver_ps_nodes must be True or False, got {driver_ps_nodes!r}.")
    if driver_ps_nodes and not num_ps:
        raise SettingsError(
            "driver_ps_nodes=True runs parameter servers beside the driver, and num_ps=0 asks for "
            "none. Use num_ps >= 1, or leave out driver_ps_nodes."
        )
    return driver_ps_nodes


def _check_tensorflow(*, eval_node: bool, driver_ps_nodes: bool) -> None:
    if eval_node:
        raise UnsupportedError(
            "eval_node=True with ps='tensorflow': the evaluator reads checkpoints of tfos, and "
            "TensorFlow's strategies write their own. Evaluate on the chief, or leave out "
            "ps='tensorflow'."
        )
    if driver_ps_nodes:
        raise UnsupportedError(
            "driver_ps_nodes=True with ps='tensorflow': TensorFlow's servers have no login, and "
            "the driver's host should not be opened to a network. Leave out one of the two."
        )


def _tensorflow_plan(cluster_size: int, num_ps: int, master_node: str | None) -> Plan:
    """Return the plan of ParameterServerStrategy: its chief coordinates and does not compute."""
    if master_node not in (None, "chief"):
        raise UnsupportedError(
            f"master_node={master_node!r} with ps='tensorflow': ParameterServerStrategy calls its "
            "coordinator 'chief'. Use 'chief' or None."
        )
    num_workers = cluster_size - num_ps - 1
    if num_workers < 1:
        raise SettingsError(
            f"num_ps={num_ps} with ps='tensorflow' leaves no worker beside the chief: "
            f"cluster_size={cluster_size}. Use cluster_size >= {num_ps + 2}."
        )
    served = [(PS_ROLE, index, index) for index in range(num_ps)]
    served += [(WORKER_ROLE, index, index + 1) for index in range(num_workers)]
    return Plan(
        servers=(),
        workers=(PlannedNode("chief", 0, 0, is_chief=True),),
        tensorflow_servers=tuple(PlannedNode(*each, serves_tensorflow=True) for each in served),
    )


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(
            f"{name} must be an int >= {at_least}, got {value!r} ({type(value).__name__})."
        )
    if value < at_least:
        raise SettingsError(f"{name} must be >= {at_least}, got {value}.")
