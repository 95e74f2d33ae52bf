"""Golden bytes, limits before use, and who may say what."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import msgspec
import pytest

from ps.errors import PSSettingsError, RoleError, ServerPhaseError
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import (
    Ack,
    BatchName,
    Number,
    Push,
    Request,
    RowExchange,
    decode_reply,
    decode_request,
    encode,
)
from ps.protocol.permissions import ServerPhase, check_caller, check_move, check_phase
from rpc.auth.handshake import Identity, Role

NUMBER = Number(5, 2, 1)
SAMPLES: dict[type, Request] = {
    messages.Describe: messages.Describe(),
    messages.FetchManifest: messages.FetchManifest(),
    messages.Compile: messages.Compile("h", 1, 2.0),
    messages.Seed: messages.Seed("h", 1),
    messages.Pull: messages.Pull("h"),
    messages.PullFrozen: messages.PullFrozen("h"),
    messages.Push: messages.Push("h", NUMBER, 32, Hyper(0.1)),
    messages.Settle: messages.Settle("h", NUMBER, 3),
    messages.Lookup: messages.Lookup("h", (0, 2)),
    messages.LookupBatch: messages.LookupBatch("h", NUMBER, (0,), (1, 2), 1.0),
    messages.PushRows: messages.PushRows("h", NUMBER, Hyper(0.1), (1,), BatchName(5, 2)),
    messages.Scan: messages.Scan("h", 1, 3, 2**63 - 1, with_slots=True),
    messages.LoadRows: messages.LoadRows("h", 1),
    messages.Assign: messages.Assign("h", NUMBER),
    messages.Join: messages.Join(NUMBER),
    messages.Leave: messages.Leave(NUMBER),
    messages.Finish: messages.Finish(NUMBER),
    messages.JoinRendezvous: messages.JoinRendezvous("k", 1.0),
    messages.BringAnswers: messages.BringAnswers(9),
    messages.SetMetadata: messages.SetMetadata(NUMBER, "a/b"),
    messages.FetchMetadata: messages.FetchMetadata(),
    messages.TakeSnapshot: messages.TakeSnapshot("id", "base", 9, 1.5),
    messages.Save: messages.Save("/tmp/x", "id"),
    messages.Restore: messages.Restore("/tmp/x", 1, "ab", 10),
    messages.FetchStats: messages.FetchStats(),
    messages.Fence: messages.Fence(0, 1),
    messages.Lose: messages.Lose(0),
    messages.StopServer: messages.StopServer(),
}


def test_every_request_has_a_sample_here():
    assert set(SAMPLES) == set(get_args(Request))


def test_the_wire_format_of_a_push_is_fixed():
    push = Push("ab", Number(5, 7, 6, 4, 3), 32, Hyper(0.5, {"t": (0.25,)}), pull=True, wait_s=2.0)
    assert encode(push).hex() == (
        "8aa474797065a470757368ad6d616e69666573745f68617368a26162a66e756d626572950507060403a4726f7773"
        "20a5687970657282ad6c6561726e696e675f72617465cb3fe0000000000000a77363616c61727381a17491cb3f"
        "d0000000000000a470756c6cc3a46e756c6cc2a6776169745f73cb4000000000000000a36c616700a46e6f7465"
        "c0"
    )


def test_the_rows_of_a_push_are_the_last_field_and_left_out_where_there_are_none():
    part = RowExchange((0, 2), (2,), BatchName(5, 6), BatchName(5, 7), (6, 7))
    with_rows = encode(Push("ab", Number(5, 7), 32, tables=part))
    assert with_rows.hex().endswith("a67461626c6573" + "959200029102920506920507920607")
    assert decode_request(with_rows) == Push("ab", Number(5, 7), 32, tables=part)
    assert b"tables" not in encode(Push("ab", Number(5, 7), 32))


@pytest.mark.attack("A07")
@pytest.mark.parametrize("junk", [b"", b"\x80\x04K\x01.", b"cos\nsystem\n", b"\xc1", bytes(64)])
def test_what_is_no_request_is_refused_without_looking_further(junk: bytes):
    with pytest.raises(PSSettingsError):
        decode_request(junk)


HOSTILE = {
    "text that is not UTF-8": b"\x82\xa4type\xa7restore\xa9directory\xa2\xff\xfe",
    "a tag that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "nesting in a field nobody knows": b"\x82\xa4type\xa5stats\xa1x" + b"\x91" * 5000,
    "nested maps": b"\x82\xa4type\xa5stats\xa1x" + b"\x81" * 5000,
}


@pytest.mark.attack("A10")
@pytest.mark.attack("A12")
@pytest.mark.parametrize("meta", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_a_typed_error_on_both_sides(meta: bytes):
    with pytest.raises(PSSettingsError, match="not a request"):
        decode_request(meta)
    with pytest.raises(PSSettingsError, match="no Description"):
        decode_reply(meta, messages.Description)


@pytest.mark.attack("A08")
@pytest.mark.parametrize(
    "fields",
    [
        {"type": "push", "manifest_hash": "h", "number": [1, 0], "rows": 1},
        {"type": "push", "manifest_hash": "h", "number": [1, 2**63], "rows": 1},
        {"type": "push", "manifest_hash": "h", "number": [1, -1], "rows": 1},
        {"type": "push", "manifest_hash": "h", "number": [1, 1], "rows": -1},
        {"type": "push", "manifest_hash": "h", "number": [1, 1], "rows": 2**63},
        {"type": "push", "manifest_hash": "h" * 65, "number": [1, 1], "rows": 1},
        {
            "type": "push",
            "manifest_hash": "h",
            "number": [1, 1],
            "rows": 1,
            "wait_s": math.inf,
        },
        {
            "type": "push",
            "manifest_hash": "h",
            "number": [1, 1],
            "rows": 1,
            "wait_s": math.nan,
        },
        {
            "type": "push",
            "manifest_hash": "h",
            "number": [1, 1],
            "rows": 1,
            "wait_s": -1.0,
        },
        {
            "type": "push",
            "manifest_hash": "h",
            "number": [1, 1],
            "rows": 1,
            "hyper": {"learning_rate": math.nan},
        },
        {"type": "push", "manifest_hash": "h", "number": [1, 1], "rows": 1, "tables": [[-1]]},
        {"type": "push", "manifest_hash": "h", "number": [1, 1], "rows": 1, "tables": [[0] * 1025]},
        {
            "type": "push",
            "manifest_hash": "h",
            "number": [1, 1],
            "rows": 1,
            "tables": [[], [], None, [1, 1], [1] * 1026],
        },
        {"type": "join", "number": [-1, 1]},
        {"type": "join", "number": [1, 1, -1]},
        {"type": "join", "number": [1]},
        {"type": "seed", "manifest_hash": "h", "manifest_bytes": 2**31},
        {"type": "seed", "manifest_hash": "h", "manifest_bytes": 0},
        {"type": "meet", "key": "k" * 257, "wait_s": 1.0},
        {"type": "met", "index_bytes": 0},
        {"type": "met", "index_bytes": (16 << 20) + 1},
        {"type": "save", "directory": "/x", "save_id": "../.."},
        {"type": "fence", "worker": -1, "generation": 1},
        {"type": "unknown"},
    ],
    ids=str,
)
def test_numbers_and_texts_out_of_range_are_refused(fields: dict):
    with pytest.raises(PSSettingsError):
        decode_request(msgspec.msgpack.encode(fields))


def test_an_answer_of_another_kind_is_a_typed_error():
    with pytest.raises(PSSettingsError, match="no Ack"):
        decode_reply(encode(messages.StopServer()), Ack)


MAY_CALL: dict[str, set[type]] = {
    "worker:0": set(SAMPLES) - {messages.Fence, messages.Lose, messages.StopServer},
    "driver:0": {
        messages.Describe, messages.FetchManifest, messages.FetchStats, messages.Pull,
        messages.PullFrozen,
        messages.Lookup, messages.Scan, messages.TakeSnapshot, messages.Save, messages.Restore,
        messages.SetMetadata, messages.FetchMetadata, messages.Compile,
        messages.Fence, messages.Lose, messages.StopServer,
    },
    "supervisor:0": {
        messages.Describe, messages.FetchManifest, messages.FetchStats, messages.FetchMetadata,
        messages.Fence, messages.Lose, messages.StopServer,
    },
    "feeder:0": {messages.Describe, messages.FetchManifest, messages.Scan, messages.LoadRows},
    "server:0": {messages.Describe, messages.FetchManifest, messages.TakeSnapshot, messages.Save},
}  # fmt: skip
CHIEF_ONLY = {
    messages.Compile,
    messages.LoadRows,
    messages.Seed,
    messages.Assign,
    messages.TakeSnapshot,
    messages.Save,
    messages.Restore,
}
MAY_CALL["worker:1"] = MAY_CALL["worker:0"] - CHIEF_ONLY


@pytest.mark.attack("A15")
@pytest.mark.parametrize("caller", MAY_CALL)
def test_roles_may_call_exactly_what_the_table_says(caller: str):
    role, rank = caller.split(":")
    identity = Identity(Role(role), int(rank))
    allowed = set()
    for request in SAMPLES.values():
        try:
            check_caller(request, identity, num_workers=2)
        except RoleError as error:
            assert f"{caller} may not call" in str(error)  # noqa: PT017 - of every refused one
        else:
            allowed.add(type(request))
    assert allowed == MAY_CALL[caller]


def test_a_worker_rank_that_does_not_exist_is_refused():
    with pytest.raises(RoleError, match=r"workers 0\.\.1"):
        check_caller(messages.Pull("h"), Identity(Role.WORKER, 2), num_workers=2)


LEGAL_WHEN_EMPTY = {
    messages.Describe, messages.FetchStats, messages.FetchMetadata, messages.Compile,
    messages.Seed, messages.Restore, messages.BringAnswers,
    messages.JoinRendezvous, messages.Finish, messages.Fence, messages.Lose, messages.StopServer,
}  # fmt: skip


def test_an_empty_shard_names_its_phase():
    for kind, request in SAMPLES.items():
        if kind in LEGAL_WHEN_EMPTY:
            check_phase(request, 3, ServerPhase.EMPTY)
        else:
            with pytest.raises(ServerPhaseError, match="ps:3 is EMPTY"):
                check_phase(request, 3, ServerPhase.EMPTY)


def test_a_restoring_shard_answers_only_what_no_checkpoint_knows():
    legal = {
        messages.Describe, messages.FetchStats, messages.Fence, messages.Lose, messages.StopServer,
        messages.BringAnswers,
    }  # fmt: skip
    for kind, request in SAMPLES.items():
        if kind in legal:
            check_phase(request, 3, ServerPhase.RESTORING)
        else:
            with pytest.raises(ServerPhaseError, match="ps:3 is RESTORING"):
                check_phase(request, 3, ServerPhase.RESTORING)


def test_a_failed_shard_says_why():
    with pytest.raises(ServerPhaseError, match=r"ps:0 is FAILED \(disk\)"):
        check_phase(SAMPLES[Push], 0, ServerPhase.FAILED, "disk")


def test_phases_move_forward_only():
    legal = {
        ("EMPTY", "SERVING"), ("EMPTY", "RESTORING"), ("EMPTY", "DRAINING"),
        ("RESTORING", "SERVING"), ("RESTORING", "DRAINING"), ("SERVING", "DRAINING"),
        ("DRAINING", "CLOSED"), ("FAILED", "DRAINING"),
    }  # fmt: skip
    for now, to in itertools.product(ServerPhase, ServerPhase):
        if to is ServerPhase.FAILED or (now.value, to.value) in legal:
            check_move(0, now, to)
        else:
            match = f"is {now.value} and cannot become {to.value}"
            with pytest.raises(ServerPhaseError, match=match):
                check_move(0, now, to)
