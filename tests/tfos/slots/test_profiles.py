"""What Spark is asked for the nodes of each role, and what it is not asked because it cannot."""

from __future__ import annotations

import pytest

from tfos import ClusterConfig, Resources
from tfos.errors import ConfigError, SettingsError
from tfos.slots.profiles import needs_of, profiles_of, rooms_mib
from tfos.slots.resources import RoleResources
from tfos.spark import executor_memory
from tfos.spark.facts import SparkFacts
from tfos.spark.shares import NodeShare
from tfos.topology import plan

EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
GPUS = {"spark.task.resource.gpu.amount": "1", EXECUTOR_GPUS: "1"}
FIXED = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "3",
    "spark.dynamicAllocation.maxExecutors": "3",
}
PLAN = plan(3, 1)
PS, WORKER = PLAN.servers[0], PLAN.workers[0]


def _profiles(asked: RoleResources, master: str = "yarn", **conf: str):
    facts = SparkFacts(master, "app", conf, "file:///")
    return profiles_of(asked, PLAN, facts, ClusterConfig())


def _workers(**asked) -> RoleResources:
    return RoleResources(workers=Resources(**asked))


def test_without_resources_nothing_is_asked():
    assert not _profiles(RoleResources()).groups
    assert not _profiles(RoleResources(), master="local[4]", **GPUS).groups
    assert not _profiles(
        RoleResources(), **GPUS, **{"spark.dynamicAllocation.enabled": "true"}
    ).groups


def test_a_role_without_dynamic_allocation_has_cores_and_gpus_of_its_tasks():
    found = _profiles(_workers(cores=4, gpus=1), **{EXECUTOR_GPUS: "1"})
    profile = found.of(WORKER)
    assert profile is not None
    assert (profile.share, profile.task_resources) == (NodeShare(4, 1), (("gpu", 1.0),))
    assert (profile.executor, profile.threads) == (None, 4)
    assert found.of(PS) is None
    needs = needs_of(PLAN, found, "spread")
    assert needs.slots_by_node() == {"ps:0": 1, "worker:0": 4, "worker:1": 4}
    assert str(needs) == "1 x 1 core + 2 x 4 cores and 1 GPU"


def test_a_server_takes_no_gpu_where_every_task_takes_one():
    found = _profiles(RoleResources(), **GPUS)
    profile = found.of(PS)
    assert profile is not None
    assert (profile.share, profile.task_resources) == (NodeShare(1, 0), ())
    assert found.of(WORKER) is None
    assert found.share(WORKER) == NodeShare(1, 1)


def test_other_resources_of_tasks_stay_with_workers():
    conf = {**GPUS, "spark.task.resource.fpga.amount": "2"}
    profile = _profiles(_workers(cores=2), **conf).of(WORKER)
    assert profile is not None
    assert profile.task_resources == (("fpga", 2.0), ("gpu", 1.0))


def test_who_wants_no_gpu_where_every_task_takes_one_gets_none():
    profile = _profiles(_workers(gpus=0), **GPUS).of(WORKER)
    assert profile is not None
    assert (profile.share, profile.task_resources) == (NodeShare(1, 0), ())


def test_servers_take_no_other_resource_of_tasks():
    conf = {"spark.task.resource.fpga.amount": "2"}
    profile = _profiles(RoleResources(ps=Resources(cores=2)), **conf).of(PS)
    assert profile is not None
    assert profile.task_resources == ()


@pytest.mark.parametrize(
    ("asked", "conf", "is_refused"),
    [
        (RoleResources(placement="spread"), FIXED, False),
        (RoleResources(workers=Resources(cores=1), placement="spread"), {}, False),
        (RoleResources(placement="pack"), GPUS, False),
        (RoleResources(placement="pack"), {**FIXED, **GPUS}, True),  # servers get a profile
    ],
)
def test_a_placement_is_refused_only_where_spark_makes_executors_for_nodes(asked, conf, is_refused):
    refusals: list[str] = []
    try:
        _profiles(asked, **conf)
    except ConfigError as error:
        refusals.append(str(error))
    assert bool(refusals) is is_refused
    assert all("with dynamic allocation" in each for each in refusals)


def test_each_node_of_a_role_may_have_the_last_executor():
    two = dict.fromkeys(list(FIXED)[1:], "2")
    assert _profiles(_workers(cores=1), **FIXED | two).of(WORKER)


def test_with_as_many_executors_at_least_as_at_most_a_role_has_executors_of_its_own():
    asked = RoleResources(ps=Resources(memory="8g"), workers=Resources(cores=4, gpus=1))
    found = _profiles(asked, **FIXED)
    servers, workers = found.of(PS), found.of(WORKER)
    assert servers is not None
    assert servers.executor is not None
    assert servers.executor.memory == "8g"
    assert servers.executor.is_contained
    assert workers is not None
    assert workers.executor is not None
    assert workers.executor.memory is None
    assert needs_of(PLAN, found, None).nodes == ()
    of_all = executor_memory.of_settings({"spark.executor.memoryOverhead": "3g"}, "yarn")
    rooms = rooms_mib(PLAN, found, of_all)
    assert rooms == {"ps:0": 8192, "worker:0": 3072, "worker:1": 3072}


@pytest.mark.parametrize(
    ("asked", "master", "conf", "message"),
    [
        (_workers(cores=2), "local[4]", {}, r"Resources\(cores=2\) on master local\[4\]"),
        (_workers(memory="8g"), "yarn", {}, "Spark gives no role memory of its own"),
        (
            _workers(memory="8g"),
            "yarn",
            {"spark.dynamicAllocation.enabled": "true"},
            "minExecutors and spark.dynamicAllocation.maxExecutors to the same number",
        ),
        (
            _workers(cores=8),
            "yarn",
            {"spark.executor.cores": "4"},
            "each node needs 8 on one executor, and spark.executor.cores is 4",
        ),
        (
            _workers(gpus=1),
            "yarn",
            {},
            "needs 1 on one executor, and spark.executor.resource.gpu.amount is not set",
        ),
        (
            _workers(cores=1),
            "yarn",
            {**FIXED, "spark.dynamicAllocation.minExecutors": "1"}
            | {"spark.dynamicAllocation.maxExecutors": "1"},
            "each of 2 nodes has an executor, and spark.dynamicAllocation.maxExecutors=1",
        ),
        (
            RoleResources(workers=Resources(cores=1), placement="spread"),
            "yarn",
            FIXED,
            "placement='spread' with dynamic allocation",
        ),
    ],
)
def test_what_spark_cannot_do_is_refused_with_the_next_step(asked, master, conf, message):
    with pytest.raises(ConfigError, match=message):
        _profiles(asked, master, **conf)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ps": Resources(gpus=1)}, "a parameter server computes without GPUs"),
        ({"workers": {"cores": 2}}, "worker_resources must be a tfos.Resources"),
        ({"placement": "near"}, "placement must be 'spread', 'pack' or None, got 'near'"),
    ],
)
def test_what_contradicts_itself_is_refused(asked, message):
    with pytest.raises(SettingsError, match=message):
        _profiles(RoleResources(**asked))


def test_resources_of_servers_that_take_no_task_are_refused():
    asked = RoleResources(ps=Resources(cores=2))
    with pytest.raises(SettingsError, match="num_ps=0: there is no parameter server"):
        asked.check(plan(2, 0), "gpu")
    with pytest.raises(SettingsError, match="driver_ps_nodes=True"):
        asked.check(plan(3, 1, driver_ps_nodes=True), "gpu")


def test_gpus_that_no_node_may_see_are_refused():
    with pytest.raises(SettingsError, match="gpu_resource=None"):
        _workers(gpus=1).check(PLAN, None)


def test_hidden_gpus_take_part_of_slots_all_the_same():
    facts = SparkFacts("yarn", "app", GPUS, "file:///")
    found = profiles_of(RoleResources(), PLAN, facts, ClusterConfig(gpu_resource=None))
    assert found.share(WORKER) == NodeShare(1, 1)
    assert found.share(PS) == NodeShare(1, 0)
