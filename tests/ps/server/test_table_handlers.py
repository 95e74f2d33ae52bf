"""What a careless or hostile client may send to tables: typed answers, nothing changed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Number
from ps.tables.routing import Router
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import Connection, connect
from rpc.errors import RemoteError
from tests.support.ps_cluster import cluster, filled, resident_growth
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(1.0)
MANIFEST = with_tables(table("user", max_id=10**6), table("item", dim=3), bucket_bytes=64)
HASH = MANIFEST.hash()
FIRST, SECOND, FOREIGN = 0, 3, 4  # ps:0's, in its order, and one of ps:1


@pytest.fixture
def connection():
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        identity = Identity(Role.WORKER, 0)
        with connect(bed.servers[0].endpoint, identity, bed.credentials) as opened:
            yield opened
            found = client.tables.lookup({"user": range(200), "item": range(200)})
            assert not any(values.any() for values in found.values()), "a refused request changed"


def call(connection: Connection, request: Any, *payload: Any) -> messages.Ack:
    meta = request if isinstance(request, bytes) else messages.encode(request)
    reply = connection.call(meta, [part for part in payload if len(part)], timeout_s=10.0)
    return messages.decode_reply(reply.meta, messages.Ack)


def push(**changes: Any) -> messages.PushRows:
    return msgspec.structs.replace(messages.PushRows(HASH, Number(1, 1), HYPER, (0,)), **changes)


def counts(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, np.int64).tobytes()


def ids_of(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


GRADIENT = ones([0]).tobytes()
NAN = np.full((1, 4), np.nan, np.float32).tobytes()

REFUSED: dict[str, tuple[Any, list[bytes], str, str]] = {
    "no counts": (push(), [], "shape", "take 16 bytes, the payload has 0"),
    "no ids": (push(), [counts((1, 1))], "shape", "take 40 bytes, the payload has 16"),
    "no gradients": (push(), [counts((1, 1)), ids_of(FIRST)], "shape", "the payload has 24"),
    "too much": (
        push(),
        [counts((1, 1)), ids_of(FIRST), GRADIENT, b"x"],
        "shape",
        "the payload has 41",
    ),
    "a negative count": (push(), [counts((-1, 1))], "shape", "-1 ids for 1 in one request"),
    "2^62 ids": (push(), [counts((2**62, 1))], "shape", "4611686018427387904 ids"),
    "stands for 2^62": (push(), [counts((0, 2**62))], "shape", "0 ids for 4611686018427387904"),
    "no such table": (push(tables=(2,)), [counts((0, 0))], "manifest_mismatch", "2 tables, asked"),
    "a table twice": (push(tables=(0, 0)), [counts((0, 0), (0, 0))], "shape", "occurs twice"),
    "another manifest": (push(manifest_hash="f" * 32), [], "manifest_mismatch", "attach"),
    "2000 tables": (push(tables=tuple([0] * 2000)), [], "settings", "not a request"),
    "another's id": (
        push(),
        [counts((1, 1)), ids_of(FOREIGN), GRADIENT],
        "id",
        f"id {FOREIGN} at position 0 .* is not ps:0's",
    ),
    "an id too large": (
        push(),
        [counts((1, 1)), ids_of(10**6 + 1), GRADIENT],
        "id",
        r"takes int64 ids 0\.\.1000000, got 1000001 at position 0",
    ),
    "a negative id": (push(), [counts((1, 1)), ids_of(-1), GRADIENT], "id", "got -1"),
    "an id twice": (
        push(),
        [counts((2, 2)), ids_of(FIRST, FIRST), GRADIENT * 2],
        "id",
        f"id {FIRST} occurs twice in one push",
    ),
    "a NaN": (push(), [counts((1, 1)), ids_of(FIRST), NAN], "non_finite", "table 'user'"),
    "no such segment": (
        messages.Scan(HASH, 0, 200, 5),
        [],
        "manifest_mismatch",
        r"segments 0\.\.1 on a server, asked was 200",
    ),
    "no such number": (messages.Scan(HASH, 9, 0, 5), [], "manifest_mismatch", "2 tables"),
}


def test_the_ids_of_these_tests_are_of_the_servers_that_they_name():
    """Routing them where the module is imported would compile kernels while tests are collected."""
    routed = Router(MANIFEST.tables[0], 2).route([FOREIGN, FIRST, SECOND])
    assert routed.unique[routed.own(0)].tolist() == [FIRST, SECOND]
    assert routed.unique[routed.own(1)].tolist() == [FOREIGN]


DENSE = bytes(64)  # the bucket of ps:0


def exchange(part: messages.RowExchange, **changes: Any) -> messages.Push:
    return msgspec.structs.replace(
        messages.Push(HASH, Number(1, 1), 1, HYPER, pull=True, tables=part), **changes
    )


BOTH = messages.RowExchange((0,), (0,))
PUSHED = messages.RowExchange((0,))
REFUSED |= {
    "a push without counts": (exchange(BOTH), [DENSE[:16]], "shape", "take 32 bytes, the payload"),
    "a push without its groups": (
        exchange(BOTH),
        [counts((1, 1), (1, 1)), ids_of(FIRST, FIRST), GRADIENT],
        "shape",
        "take 128 bytes with 64 of the groups, the payload has 64",
    ),
    "a push without rows": (
        exchange(PUSHED),
        [counts((1, 1)), ids_of(FIRST), DENSE],
        "shape",
        "take 104 bytes with 64 of the groups, the payload has 88",
    ),
    "gradients of what is asked for": (
        exchange(messages.RowExchange((), (0,))),
        [counts((1, 1)), ids_of(FIRST), DENSE, GRADIENT],
        "shape",
        "take 88 bytes with 64 of the groups, the payload has 104",
    ),
    "2^62 ids in a push": (exchange(BOTH), [counts((2**62, 1), (0, 0)), DENSE], "shape", "461168"),
    "asks for another's id": (
        exchange(BOTH),
        [counts((0, 0), (1, 1)), ids_of(FOREIGN), DENSE],
        "id",
        f"id {FOREIGN} at position 0 .* is not ps:0's",
    ),
    "asks for a table twice": (
        exchange(messages.RowExchange((), (1, 1))),
        [counts((0, 0), (0, 0)), DENSE],
        "shape",
        "occurs twice",
    ),
    "asks for no table": (
        exchange(messages.RowExchange((), (7,))),
        [counts((0, 0)), DENSE],
        "manifest_mismatch",
        "2 tables, asked was number 7",
    ),
    "a null push of rows": (
        exchange(PUSHED, null=True),
        [counts((1, 1)), ids_of(FIRST), GRADIENT],
        "shape",
        "a null push takes no payload, got 40 bytes",
    ),
    "a NaN in a push": (
        exchange(PUSHED),
        [counts((1, 1)), ids_of(FIRST), DENSE, NAN],
        "non_finite",
        r"has changed 1 of the 1 buckets and \d of the 2 segments of ps:0",
    ),
    "an id twice in a push": (
        exchange(PUSHED),
        [counts((2, 2)), ids_of(FIRST, FIRST), DENSE, GRADIENT * 2],
        "id",
        f"id {FIRST} occurs twice in one push",
    ),
}


@pytest.mark.fault("F47")
@pytest.mark.attack("A10")
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused_and_the_connection_survives(connection, name: str):
    request, payload, code, sentence = REFUSED[name]
    with pytest.raises(RemoteError, match=sentence) as caught:
        call(connection, request, *payload)
    assert caught.value.code == code
    again = push(number=Number(1, 2))
    assert call(connection, again, counts((1, 1)), ids_of(FIRST), bytes(16)).applied


@pytest.mark.fault("F24")
def test_a_repeated_push_is_answered_and_not_applied(connection):
    payload = counts((2, 2)), ids_of(FIRST, SECOND), ones([0, 0]).tobytes()
    for _ in range(3):
        assert call(connection, push(), *payload).applied
    back = (-ones([0, 0])).tobytes()
    assert call(connection, push(number=Number(1, 2)), *payload[:2], back).applied


@pytest.mark.fault("F24")
def test_a_repeated_refusal_is_refused_again(connection):
    payload = counts((1, 1)), ids_of(FIRST)
    for gradient in (NAN, GRADIENT):
        with pytest.raises(RemoteError, match="NaN or infinite"):
            call(connection, push(), *payload, gradient)


@pytest.mark.attack("A10")
def test_announcing_many_ids_takes_no_memory(connection):
    def announce() -> None:
        for _ in range(20):
            with pytest.raises(RemoteError):
                call(connection, push(), counts((1 << 24, 1 << 24)))

    announce()
    assert resident_growth(announce) < 16 << 20
