"""Which executor each node gets: by cores and GPUs, on many hosts or on few."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfos.slots.placing import Capacity, PlacedNode, SlotNeeds, assign
from tfos.slots.profiles import RoleProfiles, needs_of
from tfos.slots.resources import Placement
from tfos.spark.shares import ONE_CORE, NodeShare
from tfos.topology import plan

GPU_WORKER = NodeShare(2, 1)


def _capacities(*free: tuple[str, int, float]) -> list[Capacity]:
    return [
        Capacity(f"{i}", host, NodeShare(cores, gpus)) for i, (host, cores, gpus) in enumerate(free)
    ]


def _nodes(num_ps: int, num_workers: int, worker: NodeShare = ONE_CORE) -> list[PlacedNode]:
    servers = [PlacedNode(f"ps:{i}", "ps", NodeShare()) for i in range(num_ps)]
    return servers + [PlacedNode(f"worker:{i}", "workers", worker) for i in range(num_workers)]


def _hosts(nodes, executors, placement) -> dict[str, Counter[str]]:
    found = assign(nodes, executors, placement)
    assert found is not None
    hosts = {executor.executor_id: executor.host for executor in executors}
    by_group: dict[str, Counter[str]] = {"ps": Counter(), "workers": Counter()}
    for node in nodes:
        by_group[node.group][hosts[found.executors[node.name]]] += 1
    return by_group


def test_nodes_of_a_role_are_spread_over_hosts():
    executors = _capacities(("a", 4, 0), ("a", 4, 0), ("b", 4, 0), ("c", 4, 0))
    found = _hosts(_nodes(3, 3), executors, "spread")
    assert found == {"ps": Counter("abc"), "workers": Counter("abc")}


def test_nodes_are_packed_on_few_hosts():
    executors = _capacities(("a", 2, 0), ("b", 2, 0), ("a", 2, 0), ("b", 2, 0))
    found = _hosts(_nodes(1, 3), executors, "pack")
    assert len(found["ps"] + found["workers"]) == 1


def test_a_role_is_spread_although_the_other_one_is_on_one_host():
    executors = _capacities(("a", 16, 0), ("b", 2, 0))
    servers = [PlacedNode(f"ps:{i}", "ps", NodeShare(3)) for i in range(3)]
    found = _hosts(servers + _nodes(0, 2), executors, "spread")
    assert found == {"ps": Counter("aaa"), "workers": Counter("ab")}


def test_nodes_of_two_roles_are_on_two_hosts_and_on_two_executors_if_there_are():
    executors = _capacities(("a", 4, 0), ("a", 4, 0), ("b", 4, 0))
    assert _hosts(_nodes(1, 1), executors, "spread") == {
        "ps": Counter("a"),
        "workers": Counter("b"),
    }
    found = assign(_nodes(0, 2), _capacities(("a", 8, 0), ("a", 4, 0)), None)
    assert found is not None
    assert set(found.executors.values()) == {"0", "1"}


@pytest.mark.parametrize("placement", ["spread", "pack", None])
def test_a_placement_that_leaves_no_room_gives_way(placement):
    """Each of them puts a worker where alone the server fits."""
    executors = _capacities(("a", 1, 1), ("a", 3, 1), ("b", 1, 1))
    nodes = [PlacedNode("ps:0", "ps", NodeShare(3)), *_nodes(0, 2, NodeShare(1, 1))]
    found = assign(nodes, executors, placement)
    assert found is not None
    assert found.executors == {"worker:0": "0", "worker:1": "2", "ps:0": "1"}


@pytest.mark.parametrize("placement", ["spread", "pack", None])
def test_large_nodes_are_placed_before_small_ones(placement):
    executors = _capacities(("a", 3, 0), ("b", 1, 1))
    nodes = [*_nodes(1, 0), PlacedNode("worker:0", "workers", NodeShare(3))]
    found = assign(nodes, executors, placement)
    assert found is not None
    assert found.executors == {"ps:0": "1", "worker:0": "0"}


@pytest.mark.parametrize("placement", ["spread", "pack", None])
def test_a_server_leaves_an_executor_with_a_gpu_to_others(placement):
    found = assign(_nodes(1, 0), _capacities(("a", 2, 1), ("a", 2, 0)), placement)
    assert found is not None
    assert found.executors == {"ps:0": "1"}


def test_a_server_takes_no_place_from_a_worker_with_a_gpu():
    executors = _capacities(("a", 2, 1), ("a", 2, 0), ("b", 2, 1))
    found = assign(_nodes(2, 2, GPU_WORKER), executors, None)
    assert found is not None
    assert {found.executors["worker:0"], found.executors["worker:1"]} == {"0", "2"}
    assert {found.executors["ps:0"], found.executors["ps:1"]} == {"1"}


def test_nodes_that_fit_in_sum_but_on_no_executor_have_no_place():
    assert assign(_nodes(0, 1, NodeShare(3)), _capacities(("a", 2, 0), ("a", 2, 0)), None) is None
    assert (
        assign(_nodes(0, 1, NodeShare(1, 2)), _capacities(("a", 2, 1), ("a", 2, 1)), None) is None
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["spread", "pack", None]),
)
def test_no_executor_is_given_more_than_it_has(shares, free, placement):
    nodes = [PlacedNode(f"n:{i}", "ps", NodeShare(*share)) for i, share in enumerate(shares)]
    executors = _capacities(*free)
    found = assign(nodes, executors, placement)
    if found is None:
        return
    assert set(found.executors) == {node.name for node in nodes}
    for executor, left in zip(
        executors, sorted(found.left, key=lambda each: each.executor_id), strict=True
    ):
        taken = [node.share for node in nodes if found.executors[node.name] == executor.executor_id]
        assert left.free.cores == executor.free.cores - sum(each.cores for each in taken) >= 0
        assert left.free.gpus == executor.free.gpus - sum(each.gpus for each in taken) >= 0


@pytest.mark.parametrize(
    ("share", "task", "slots"),
    [
        (NodeShare(1), NodeShare(1), 1),
        (NodeShare(4), NodeShare(1), 4),
        (NodeShare(4), NodeShare(3), 2),
        (NodeShare(1, 2), NodeShare(1, 1), 2),
        (NodeShare(1, 0), NodeShare(2, 1), 1),
    ],
)
def test_a_share_is_counted_in_slots_of_other_tasks(share, task, slots):
    assert share.in_slots(task) == slots


def _needs(placement: Placement | None) -> SlotNeeds:
    return SlotNeeds("a cluster", tuple(_nodes(2, 2)), placement=placement)


@pytest.mark.parametrize(
    ("placement", "hosts", "num_hosts", "said"),
    [
        ("spread", "abab", 2, ""),
        ("spread", "abab", 3, ""),
        ("spread", "aaab", 2, "2 nodes of ps are on 1 host, 2 wanted; Spark has executors on 2"),
        ("spread", "aaaa", 1, "2 nodes of workers are on 1 host, 2 wanted"),
        ("pack", "aabb", 2, ""),
        (
            "pack",
            "abcc",
            3,
            "2 nodes of ps are on 2 hosts, 1 wanted; Spark has executors on 3 hosts",
        ),
        (None, "abcd", 4, ""),
    ],
)
def test_what_a_placement_could_not_do_is_told(placement, hosts, num_hosts, said):
    needs = _needs(placement)
    note = needs.host_note(
        {node.name: host for node, host in zip(needs.nodes, hosts, strict=True)}, num_hosts
    )
    assert said in note
    assert bool(note) is bool(said)


def test_more_nodes_than_hosts_are_spread_as_far_as_they_can_be():
    needs = SlotNeeds("a cluster", tuple(_nodes(0, 3)), placement="spread")
    assert not needs.host_note({"worker:0": "a", "worker:1": "b", "worker:2": "a"}, 2)


def test_fed_nodes_without_gpus_run_wherever_spark_has_a_slot():
    assert not SlotNeeds("a cluster", tuple(_nodes(1, 2)), num_fed=2).shares_tasks
    assert SlotNeeds("a cluster", tuple(_nodes(1, 2, GPU_WORKER)), num_fed=2).shares_tasks


def test_servers_beside_the_driver_need_no_slot():
    beside = plan(4, 2, driver_ps_nodes=True)
    assert needs_of(beside, RoleProfiles(ONE_CORE), None).slots_by_node() == {
        "worker:0": 1,
        "worker:1": 1,
    }
