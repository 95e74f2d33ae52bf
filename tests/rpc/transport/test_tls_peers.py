"""With TLS a process is what its certificate says: every role and rank with every certificate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.auth.certificates import check_peer
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import connect
from rpc.errors import AuthError
from rpc.server.listener import Listener
from tests.support.rpc import SERVER, WAIT_S, WORKER, bed
from tests.support.tls import CLUSTER
from tests.support.waiting import wait_until
from tfos.control.authority import ClusterAuthority

pytestmark = pytest.mark.socket

AUTHORITY = ClusterAuthority(CLUSTER)
SECRET = b"s" * 32
IDENTITIES = [Identity(role, rank, 7) for role in Role for rank in (0, 1)]
PEERS = ("worker:0", "worker:1", "server:0", "driver", "feeder")
PAIRS = st.lists(
    st.tuples(st.sampled_from(Role), st.none() | st.integers(0, 12)), min_size=0, max_size=4
)


def credentials(*peers: str) -> Credentials:
    return Credentials(CLUSTER, SECRET, tls=AUTHORITY.data_node(*peers))


def listening(identity: Identity, *peers: str) -> Listener:
    listener = Listener(lambda call: call.reply(b"done"), credentials(*peers), identity)
    listener.bind_tcp("127.0.0.1")
    listener.start()
    return listener


def fits(identity: Identity, peer: str) -> bool:
    return peer in (identity.role.value, f"{identity.role.value}:{identity.rank}")


@pytest.fixture
def served() -> Iterator[Listener]:
    with listening(SERVER, "server:0") as listener:
        yield listener


@pytest.mark.attack("A15")
@pytest.mark.parametrize("peer", PEERS)
def test_a_server_takes_a_client_as_its_certificate_says_and_as_nobody_else(served, peer, caplog):
    keys = credentials(peer)
    for identity in IDENTITIES:
        if fits(identity, peer):
            with connect(served.endpoint, identity, keys, timeout_s=WAIT_S) as connection:
                assert connection.call(b"x", timeout_s=WAIT_S).meta == b"done"
            continue
        with pytest.raises(AuthError, match=f"or its certificate is not for {identity}"):
            connect(served.endpoint, identity, keys, timeout_s=WAIT_S)
    wait_until(lambda: served.stats().open_connections == 0)
    assert f"its certificate is for tfos:{peer}" in caplog.text


@pytest.mark.attack("A15")
@pytest.mark.parametrize("peer", PEERS)
def test_a_client_takes_a_server_as_its_certificate_says(peer):
    for identity in IDENTITIES:
        with listening(identity, peer) as listener:
            if fits(identity, peer):
                connect(listener.endpoint, WORKER, credentials("worker"), timeout_s=WAIT_S).close()
                continue
            with pytest.raises(AuthError, match=f"claims to be {identity}, .* tfos:{peer};"):
                connect(listener.endpoint, WORKER, credentials("worker"), timeout_s=WAIT_S)


@pytest.mark.attack("A15")
@given(PAIRS, st.sampled_from(Role), st.integers(0, 12))
def test_only_names_of_the_certificate_open(pairs, role, rank):
    named = [f"tfos:{one}" if at is None else f"tfos:{one}:{at}" for one, at in pairs]
    certificate = {"subjectAltName": (*(("URI", name) for name in named), ("DNS", "x"))}
    if (role, None) in pairs or (role, rank) in pairs:
        check_peer(certificate, role, rank)
        return
    with pytest.raises(AuthError, match=f"claims to be {role.value}:{rank}, its certificate is"):
        check_peer(certificate, role, rank)


@pytest.mark.attack("A15")
def test_a_caller_may_expect_a_rank_and_a_generation():
    with bed() as made:
        for expected in (Role.SERVER, SERVER, Identity(Role.SERVER, 0, SERVER.generation)):
            connect(made.endpoint, WORKER, made.credentials, expect=expected).close()
        for wrong in (
            Role.WORKER,
            Identity(Role.WORKER, 0),
            Identity(Role.SERVER, 1),
            Identity(Role.SERVER, 0, SERVER.generation + 1),
        ):
            with pytest.raises(AuthError, match=r"expected .* found server:0 generation 0"):
                connect(made.endpoint, WORKER, made.credentials, expect=wrong)
