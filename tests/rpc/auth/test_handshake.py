"""The handshake without a socket: who gets in, who does not, and what it shows."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.auth import handshake
from rpc.auth.handshake import (
    ClientHandshake,
    Credentials,
    HandshakeOptions,
    Identity,
    Role,
    ServerHandshake,
)
from rpc.errors import AuthError, ProtocolError, VersionMismatch

CREDENTIALS = Credentials("cluster-1", bytes(range(32)))
WORKER = Identity(Role.WORKER, 3, 1)
SERVER = Identity(Role.SERVER, 2, 5)
GOLDEN_CLIENT = (
    "544652480100360095a9636c75737465722d31a6776f726b65720301c42003030303030303030303"
    "03030303030303030303030303030303030303030303ed4e20e908d0613c732ecb4b3bbd2c059c7d"
    "d293d14e6fad28d2aecbfbaed7e4"
)
GOLDEN_SERVER = (
    "544652480100360095a9636c75737465722d31a67365727665720205c42002020202020202020202"
    "02020202020202020202020202020202020202020202a32b383a9ff15c27a0067793be298d23415e"
    "8fc167b9fbe102b9b729bab61248"
)
GOLDEN_KEYS = (
    "6b310459ce0ad349230e127c51e3901beac4fcd0bc5324110ec27d19cd377888",
    "0283c195da21539b21fe97065237846794d52fe109f2476dbb824725f36ef471",
)


def server(credentials: Credentials = CREDENTIALS) -> ServerHandshake:
    return ServerHandshake(SERVER, credentials, nonces=bytes([1]) * 32 + bytes([2]) * 32)


def client(credentials: Credentials = CREDENTIALS) -> ClientHandshake:
    return ClientHandshake(WORKER, credentials, nonce=bytes([3]) * 32)


def feed(side: ServerHandshake | ClientHandshake, data: bytes) -> bytes:
    """Feed a whole message in the portions that the handshake asks for."""
    answer = b""
    while data:
        portion, data = data[: side.wanted], data[side.wanted :]
        answer += side.feed(portion)
    return answer


def test_golden_bytes():
    ours, theirs = client(), server()
    proof = feed(ours, theirs.greeting)
    answer = feed(theirs, proof)
    feed(ours, answer)
    assert theirs.greeting == bytes([1]) * 32
    assert proof.hex() == GOLDEN_CLIENT
    assert answer.hex() == GOLDEN_SERVER
    assert ours.session
    assert (ours.session.send_key.hex(), ours.session.receive_key.hex()) == GOLDEN_KEYS


def test_both_learn_who_the_other_is_and_the_same_keys():
    ours = ClientHandshake(WORKER, CREDENTIALS)
    theirs = ServerHandshake(SERVER, CREDENTIALS)
    feed(ours, feed(theirs, feed(ours, theirs.greeting)))
    assert ours.session
    assert theirs.session
    assert (ours.session.peer, theirs.session.peer) == (SERVER, WORKER)
    assert ours.session.send_key == theirs.session.receive_key
    assert ours.session.receive_key == theirs.session.send_key
    assert ours.session.send_key != ours.session.receive_key


def test_fresh_nonces_give_fresh_keys():
    keys = set()
    for _ in range(20):
        ours, theirs = ClientHandshake(WORKER, CREDENTIALS), ServerHandshake(SERVER, CREDENTIALS)
        feed(ours, feed(theirs, feed(ours, theirs.greeting)))
        assert ours.session
        keys |= {ours.session.send_key, ours.session.receive_key}
    assert len(keys) == 40


@pytest.mark.attack("A02")
@pytest.mark.parametrize(
    "other",
    [
        Credentials("cluster-1", b"x" * 32),
        Credentials("cluster-2", CREDENTIALS.secret),
        Credentials("cluster-2", b"x" * 32),
        Credentials("cluster-1", CREDENTIALS.secret + b"\0" * 33),
    ],
)
def test_other_credentials_are_refused_by_both_sides(other):
    theirs = server()
    with pytest.raises(AuthError, match="token does not match cluster"):
        feed(theirs, feed(client(other), theirs.greeting))
    assert theirs.session is None
    ours = client()
    proof = feed(ours, theirs.greeting)
    impostor = server(other)
    with pytest.raises(AuthError):
        feed(ours, feed_unchecked(impostor, proof, other))
    assert ours.session is None


@pytest.mark.parametrize("num_bytes", [0, 31, 33])
def test_a_nonce_of_another_length_is_refused_from_a_peer_that_knows_the_secret(num_bytes: int):
    theirs = server()
    head_body = handshake._pack(CREDENTIALS, WORKER, bytes(num_bytes), HandshakeOptions.NONE)
    proof = head_body + handshake._tag(CREDENTIALS, b"tfrp/client" + theirs.greeting, head_body)
    with pytest.raises(AuthError, match=f"nonce has {num_bytes} bytes, not 32"):
        feed(theirs, proof)
    assert theirs.session is None


def feed_unchecked(impostor: ServerHandshake, proof: bytes, other: Credentials) -> bytes:
    """What a server without the right secret would answer if it skipped its own check."""
    head_body = handshake._pack(other, SERVER, bytes(32), HandshakeOptions.NONE)
    label = b"tfrp/server" + impostor.greeting + proof
    return head_body + handshake._tag(other, label, head_body)


@pytest.mark.attack("A05")
def test_a_proof_made_for_one_side_proves_nothing_to_the_other():
    """Both sides know the secret, so only the label keeps what one signs from standing for more."""
    theirs, ours = server(), client()
    head_body = handshake._pack(CREDENTIALS, WORKER, bytes(32), HandshakeOptions.NONE)
    proof = head_body + handshake._tag(CREDENTIALS, b"tfrp/server" + theirs.greeting, head_body)
    with pytest.raises(AuthError, match="token does not match cluster"):
        feed(theirs, proof)
    proof = feed(ours, theirs.greeting)
    head_body = handshake._pack(CREDENTIALS, SERVER, bytes(32), HandshakeOptions.NONE)
    covered = b"tfrp/client" + theirs.greeting + proof
    with pytest.raises(AuthError, match="token does not match cluster"):
        feed(ours, head_body + handshake._tag(CREDENTIALS, covered, head_body))
    assert theirs.session is None
    assert ours.session is None


@pytest.mark.parametrize("wanted", [HandshakeOptions.NONE, HandshakeOptions.SHARE])
@pytest.mark.parametrize("offered", [HandshakeOptions.NONE, HandshakeOptions.SHARE])
def test_both_learn_what_both_can_do(wanted, offered):
    ours = ClientHandshake(WORKER, CREDENTIALS, options=wanted)
    theirs = ServerHandshake(SERVER, CREDENTIALS, options=offered)
    feed(ours, feed(theirs, feed(ours, theirs.greeting)))
    assert ours.session
    assert theirs.session
    assert ours.session.options == theirs.session.options == wanted & offered


@pytest.mark.attack("A06")
def test_options_cannot_be_changed_on_the_way():
    for at_client in (True, False):
        ours = ClientHandshake(WORKER, CREDENTIALS, options=HandshakeOptions.SHARE)
        theirs = ServerHandshake(SERVER, CREDENTIALS, options=HandshakeOptions.SHARE)
        proof = feed(ours, theirs.greeting)
        if at_client:
            with pytest.raises(AuthError):
                feed(theirs, without_options(proof))
            continue
        answer = feed(theirs, proof)
        with pytest.raises(AuthError):
            feed(ours, without_options(answer))


def without_options(message: bytes) -> bytes:
    return message[:5] + b"\0" + message[6:]


@pytest.mark.attack("A06")
def test_a_server_cannot_choose_what_was_not_wanted():
    ours = ClientHandshake(WORKER, CREDENTIALS)
    theirs = ServerHandshake(SERVER, CREDENTIALS, options=HandshakeOptions.SHARE)
    proof = feed(ours, theirs.greeting)
    theirs._options = ForcedOptions()  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="added options of its own: 0x1"):
        feed(ours, feed(theirs, proof))


class ForcedOptions:
    """A mask through which everything passes."""

    def __and__(self, _wanted: object) -> HandshakeOptions:
        return HandshakeOptions.SHARE


PROTECTED = dataclasses.replace(CREDENTIALS, integrity="payload")
PLAIN = dataclasses.replace(CREDENTIALS, integrity="header")


@pytest.mark.attack("A04")
@pytest.mark.parametrize(
    ("at_client", "is_remote", "at_server", "agreed"),
    [
        (CREDENTIALS, True, CREDENTIALS, HandshakeOptions.PAYLOAD),
        (CREDENTIALS, False, CREDENTIALS, HandshakeOptions.NONE),
        (PLAIN, True, PLAIN, HandshakeOptions.HEADER),
        (CREDENTIALS, False, PLAIN, HandshakeOptions.NONE),
        (PROTECTED, False, PROTECTED, HandshakeOptions.PAYLOAD),
        (PROTECTED, False, CREDENTIALS, HandshakeOptions.PAYLOAD),
        (CREDENTIALS, True, PROTECTED, HandshakeOptions.PAYLOAD),
    ],
)
def test_all_bytes_are_authenticated_between_hosts_or_as_chosen(
    at_client, is_remote, at_server, agreed
):
    ours = ClientHandshake(WORKER, at_client, is_remote=is_remote)
    theirs = server(at_server)
    feed(ours, feed(theirs, feed(ours, theirs.greeting)))
    assert ours.session
    assert theirs.session
    assert ours.session.options == theirs.session.options == agreed


@pytest.mark.attack("A06")
@pytest.mark.parametrize(
    ("at_client", "is_remote", "at_server", "found"),
    [
        (PLAIN, True, PROTECTED, "payload"),
        (PROTECTED, False, PLAIN, "header"),
        (CREDENTIALS, True, PLAIN, "header"),
        (CREDENTIALS, False, PROTECTED, "payload"),
        (PLAIN, True, CREDENTIALS, "auto"),
        (PLAIN, False, CREDENTIALS, "auto"),
    ],
)
def test_less_integrity_than_the_other_side_is_refused_by_both(
    at_client, is_remote, at_server, found
):
    ours = ClientHandshake(WORKER, at_client, is_remote=is_remote)
    theirs = server(at_server)
    proof = feed(ours, theirs.greeting)
    answer = feed(theirs, proof)
    with pytest.raises(AuthError, match=f"the server wants integrity='{found}'"):
        feed(ours, answer)
    assert theirs.session is None
    assert "the client wants integrity=" in str(theirs.refusal)


@pytest.mark.attack("A04")
def test_without_its_library_no_connection_between_hosts_is_less_protected(monkeypatch):
    asking = ClientHandshake(WORKER, CREDENTIALS, is_remote=True)
    monkeypatch.setattr("rpc.auth.handshake.find_spec", lambda _: None)
    with pytest.raises(AuthError, match="needs the package cryptography; install it, or set"):
        ClientHandshake(WORKER, CREDENTIALS, is_remote=True)
    theirs = server(CREDENTIALS)
    with pytest.raises(AuthError, match="the server wants integrity='auto' within one host"):
        feed(asking, feed(theirs, feed(asking, theirs.greeting)))


@pytest.mark.attack("A02")
@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 10_000_000])
def test_secrets_of_illegal_length_are_refused_at_once(secret):
    with pytest.raises(ValueError, match="16 to 1024 bytes"):
        Credentials("c", secret)


@pytest.mark.attack("A03")
def test_a_recorded_proof_proves_nothing_later():
    theirs = ServerHandshake(SERVER, CREDENTIALS)
    proof = feed(ClientHandshake(WORKER, CREDENTIALS), theirs.greeting)
    with pytest.raises(AuthError):
        feed(ServerHandshake(SERVER, CREDENTIALS), proof)


@pytest.mark.attack("A05")
def test_a_reflected_message_proves_nothing():
    ours, theirs = client(), server()
    proof = feed(ours, theirs.greeting)
    with pytest.raises(AuthError):
        feed(ours, proof)
    answer = feed(theirs, proof)
    mirror = ServerHandshake(SERVER, CREDENTIALS, nonces=theirs.greeting + bytes(32))
    with pytest.raises(AuthError):
        feed(mirror, answer)


@pytest.mark.attack("A04")
def test_each_flipped_byte_is_refused():
    proof = feed(client(), server().greeting)
    answer = feed(server(), proof)
    for at in range(len(proof)):
        changed = bytearray(proof)
        changed[at] ^= 0x41
        with pytest.raises(AuthError):
            feed(server(), bytes(changed) + bytes(600))
    for at in range(len(answer)):
        ours = client()
        feed(ours, server().greeting)
        changed = bytearray(answer)
        changed[at] ^= 0x41
        with pytest.raises(AuthError):
            feed(ours, bytes(changed) + bytes(600))


@given(st.binary(min_size=8, max_size=700))
def test_strangers_bytes_are_refused(data):
    with pytest.raises(AuthError):
        feed(server(), data + bytes(600))


def test_a_body_that_announces_too_much_is_refused_from_its_length():
    with pytest.raises(AuthError):
        server().feed(b"TFRH\x01\x00" + (513).to_bytes(2, "little"))


def test_a_peer_with_the_secret_and_an_illegal_body_is_refused():
    for body in (b"", b"\xc1", b"\x90", b"\x95\xa1c\xa4king\x00\x00\xc4\x00"):
        theirs = server()
        head_body = handshake._HEAD.pack(b"TFRH", 1, 0, len(body)) + body
        tag = handshake._tag(CREDENTIALS, b"tfrp/client" + theirs.greeting, head_body)
        with pytest.raises(AuthError, match="malformed"):
            feed(theirs, head_body + tag)


def test_a_peer_of_another_release_is_told_so(monkeypatch):
    theirs = server()
    monkeypatch.setattr(handshake, "VERSION", 9)
    ours = client()
    proof = feed(ours, theirs.greeting)
    monkeypatch.undo()
    answer = feed(theirs, proof)
    assert theirs.session is None
    assert "client speaks rpc version 9, this side 1" in str(theirs.refusal)
    monkeypatch.setattr(handshake, "VERSION", 9)
    with pytest.raises(VersionMismatch, match="server speaks rpc version 1, this side 9"):
        feed(ours, answer)


@pytest.mark.attack("A17")
def test_no_secret_in_any_repr():
    credentials = Credentials.generate()
    ours, theirs = ClientHandshake(WORKER, credentials), ServerHandshake(SERVER, credentials)
    feed(ours, feed(theirs, feed(ours, theirs.greeting)))
    assert ours.session
    shown = "".join(map(repr, (credentials, ours, theirs, ours.session, theirs.session)))
    for key in (credentials.secret, ours.session.send_key, ours.session.receive_key):
        assert repr(key)[2:-1] not in shown
        assert key.hex() not in shown
    assert credentials.cluster_id in shown


def test_credentials_are_fresh_and_travel_by_pickle():
    one, two = Credentials.generate(), Credentials.generate()
    assert one != two
    assert len(one.secret) == 32
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    "make",
    [
        lambda: Identity(Role.WORKER, -1),
        lambda: Identity(Role.WORKER, 2**31),
        lambda: Identity(Role.WORKER, 0, -1),
        lambda: Identity(Role.WORKER, 0, 2**63),
        lambda: Credentials("", bytes(32)),
        lambda: Credentials("c" * 129, bytes(32)),
    ],
)
def test_illegal_values_are_refused(make):
    with pytest.raises(ValueError, match=r"must|16 to"):
        make()


def test_the_largest_identity_fits():
    largest = Identity(Role.SUPERVISOR, 2**31 - 1, 2**63 - 1)
    credentials = Credentials("c" * 128, bytes(32))
    ours, theirs = ClientHandshake(largest, credentials), ServerHandshake(SERVER, credentials)
    proof = feed(ours, theirs.greeting)
    assert len(proof) <= 1024
    feed(theirs, proof)
    assert theirs.session
    assert theirs.session.peer == largest
