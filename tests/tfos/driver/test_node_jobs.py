"""What the task of each node is given: its keys, main_fun where it runs, its place. No Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509

from rpc.auth.certificates import peer_uri
from tests.support.nodes import node_settings
from tfos.control.authority import ClusterAuthority
from tfos.driver.node_jobs import NodeJobs, NodeKeys
from tfos.node.spec import NodeBundle
from tfos.node.task import NodeTask
from tfos.slots.profiles import GroupProfile, RoleProfiles
from tfos.slots.resources import WORKER_NODES
from tfos.spark.shares import NodeShare
from tfos.topology import Plan, plan

SECRET, MAIN_FUN = b"S" * 32, b"main_fun and its arguments"


def bundles_of(made: Plan, **options: Any) -> dict[str, NodeBundle]:
    settings = node_settings(num_ps=made.num_ps, num_workers=made.num_workers, **options)
    keys = NodeKeys(ClusterAuthority("c"), SECRET)
    return {node.name: keys.bundle(node, settings, MAIN_FUN) for node in made.nodes}


def peers_of(bundle: NodeBundle) -> list[str]:
    """The roles and ranks that a node's certificate of the data plane lets it have."""
    assert bundle.data_tls is not None
    cert = x509.load_pem_x509_certificate(bundle.data_tls.cert_pem)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


@pytest.mark.parametrize(
    ("made", "runs"),
    [
        (plan(4, 1, eval_node=True), ["worker:0", "worker:1", "evaluator:0"]),
        (plan(3, 1, master_node="chief"), ["chief:0", "worker:0"]),
        (plan(4, 1, ps="tensorflow"), ["chief:0"]),
    ],
    ids=["evaluator", "chief", "tensorflow"],
)
def test_main_fun_goes_to_the_nodes_that_run_it_alone(made, runs):
    """Servers have no use for the user's function and its arguments, which may be secret."""
    found = bundles_of(made)
    assert [name for name, each in found.items() if each.main_fun] == runs
    assert {each.main_fun for each in found.values()} == {MAIN_FUN, b""}


@pytest.mark.parametrize("security", ["hmac", "tls"])
def test_servers_of_tensorflow_get_no_secret_of_the_data_plane(security):
    """They have no login, so whoever reaches one may read what its process has."""
    found = bundles_of(plan(4, 1, ps="tensorflow"), security=security)
    given = {name for name, each in found.items() if each.rpc_secret or each.data_tls}
    assert given == {"chief:0"}
    assert found["chief:0"].rpc_secret == SECRET


@pytest.mark.parametrize(
    ("made", "peers"),
    [
        (
            plan(4, 1, eval_node=True),
            {
                "ps:0": ["server:0"],
                "worker:0": ["worker:0"],
                "worker:1": ["worker:1"],
                "evaluator:0": ["worker:2"],
            },
        ),
        (
            plan(3, 0, eval_node=True),  # each worker serves its own shard
            {
                "worker:0": ["worker:0", "server:0"],
                "worker:1": ["worker:1", "server:1"],
                "evaluator:0": ["worker:2"],
            },
        ),
    ],
    ids=["servers", "own shards"],
)
def test_a_certificate_names_the_roles_that_its_node_has_alone(made, peers):
    found = bundles_of(made, security="tls")
    assert {name: peers_of(each) for name, each in found.items()} == {
        name: [peer_uri(peer) for peer in each] for name, each in peers.items()
    }


class Asked:
    """What Spark is asked for: an RDD of nodes and its job, which ends at once."""

    bundles: list[NodeBundle]
    places: list[str]
    task: NodeTask

    def node_rdd(self, _: Any, bundles: list[NodeBundle], places: list[str]) -> Asked:
        self.bundles, self.places = bundles, places
        return self

    def mapPartitionsWithIndex(self, task: NodeTask) -> Asked:
        self.task = task
        return self

    def withResources(self, _: Any) -> Asked:
        return self

    def collect(self) -> list[Any]:
        return []


@pytest.fixture
def asked(monkeypatch):
    """Returns what is asked for the servers or workers of a cluster."""

    def of(role: str, *, workers_hold_slots: bool = False, first_attempt: int = 0) -> Asked:
        made, found = plan(3, 1), Asked()
        monkeypatch.setattr("tfos.driver.node_jobs.node_rdd", found.node_rdd)
        monkeypatch.setattr("tfos.driver.node_jobs.spark_profile", lambda *_: None)
        of_workers = {WORKER_NODES: GroupProfile(NodeShare(2, 0.5), threads=2)}
        places: Any = SimpleNamespace(
            profiles=RoleProfiles(NodeShare(1, 0.0), of_workers),
            locations={"ps:0": "a_0", "worker:0": "b_1", "worker:1": "b_2"},
        )
        coordinator: Any = None  # a job that ends well tells nobody
        keys, settings = NodeKeys(ClusterAuthority("c"), SECRET), node_settings(num_workers=2)
        jobs = NodeJobs(None, coordinator, keys, settings, places=places, on_cancel=bool)
        jobs._workers_hold_slots = workers_hold_slots
        nodes = made.servers if role == "ps" else made.workers
        jobs._job(role, nodes, first_attempt=first_attempt)._action()
        return found

    return of


@pytest.mark.parametrize(
    ("role", "workers_hold_slots", "holds"),
    [("ps", False, True), ("workers", False, False), ("workers", True, True)],
)
def test_servers_keep_their_slots_where_workers_give_theirs_back(
    asked, role, workers_hold_slots, holds
):
    """A server whose task returns would share its cores with feed tasks."""
    assert asked(role, workers_hold_slots=workers_hold_slots).task.hold_slot is holds


@pytest.mark.parametrize(("first_attempt", "places"), [(0, ["b_1", "b_2"]), (100, ["", ""])])
def test_a_node_that_is_started_again_goes_wherever_a_slot_is(asked, first_attempt, places):
    found = asked("workers", first_attempt=first_attempt)
    assert (found.task.first_attempt, found.places) == (first_attempt, places)


@pytest.mark.parametrize(("role", "given"), [("ps", [(0, False)]), ("workers", [(2, True)] * 2)])
def test_a_node_is_given_its_threads_and_whether_others_use_its_gpu(asked, role, given):
    assert [(each.threads, each.shares_gpus) for each in asked(role).bundles] == given
