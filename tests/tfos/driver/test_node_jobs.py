"""What the task of each node is given: its own keys, and main_fun where it runs. No Spark."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography import x509

from rpc.auth.certificates import peer_uri
from tests.support.nodes import node_settings
from tfos.control.authority import ClusterAuthority
from tfos.driver.node_jobs import NodeKeys
from tfos.node.spec import NodeBundle
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
