"""Resources requested for each node of a role, and the placement of its nodes.

Covers: Resources and its checks, RoleResources (both roles and the placement) against the plan.
Does not: know Spark's settings (tfos.slots.profiles) or executors (tfos.slots.placing). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from rpc.field_texts import with_field_texts
from tfos.errors import ConfigError, SettingsError
from tfos.spark import executor_memory
from tfos.topology import PS_ROLE, Plan, PlannedNode

Placement: TypeAlias = Literal["spread", "pack"]
"""Whether nodes of a role go to many hosts or to few."""
PS_NODES = "ps"
WORKER_NODES = "workers"


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources per node of a role: `reserve(..., worker_resources=Resources(cores=4, gpus=1))`."""

    cores: int | None = None
    """Number of cores of its Spark task, at least 1, and of its compute threads unless
    `ClusterConfig(threads_per_node=...)` says otherwise; None: spark.task.cpus."""
    memory: str | None = None
    """Memory of the node's processes, such as "8g". Only with dynamic allocation, where each node
    then has its own executor (docs/guides/resources.md); None: as Spark's settings say."""
    gpus: int | None = None
    """Number of GPUs that Spark gives to the node's task; 0: its processes see none. None: as in
    Spark's settings. A parameter server never has one."""

    def __post_init__(self) -> None:
        for name, at_least in (("cores", 1), ("gpus", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < at_least):
                raise SettingsError(
                    f"Resources({name}=...) must be an int >= {at_least}, or None, got {value!r}."
                )
        if self.memory is not None and not _is_size(self.memory):
            raise SettingsError(
                "Resources(memory=...) must be a size of 1m or more, such as '8g' or '512m', got "
                f"{self.memory!r}."
            )

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs from Spark's settings."""
        return all(getattr(self, each.name) is None for each in fields(self))

    def __str__(self) -> str:
        stated = ((each.name, getattr(self, each.name)) for each in fields(self))
        return f"Resources({', '.join(f'{n}={v!r}' for n, v in stated if v is not None)})"


@dataclass(frozen=True, slots=True)
class RoleResources:
    """The arguments of `reserve(ps_resources=…, worker_resources=…, placement=…)`."""

    ps: Resources | None = None
    workers: Resources | None = None
    """Resources of all nodes except parameter servers: chief, workers, evaluator."""
    placement: Placement | None = None
    """Placement of the nodes; None: Spark decides."""

    def check(self, plan: Plan, gpu_resource: str | None) -> None:
        """Refuse requests that contradict themselves, the plan or gpu_resource.

        Args:
            plan: the nodes.
            gpu_resource: Spark's name of the GPUs; None: no node sees one.

        Raises:
            SettingsError: names the argument, its value and what to do.
        """
        for name, given in (("ps_resources", self.ps), ("worker_resources", self.workers)):
            if given is not None and not isinstance(given, Resources):
                raise SettingsError(f"{name} must be a tfos.Resources or None, got {given!r}.")
        if self.placement is not None and self.placement not in get_args(Placement):
            raise SettingsError(
                f"placement must be 'spread', 'pack' or None, got {self.placement!r}."
            )
        if self.ps is not None:
            self._check_ps(self.ps, plan)
        if self.workers is not None and self.workers.gpus and gpu_resource is None:
            raise SettingsError(
                f"worker_resources={self.workers} with ClusterConfig(gpu_resource=None), which "
                "hides all GPUs. Set gpu_resource to Spark's name of them, such as 'gpu'."
            )

    def _check_ps(self, asked: Resources, plan: Plan) -> None:
        if asked.gpus:
            raise SettingsError(
                f"ps_resources={asked}: a parameter server computes without GPUs. Leave out gpus, "
                "and ask for them in worker_resources."
            )
        if not any(group_of(node) == PS_NODES for node in plan.nodes):
            raise SettingsError(
                f"ps_resources={asked} with num_ps=0: there is no parameter server. Leave it out, "
                "or use num_ps >= 1."
            )
        if plan.servers_at_driver:
            raise SettingsError(
                f"ps_resources={asked} with driver_ps_nodes=True: servers beside the driver take "
                "no task slot. Leave out one of the two."
            )


def group_of(node: PlannedNode) -> str:
    """Return whether a node gets the resources of parameter servers or of workers."""
    return PS_NODES if node.role == PS_ROLE else WORKER_NODES


def _is_size(value: object) -> bool:
    try:
        return isinstance(value, str) and executor_memory.mib(value) >= 1
    except ConfigError:
        return False
