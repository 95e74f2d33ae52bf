"""The phases of a cluster and the legal moves between them. Pure."""

from __future__ import annotations

import enum

from tfos.errors import PhaseError


class ClusterPhase(enum.Enum):
    """Phase of a cluster; the value is the text that status shows."""

    NEW = "planned, nothing reserved yet"
    RESERVED = "slots counted, control server listens, nodes may register"
    RUNNING = "every node serves, main_fun runs"
    CLOSED = "shut down, nothing is left"
    FAILED = "a node failed or the start did; shutdown() cleans up"


_MOVES = {
    ClusterPhase.NEW: {ClusterPhase.RESERVED, ClusterPhase.FAILED, ClusterPhase.CLOSED},
    ClusterPhase.RESERVED: {ClusterPhase.RUNNING, ClusterPhase.FAILED, ClusterPhase.CLOSED},
    ClusterPhase.RUNNING: {ClusterPhase.FAILED, ClusterPhase.CLOSED},
    ClusterPhase.FAILED: {ClusterPhase.CLOSED},
    ClusterPhase.CLOSED: set(),
}


def may_move(current: ClusterPhase, target: ClusterPhase) -> bool:
    """Whether a cluster may move from one phase to another.

    Args:
        current: its phase.
        target: the phase to enter.
    """
    return target in _MOVES[current]


def require(call: str, current: ClusterPhase, *allowed: ClusterPhase) -> None:
    """Raise PhaseError unless the cluster is in one of the allowed phases.

    Args:
        call: name of the user's call, for the message.
        current: the cluster's phase.
        allowed: phases that the call fits.
    """
    if current not in allowed:
        names = " or ".join(phase.name for phase in allowed)
        raise PhaseError(
            f"{call} needs the cluster to be {names}; it is {current.name} ({current.value})"
        )
