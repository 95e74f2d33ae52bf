"""What a careless or hostile client of the cluster may send: typed answers, nothing changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Ack, Number
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import Connection, connect
from rpc.errors import RemoteError
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest, resident_growth

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)
MANIFEST = make_manifest(1000, rule=ADD)
HASH = MANIFEST.hash()
ENCODED = MANIFEST.encode()
VALUES = bytes(4000)


@pytest.fixture(params=["inproc", "tcp", "shm"])
def connection(request: pytest.FixtureRequest):
    with cluster(str(request.param)) as bed:
        bed.workers(MANIFEST, filled(MANIFEST))
        with raw(bed) as opened:
            yield opened
            assert pulled(opened) == VALUES, "a refused request has changed something"


def raw(bed: Cluster) -> Connection:
    return connect(bed.endpoints[0], Identity(Role.WORKER, 0), bed.credentials)


def call(connection: Connection, request: Any, payload: Sequence[bytes] = ()) -> bytes:
    meta = request if isinstance(request, bytes) else messages.encode(request)
    return connection.call(meta, payload, timeout_s=10.0).meta


def pulled(connection: Connection) -> bytes:
    into = bytearray(4000)
    meta = messages.encode(messages.Pull(HASH))
    connection.call(meta, into=[memoryview(into)], timeout_s=10.0)
    return bytes(into)


def push(**changes: Any) -> messages.Push:
    return msgspec.structs.replace(messages.Push(HASH, Number(1, 1), 1, HYPER), **changes)


REFUSED: dict[str, tuple[Any, list[bytes], str, str]] = {
    "too short": (push(), [bytes(3996)], "shape", "brought 3996 bytes"),
    "too long": (push(), [bytes(4004)], "shape", "take 4000"),
    "nothing": (push(), [], "shape", "brought 0 bytes"),
    "null with payload": (push(null=True), [VALUES], "shape", "null push takes no payload"),
    "no learning rate": (push(hyper=None), [VALUES], "settings", "learning rate"),
    "no rows": (push(rows=0), [VALUES], "settings", "at least 1 row"),
    "other manifest": (push(manifest_hash="x"), [VALUES], "manifest_mismatch", HASH),
    "other pull": (messages.Pull("x"), [], "manifest_mismatch", "attach"),
    "assign too short": (messages.Assign(HASH, Number(1, 1)), [bytes(8)], "shape", "assign"),
    "compile cut": (messages.Compile(HASH, len(ENCODED)), [ENCODED[:-1]], "shape", "announced"),
    "compile hash": (messages.Compile("x", len(ENCODED)), [ENCODED], "manifest_mismatch", "hash"),
    "seed cut": (messages.Seed(HASH, len(ENCODED)), [ENCODED[:-1]], "shape", "announced"),
    "seed junk": (messages.Seed(HASH, 9), [b"\x80\x04junk..."], "manifest_mismatch", "manifest"),
    "seed hash": (messages.Seed("x", len(ENCODED)), [ENCODED], "manifest_mismatch", "hash"),
    "not msgpack": (b"\xc1", [VALUES], "settings", "not a request"),
    "pickle": (b"\x80\x04cos\nsystem\n.", [], "settings", "not a request"),
    "rendezvous value too large": (
        messages.JoinRendezvous("k", 1.0),
        [bytes((1 << 20) + 1)],
        "settings",
        "got 1048577 for 'k'; send a summary",
    ),
    "rendezvous without a key": (messages.JoinRendezvous("", 1.0), [], "settings", "length >= 1"),
    "rendezvous key too long": (
        messages.JoinRendezvous("k" * 257, 1.0),
        [],
        "settings",
        "length <= 256",
    ),
    "answers without their index": (messages.BringAnswers(9), [bytes(8)], "shape", "9 bytes was"),
    "answers without an index": (messages.BringAnswers(8), [bytes(8)], "settings", "not an index"),
    "lost what": (push(number=Number(1, 9, 8)), [VALUES], "sequence_gap", "request 8 of worker 0"),
}


@pytest.mark.fault("F47")
@pytest.mark.attack("A08")
@pytest.mark.attack("A09")
@pytest.mark.attack("A10")
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused_and_the_connection_survives(connection: Connection, name: str):
    request, payload, code, text = REFUSED[name]
    with pytest.raises(RemoteError) as refused:
        call(connection, request, payload)
    assert refused.value.code == code
    assert text in refused.value.message
    described = msgspec.msgpack.decode(
        call(connection, messages.Describe()), type=messages.Description
    )
    assert described.phase == "SERVING"


@pytest.mark.fault("F24")
def test_the_same_push_twice_is_applied_once_and_answered_twice():
    with cluster("tcp") as bed:
        bed.workers(MANIFEST, filled(MANIFEST))
        ones = np.ones(1000, np.float32).tobytes()
        for _ in range(3):
            with raw(bed) as connection:
                ack = msgspec.msgpack.decode(call(connection, push(), [ones]), type=Ack)
                assert (ack.clock, ack.applied) == (1, True)
                assert pulled(connection) == ones


BOMBS: dict[str, tuple[tuple[int, ...], str]] = {
    "more than was sent": ((2**28,), "shape"),
    "many buckets": ((2**42,), "manifest_mismatch"),
    "above the limit": ((2**43,), "manifest_mismatch"),
    "overflow": ((2**31, 2**40), "manifest_mismatch"),
    "negative": ((-1,), "manifest_mismatch"),
}


@pytest.mark.attack("A08")
@pytest.mark.attack("A09")
@pytest.mark.parametrize("name", BOMBS)
def test_a_manifest_of_impossible_size_takes_no_memory(name: str):
    """Even from the chief itself: sizes are compared before anything is laid out or allocated."""
    shape, code = BOMBS[name]
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(MANIFEST))
    body["groups"][0]["params"] = [{"name": "huge", "shape": list(shape)}]
    body["bucket_bytes"] = 64 if name == "many buckets" else 1 << 26
    encoded = msgspec.msgpack.encode(body)
    digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
    with cluster("tcp") as bed:

        def attempt() -> None:
            with raw(bed) as connection, pytest.raises(RemoteError) as refused:
                call(connection, messages.Seed(digest, len(encoded)), [encoded, VALUES])
            assert refused.value.code == code, refused.value.message

        attempt()
        assert resident_growth(attempt) < 1 << 20
        assert bed.client().describe()[0].phase == "EMPTY"
