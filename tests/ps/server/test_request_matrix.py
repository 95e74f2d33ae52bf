"""Every request by every role, rank and generation: refused before it is carried out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import msgspec
import pytest

from ps.errors import StaleGeneration
from ps.protocol import messages
from ps.protocol.messages import Request
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import connect
from rpc.errors import RemoteError
from tests.ps.protocol.test_messages import MAY_CALL, SAMPLES
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(1000, rule=ADD)
READS = {
    messages.Describe, messages.FetchManifest, messages.FetchStats, messages.FetchMetadata,
    messages.Pull, messages.PullFrozen, messages.Lookup, messages.Scan,
}  # fmt: skip
"""Answered to a replaced worker too: it changes nothing."""
OF_TABLES = {messages.LookupBatch, messages.PushRows}
"""In tests/ps/client/test_tables.py."""


def codes_of(bed: Cluster, caller: Identity, kinds: Iterable[type]) -> dict[type, str]:
    """Return by request the code of the error that it ends in; empty: it was carried out."""
    codes: dict[type, str] = {}
    for kind in kinds:
        request = SAMPLES[kind]
        changes = {"manifest_hash": MANIFEST.hash()} if hasattr(request, "manifest_hash") else {}
        meta = messages.encode(msgspec.structs.replace(request, **changes))
        with connect(bed.endpoints[0], caller, bed.credentials) as connection:
            try:
                connection.call(meta, _payload(request), timeout_s=10.0)
                codes[kind] = ""
            except RemoteError as error:
                codes[kind] = error.code
    return codes


def _payload(request: Any) -> list[bytes]:
    if isinstance(request, messages.Push | messages.Assign):
        return [bytes(4000)]
    return [b"{}"] if isinstance(request, messages.SetMetadata) else []


@pytest.mark.attack("A15")
@pytest.mark.parametrize("role", Role)
def test_no_role_or_rank_that_may_not_call_reaches_a_handler(role):
    with cluster(num_workers=2) as bed:  # so rank 1 is a worker, but not the chief
        bed.workers(MANIFEST, filled(MANIFEST))
        for rank in (0, 1, 2):
            ranked = MAY_CALL.get(f"{role}:{rank}", set()) if role is Role.WORKER else None
            may = MAY_CALL[f"{role}:0"] if ranked is None else ranked
            refused = set(get_args(Request)) - may
            codes = codes_of(bed, Identity(role, rank), refused)
            assert codes == dict.fromkeys(refused, "role")


@pytest.mark.attack("A15")
@pytest.mark.fault("F06")
@pytest.mark.parametrize("generation", [0, 4])
def test_a_replaced_generation_changes_nothing_by_any_request(generation):
    with cluster() as bed:
        bed.workers(MANIFEST, filled(MANIFEST))
        bed.driver().fence(0, 5)
        changing = MAY_CALL["worker:0"] - READS - OF_TABLES
        codes = codes_of(bed, Identity(Role.WORKER, 0, generation), changing)
        assert codes == dict.fromkeys(changing, StaleGeneration.code)
