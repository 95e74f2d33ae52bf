"""Resource profiles: what is requested from Spark for the nodes of each role.

Without dynamic allocation all executors are alike, and a profile only has tasks: cores and GPUs.
If the minimum of executors equals the maximum, each node of a profile has its own executor.

Covers: refusals of what this Spark cannot do, the shares to count, Spark's own objects.
Does not: check the arguments themselves (tfos.slots.resources) or count (tfos.slots.offer).
Threads: any.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfos.config import ClusterConfig, InputMode
from tfos.errors import ConfigError
from tfos.slots.offer import Offer
from tfos.slots.placing import Fit, PlacedNode, SlotNeeds
from tfos.slots.resources import (
    PS_NODES,
    WORKER_NODES,
    Placement,
    Resources,
    RoleResources,
    group_of,
)
from tfos.spark import executor_memory
from tfos.spark.facts import SparkFacts, fixed_executors
from tfos.spark.node_rdd import task_location
from tfos.spark.shares import NodeShare
from tfos.topology import Plan, PlannedNode

_ARGUMENTS = {PS_NODES: "ps_resources", WORKER_NODES: "worker_resources"}


@dataclass(frozen=True, slots=True)
class ExecutorRequest:
    """The executor that Spark makes for one node of a profile."""

    memory: str | None
    is_contained: bool
    """Whether nodes use a container's overhead; otherwise memory is what the host books."""
    gpu: tuple[str, str, str]
    """Spark's name of the GPUs, their discovery script and vendor."""


@dataclass(frozen=True, slots=True)
class GroupProfile:
    """What is requested from Spark for each node of a group."""

    share: NodeShare
    task_resources: tuple[tuple[str, float], ...] = ()
    """Resources besides cores, by Spark's name."""
    executor: ExecutorRequest | None = None
    """The executor to request; None: the node runs on the common executors."""
    threads: int = 0
    """Number of compute threads of the node; 0: not stated."""

    def build(self) -> Any:
        """Return Spark's profile; a SparkContext must be running."""
        from pyspark.resource import (
            ExecutorResourceRequests,
            ResourceProfileBuilder,
            TaskResourceRequests,
        )

        tasks = TaskResourceRequests().cpus(self.share.cores)
        for name, amount in self.task_resources:
            tasks.resource(name, amount)
        builder = ResourceProfileBuilder().require(tasks)
        if self.executor is not None:
            wanted = ExecutorResourceRequests().cores(self.share.cores)
            if self.executor.memory is not None and self.executor.is_contained:
                wanted.memoryOverhead(self.executor.memory)
            elif self.executor.memory is not None:
                wanted.memory(self.executor.memory)
            if self.share.gpus:
                name, script, vendor = self.executor.gpu
                wanted.resource(name, math.ceil(self.share.gpus), script, vendor)
            builder.require(wanted)
        return builder.build


@dataclass(frozen=True, slots=True)
class RoleProfiles:
    """The profiles of a cluster's groups of nodes."""

    task: NodeShare
    """Share of a task without a profile."""
    groups: Mapping[str, GroupProfile] = field(default_factory=dict)
    """Profile by group; without an entry: a task as in Spark's settings."""

    def of(self, node: PlannedNode) -> GroupProfile | None:
        """Return the profile of a node; None: it has none."""
        return self.groups.get(group_of(node))

    def share(self, node: PlannedNode) -> NodeShare | None:
        """Return a node's share of the common executors; None: it has its own executor."""
        profile = self.of(node)
        return self.share_of(node) if profile is None or profile.executor is None else None

    def share_of(self, node: PlannedNode) -> NodeShare:
        """Return the share of its executor that a node's task takes, common or its own."""
        profile = self.of(node)
        return self.task if profile is None else profile.share


def profiles_of(
    asked: RoleResources, plan: Plan, facts: SparkFacts, config: ClusterConfig
) -> RoleProfiles:
    """Return the profiles of the cluster's nodes.

    If Spark's settings give every task a GPU, parameter servers have a profile without GPUs.

    Args:
        asked: the resources passed to reserve().
        plan: the nodes.
        facts: Spark's settings.
        config: the cluster's configuration.

    Raises:
        SettingsError: the request contradicts itself or the plan.
        ConfigError: this Spark cannot do what is requested; names the argument and what to do.
    """
    asked.check(plan, config.gpu_resource)
    task = facts.task_share(config.gpu_resource)
    present = {group_of(node) for node in plan.on_executors}
    wanted = {PS_NODES: asked.ps, WORKER_NODES: asked.workers}
    given = {group: each for group, each in wanted.items() if each and not each.is_empty}
    num_executors = fixed_executors(facts.conf)
    for group, resources in given.items():
        _refuse(f"{_ARGUMENTS[group]}={resources}", resources, facts, config)
    if asked.placement and (given or task.gpus) and num_executors is not None:
        raise ConfigError(
            f"placement={asked.placement!r} with dynamic allocation: Spark makes new executors "
            "where the cluster manager has room, when its nodes start. Leave out placement, or set "
            "spark.dynamicAllocation.enabled=false."
        )
    if PS_NODES in present and task.gpus and _has_profiles(facts):
        given.setdefault(PS_NODES, Resources())
    groups = {
        group: _profile(group, resources, task, facts, config)
        for group, resources in given.items()
        if group in present
    }
    if num_executors is not None:
        for group in groups:
            _check_count(group, plan, num_executors)
    return RoleProfiles(task, groups)


def needs_of(
    plan: Plan,
    profiles: RoleProfiles,
    placement: Placement | None,
    mode: InputMode = InputMode.TENSORFLOW,
) -> SlotNeeds:
    """Return what the cluster's nodes take from the common executors.

    Args:
        plan: the nodes.
        profiles: profiles of the nodes.
        placement: placement of each role's nodes.
        mode: input mode, which decides who reads the data.
    """
    placed = tuple(
        PlacedNode(node.name, group_of(node), share)
        for node in plan.on_executors
        if (share := profiles.share(node)) is not None
    )
    num_fed = plan.num_workers if mode is InputMode.SPARK else 0
    return SlotNeeds(str(plan), placed, profiles.task, placement, num_fed)


def rooms_mib(
    plan: Plan, profiles: RoleProfiles, of_all: executor_memory.ExecutorMemory
) -> dict[str, float]:
    """Return by node the MiB that its executor's container has for nodes; 0: no container.

    Args:
        plan: the nodes.
        profiles: profiles of the nodes.
        of_all: MiB of the common executors.
    """
    found = {}
    for node in plan.nodes:
        own = (profile := profiles.of(node)) and profile.executor
        asked = own.memory if own and of_all.is_contained else None
        found[node.name] = executor_memory.mib(asked) if asked else of_all.room_mib
    return found


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """How each node's task is requested from Spark."""

    profiles: RoleProfiles
    needs: SlotNeeds
    locations: Mapping[str, str]
    """Location by node, as from `node_rdd.task_location`; without an entry: anywhere."""
    hosts: Mapping[str, str]
    """Spark's host name by executor."""

    def note(self, executors: Mapping[str, tuple[str, str]]) -> str:
        """Return what the placement did not achieve; "" if nothing.

        Args:
            executors: by node, its executor and the host name that the node reports.
        """
        hosts = {node: self.hosts.get(each, host) for node, (each, host) in executors.items()}
        return self.needs.host_note(hosts, len(set(self.hosts.values())))


def places_of(profiles: RoleProfiles, needs: SlotNeeds, offer: Offer, fit: Fit) -> NodePlaces:
    """Return where each node goes; nodes of one slot each go wherever Spark decides.

    Args:
        profiles: profiles of the roles.
        needs: needs of the cluster's nodes.
        offer: the executors.
        fit: how the cluster fits there.
    """
    hosts = {executor.executor_id: executor.host for executor in offer.executors}
    locations = {node: task_location(hosts[each], each) for node, each in fit.executors.items()}
    return NodePlaces(profiles, needs, locations, hosts)


def spark_profile(sc: Any, profile: GroupProfile) -> Any:
    """Return Spark's profile, the same for the same request: a new profile may start new executors.

    Args:
        sc: the SparkContext.
        profile: profile of a group.
    """
    with _lock:
        known = _built.setdefault(sc, {})
        if profile not in known:
            known[profile] = profile.build()
        return known[profile]


_built: weakref.WeakKeyDictionary[Any, dict[GroupProfile, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _has_profiles(facts: SparkFacts) -> bool:
    """Whether this Spark runs tasks of a profile, on a known number of executors."""
    return not facts.is_in_driver and not facts.may_have_more


def _refuse(what: str, asked: Resources, facts: SparkFacts, config: ClusterConfig) -> None:
    if facts.is_in_driver:
        raise ConfigError(
            f"{what} on master {facts.master}: its tasks are threads of the driver's Java, where "
            "Spark has no resource profiles. Leave it out, or use a cluster manager or "
            "local-cluster[N,CORES,MIB]."
        )
    if facts.is_dynamic:
        if fixed_executors(facts.conf) is None:
            raise ConfigError(
                f"{what} with dynamic allocation needs as many executors at least as at most: set "
                "spark.dynamicAllocation.minExecutors and spark.dynamicAllocation.maxExecutors to "
                "the same number, that of the larger role's nodes or more."
            )
        return
    if asked.memory is not None:
        raise ConfigError(
            f"{what}: without dynamic allocation all executors are alike, and Spark gives no role "
            f"memory of its own. Leave out memory and set spark.executor.memoryOverhead for all of "
            "them; or set spark.dynamicAllocation.enabled=true, with "
            "spark.dynamicAllocation.minExecutors and maxExecutors the same number."
        )
    for limit, count in (
        ("spark.executor.cores", asked.cores),
        (f"spark.executor.resource.{config.gpu_resource}.amount", asked.gpus),
    ):
        has = facts.conf.get(limit, "0" if ".resource." in limit else None)
        if count and has is not None and float(has) < count:
            raise ConfigError(
                f"{what}: each node needs {count} on one executor, and {limit} is "
                f"{facts.conf.get(limit, 'not set')}. Set it to {count} or more, or ask for less."
            )


def _profile(
    group: str, asked: Resources, default: NodeShare, facts: SparkFacts, config: ClusterConfig
) -> GroupProfile:
    is_ps = group == PS_NODES
    gpus = 0.0 if is_ps else default.gpus if asked.gpus is None else float(asked.gpus)
    share = NodeShare(asked.cores or default.cores, gpus)
    name = facts.counted_resource(config.gpu_resource)
    resources = {} if is_ps else facts.task_resources
    resources.pop(name, None)
    if gpus:
        resources[name] = gpus
    executor = None
    if facts.is_dynamic:
        key = f"spark.executor.resource.{name}"
        script, vendor = (
            facts.conf.get(f"{key}.{each}", "") for each in ("discoveryScript", "vendor")
        )
        is_contained = executor_memory.is_contained(facts.master)
        executor = ExecutorRequest(asked.memory, is_contained, (name, script, vendor))
    return GroupProfile(share, tuple(sorted(resources.items())), executor, asked.cores or 0)


def _check_count(group: str, plan: Plan, num_executors: int) -> None:
    count = sum(group_of(node) == group for node in plan.nodes)
    if count > num_executors:
        raise ConfigError(
            f"{_ARGUMENTS[group]} with dynamic allocation: each of {count} nodes has an executor, "
            f"and spark.dynamicAllocation.maxExecutors={num_executors} is Spark's limit for each "
            f"role. Set minExecutors and maxExecutors to {count}, or use fewer nodes."
        )
