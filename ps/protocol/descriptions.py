"""Descriptions of all servers, seen together: do they serve, and values that belong together.

Covers: the checks of what the servers say of themselves. Pure; no threads.
Does not: ask them (ps.client), describe (ps.server.lifecycle).

A seed goes to one server after the other, so a chief that is lost meanwhile leaves some without it.
No worker begins before all of them have the same one (`are_filled`), so nobody knows the values of
such a seed, and the next attempt of the chief replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.errors import ManifestMismatch, RequestTimeout, ServerPhaseError
from ps.protocol.messages import Description
from ps.protocol.permissions import ServerPhase


def check_serving(described: Sequence[Description], waited_s: float) -> None:
    """Refuse servers that do not all serve the same manifest.

    Args:
        described: every server's answer.
        waited_s: seconds that the caller waited for it, for the message.

    Raises:
        RequestTimeout: one is still EMPTY or RESTORING.
        ServerPhaseError: one has failed or is stopping.
        ManifestMismatch: they serve different manifests.
    """
    for server in described:
        if server.phase == ServerPhase.RESTORING:
            raise RequestTimeout(
                f"ps:{server.server} still restores its parameters from a checkpoint after "
                f"{waited_s:g} s; look at its log",
                {"server": str(server.server)},
            )
        if server.phase == ServerPhase.EMPTY:
            raise RequestTimeout(
                f"ps:{server.server} is still EMPTY after {waited_s:g} s; has the chief seeded it?",
                {"server": str(server.server)},
            )
        if server.phase != ServerPhase.SERVING:
            raise ServerPhaseError(f"ps:{server.server} is {server.phase}: {server.reason}")
    hashes = {server.manifest_hash for server in described}
    if len(hashes) > 1:
        raise ManifestMismatch(
            f"the servers serve different manifests: {sorted(hashes)}; start all of them again"
        )


def are_filled(described: Sequence[Description]) -> bool:
    """Whether every server has values, or restores them, and those of seeds are of the same one.

    Args:
        described: every server's answer.
    """
    return all(map(_is_filled, described)) and len(_seeds(described)) <= 1


def seeds_to_replace(described: Sequence[Description]) -> tuple[int, ...]:
    """Return for each server the seed whose values the next one replaces; 0: none.

    Args:
        described: every server's answer, after all of them refuse what older attempts bring.

    Raises:
        ServerPhaseError: some are restored, and others have nothing.
    """
    if are_filled(described):
        return (0,) * len(described)
    for server in described:
        if _is_filled(server) and not server.seed_id:
            other = next(each for each in described if each.seed_id or not _is_filled(each))
            has = "values of a seed" if other.seed_id else "none"
            raise ServerPhaseError(
                f"ps:{server.server} has its values from a checkpoint and ps:{other.server} has "
                f"{has}: a seed would mix the two. Start new servers, then seed() or restore() all "
                "of them",
                {"server": str(server.server)},
            )
    return tuple(server.seed_id for server in described)


def updates_before(described: Sequence[Description], seed_id: int) -> int:
    """Return how many updates the values had when a seed came; 0 where they are its own.

    Args:
        described: every server's answer to the seed.
        seed_id: id of the seed.
    """
    if seed_id in _seeds(described):
        return 0
    return max(server.clock for server in described)


def different_seeds(described: Sequence[Description]) -> str:
    """Name two servers whose values are of different seeds, for a message.

    Args:
        described: every server's answer; `are_filled` said no, and each has values.
    """
    first = next(server for server in described if server.seed_id)
    other = next(server for server in described if server.seed_id not in (0, first.seed_id))
    return f"ps:{first.server} and ps:{other.server} hold values of different seeds"


def _is_filled(server: Description) -> bool:
    return bool(server.manifest_hash) or server.phase == ServerPhase.RESTORING


def _seeds(described: Sequence[Description]) -> set[int]:
    return {server.seed_id for server in described} - {0}
