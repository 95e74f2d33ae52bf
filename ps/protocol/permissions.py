"""Permissions: who may make which request in which phase. Pure: two tables and their check.

Covers: the phases, their legal moves, roles and phases per request.
Does not: know who a peer is (rpc's handshake proves it), execute (ps.server.handlers).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ps.errors import RoleError, ServerPhaseError
from ps.protocol import messages
from rpc.auth.handshake import Identity, Role


class ServerPhase(enum.StrEnum):
    """Where a shard is in its life."""

    EMPTY = "EMPTY"
    """Started; knows no parameters."""
    RESTORING = "RESTORING"
    """Fills itself from a checkpoint; callers that need the parameters are asked to try again."""
    SERVING = "SERVING"
    """Seeded or restored; answers everything."""
    DRAINING = "DRAINING"
    """Stopping; waiting pushes are ended, values can still be pulled."""
    CLOSED = "CLOSED"
    """Stopped."""
    FAILED = "FAILED"
    """Cannot go on; the description says why."""


_MOVES = {
    ServerPhase.EMPTY: {ServerPhase.RESTORING, ServerPhase.SERVING, ServerPhase.DRAINING},
    ServerPhase.RESTORING: {ServerPhase.SERVING, ServerPhase.DRAINING},
    ServerPhase.SERVING: {ServerPhase.DRAINING},
    ServerPhase.DRAINING: {ServerPhase.CLOSED},
    ServerPhase.CLOSED: set[ServerPhase](),
    ServerPhase.FAILED: {ServerPhase.DRAINING},  # a failed shard is still stopped in order
}


def check_move(server: int, now: ServerPhase, to: ServerPhase) -> None:
    """Raise ServerPhaseError unless a shard may go from `now` to `to`; any phase may fail.

    Args:
        server: rank, for the message.
        now: the shard's phase.
        to: the phase to enter.
    """
    if to is not ServerPhase.FAILED and to not in _MOVES[now]:
        legal = ", ".join(sorted(phase.value for phase in _MOVES[now])) or "nowhere"
        raise ServerPhaseError(
            f"ps:{server} is {now.value} and cannot become {to.value}; legal: {legal}"
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    roles: frozenset[Role]
    phases: frozenset[ServerPhase]
    chief_only: bool = False
    """Whether rank 0 alone may send it, of the workers."""
    is_read: bool = False
    """Changes nothing, so a replaced worker is answered too."""


_ANY_PHASE = frozenset(ServerPhase)
_FILLED_OR_EMPTY = _ANY_PHASE - {ServerPhase.RESTORING}
"""For requests that a checkpoint can answer: while it is read, an empty answer would be wrong."""
_LOADED = frozenset({ServerPhase.SERVING, ServerPhase.DRAINING})
_SERVING = frozenset({ServerPhase.SERVING})
_FILLING = frozenset({ServerPhase.EMPTY, ServerPhase.SERVING})
_READERS = frozenset({Role.WORKER, Role.DRIVER, Role.SUPERVISOR})
_WORKERS = frozenset({Role.WORKER})
_WORKERS_AND_DRIVER = frozenset({Role.WORKER, Role.DRIVER})
_SCANNERS = frozenset({Role.WORKER, Role.DRIVER, Role.FEEDER})
"""Spark tasks read whole tables (tfos.serving.table_tasks), with the credentials of feeders."""
_LOADERS = frozenset({Role.WORKER, Role.FEEDER})
"""Spark tasks bring whole tables (tfos.serving.table_tasks). No trained row changes by it."""
_LEADER = frozenset({Role.SERVER})
"""For hand-started servers that save themselves; see ps.cli.self_saving."""
_MANAGERS = frozenset({Role.DRIVER, Role.SUPERVISOR})

_RULES: dict[type, _Rule] = {
    messages.Describe: _Rule(_READERS | _SCANNERS | _LEADER, _ANY_PHASE, is_read=True),
    messages.FetchStats: _Rule(_READERS, _ANY_PHASE, is_read=True),
    messages.FetchManifest: _Rule(_READERS | _SCANNERS | _LEADER, _LOADED, is_read=True),
    messages.Pull: _Rule(_WORKERS_AND_DRIVER, _LOADED, is_read=True),
    messages.PullFrozen: _Rule(_WORKERS_AND_DRIVER, _LOADED, is_read=True),
    messages.Push: _Rule(_WORKERS, _SERVING),
    messages.Settle: _Rule(_WORKERS, _SERVING),
    messages.Lookup: _Rule(_WORKERS_AND_DRIVER, _LOADED, is_read=True),
    messages.LookupBatch: _Rule(_WORKERS, _SERVING),
    messages.PushRows: _Rule(_WORKERS, _SERVING),
    messages.Scan: _Rule(_SCANNERS, _LOADED, is_read=True),
    messages.LoadRows: _Rule(_LOADERS, _SERVING, chief_only=True),
    messages.Join: _Rule(_WORKERS, _SERVING),
    messages.Leave: _Rule(_WORKERS, _LOADED),
    messages.Finish: _Rule(_WORKERS, _FILLED_OR_EMPTY),
    messages.JoinRendezvous: _Rule(_WORKERS, _FILLING),
    messages.BringAnswers: _Rule(_WORKERS, _ANY_PHASE),
    messages.SetMetadata: _Rule(_WORKERS_AND_DRIVER, _SERVING),
    messages.FetchMetadata: _Rule(_READERS, _FILLED_OR_EMPTY, is_read=True),
    messages.Compile: _Rule(_WORKERS_AND_DRIVER, _FILLING, chief_only=True),
    messages.Seed: _Rule(_WORKERS, _FILLING, chief_only=True),
    messages.Assign: _Rule(_WORKERS, _SERVING, chief_only=True),
    messages.TakeSnapshot: _Rule(_WORKERS_AND_DRIVER | _LEADER, _SERVING, chief_only=True),
    messages.Save: _Rule(_WORKERS_AND_DRIVER | _LEADER, _SERVING, chief_only=True),
    messages.Restore: _Rule(_WORKERS_AND_DRIVER, _FILLING, chief_only=True),
    messages.Fence: _Rule(_MANAGERS, _ANY_PHASE),
    messages.Lose: _Rule(_MANAGERS, _ANY_PHASE),
    messages.StopServer: _Rule(_MANAGERS, _ANY_PHASE),
}


def name_of(request: messages.Request) -> str:
    """The request's name as users know it."""
    return type(request).__name__.lower()


def changes_state(request: messages.Request) -> bool:
    """Whether a replaced attempt of a worker must not make the request."""
    return not _RULES[type(request)].is_read


def is_allowed(
    request: messages.Request, caller: Identity, num_workers: int, phase: ServerPhase
) -> bool:
    """Whether this caller may make the request in this phase; the checks below say why not.

    Args:
        request: what is asked.
        caller: the authenticated peer.
        num_workers: number of workers in the cluster.
        phase: the shard's.
    """
    rule = _RULES[type(request)]
    if caller.role not in rule.roles or phase not in rule.phases:
        return False
    return caller.role is not Role.WORKER or (
        caller.rank < num_workers and not (rule.chief_only and caller.rank)
    )


def check_caller(request: messages.Request, caller: Identity, num_workers: int) -> None:
    """Refuse a caller that may not make this request in any phase.

    Args:
        request: what is asked.
        caller: the authenticated peer.
        num_workers: number of workers in the cluster.

    Raises:
        RoleError: wrong role, not the chief, or a worker rank that the cluster does not have.
    """
    rule = _RULES[type(request)]
    name = name_of(request)
    if caller.role not in rule.roles:
        allowed = ", ".join(sorted(role.value for role in rule.roles))
        raise RoleError(f"{caller} may not call {name}; roles that may: {allowed}")
    if caller.role is not Role.WORKER:
        return
    if caller.rank >= num_workers:
        raise RoleError(
            f"{caller} called {name}, but the cluster has the workers 0..{num_workers - 1}; "
            "start the servers with a larger num_workers"
        )
    if rule.chief_only and caller.rank:
        raise RoleError(f"{caller} may not call {name}; only the chief, worker:0, may")


def check_phase(
    request: messages.Request, server: int, phase: ServerPhase, reason: str = ""
) -> None:
    """Refuse a request that is illegal in the shard's phase.

    Args:
        request: what is asked.
        server: rank, for the message.
        phase: the shard's.
        reason: why it failed or stops; "": unknown.

    Raises:
        ServerPhaseError: the message names the phase and the phases in which it is legal.
    """
    rule = _RULES[type(request)]
    if phase in rule.phases:
        return
    legal = ", ".join(known.value for known in ServerPhase if known in rule.phases)
    why = f" ({reason})" if reason else ""
    raise ServerPhaseError(
        f"{name_of(request)} needs a shard that is {legal}; ps:{server} is {phase.value}{why}",
        {"phase": phase.value, "server": str(server)},
    )
