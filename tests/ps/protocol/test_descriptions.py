"""What all servers say, seen together: whether values belong together, and what a seed replaces."""

from __future__ import annotations

import msgspec
import pytest

from ps.errors import ManifestMismatch, PSError, RequestTimeout, ServerPhaseError
from ps.protocol.descriptions import (
    are_filled,
    check_serving,
    different_seeds,
    seeds_to_replace,
    updates_before,
)
from ps.protocol.messages import Description

EMPTY, RESTORED, RESTORING = -1, 0, -2


def described(*servers: int) -> list[Description]:
    """One each with values of that seed, or in that state."""
    phases = {EMPTY: "EMPTY", RESTORING: "RESTORING"}
    return [
        Description(
            rank,
            len(servers),
            2,
            phases.get(state, "SERVING"),
            manifest_hash="" if state in phases else "m",
            seed_id=max(0, state),
        )
        for rank, state in enumerate(servers)
    ]


@pytest.mark.parametrize(
    ("servers", "replaced"),
    [
        ((7, 7), (0, 0)),
        ((RESTORED, 7), (0, 0)),
        ((RESTORED, RESTORED), (0, 0)),
        ((RESTORING, 7), (0, 0)),
        ((EMPTY, EMPTY), (0, 0)),
        ((7, EMPTY), (7, 0)),
        ((EMPTY, 7, 8), (0, 7, 8)),
        ((7, 8), (7, 8)),
    ],
)
def test_a_seed_replaces_what_does_not_belong_together(
    servers: tuple[int, ...], replaced: tuple[int, ...]
):
    found = described(*servers)
    assert seeds_to_replace(found) == replaced
    assert are_filled(found) == (not any(replaced) and EMPTY not in servers)


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        ((RESTORED, EMPTY), r"ps:0 has its values from a checkpoint and ps:1 has none: .* restore"),
        ((EMPTY, RESTORING), r"ps:1 has its values from a checkpoint and ps:0 has none"),
        ((7, RESTORED, 8), r"ps:1 has its values from a checkpoint and ps:0 has values of a seed"),
    ],
)
def test_what_was_restored_is_not_mixed_with_a_seed(servers: tuple[int, ...], text: str):
    with pytest.raises(ServerPhaseError, match=text):
        seeds_to_replace(described(*servers))


def test_two_servers_of_different_seeds_are_named():
    assert different_seeds(described(RESTORED, 7, 7, 8)).startswith("ps:1 and ps:3 hold")


@pytest.mark.parametrize(
    ("servers", "num_updates"), [((7, 7), 0), ((8, 8), 4), ((RESTORED, RESTORED), 4)]
)
def test_updates_before_a_seed_are_of_other_values_than_its_own(
    servers: tuple[int, ...], num_updates: int
):
    """Workers may push before the answers have come."""
    found = [msgspec.structs.replace(each, clock=3 + each.server) for each in described(*servers)]
    assert updates_before(found, 7) == num_updates


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"phase": "RESTORING"}, RequestTimeout, r"ps:1 still restores its parameters .* 9 s"),
        ({"phase": "EMPTY"}, RequestTimeout, r"ps:1 is still EMPTY after 9 s; has the chief"),
        ({"phase": "FAILED", "reason": "a full disk"}, ServerPhaseError, "FAILED: a full disk"),
        ({"manifest_hash": "other"}, ManifestMismatch, r"different manifests: \['m', 'other'\]"),
    ],
)
def test_who_attaches_hears_what_keeps_a_server_from_serving(
    changes: dict[str, str], error: type[PSError], text: str
):
    first, second = described(RESTORED, RESTORED)
    check_serving([first, second], 9.0)
    with pytest.raises(error, match=text):
        check_serving([first, msgspec.structs.replace(second, **changes)], 9.0)
