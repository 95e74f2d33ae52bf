"""Actions: what the state of a cluster wants done. control.coordinator executes them."""

from __future__ import annotations

from dataclasses import dataclass

from tfos.control.messages import Order
from tfos.failure import NodeId
from tfos.topology import PlannedNode


@dataclass(frozen=True, slots=True)
class Send:
    """Give this order to this attempt of a node."""

    node: NodeId
    order: Order


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user; the cluster goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Inform the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new attempt of a lost node in a slot that Spark has."""

    node: PlannedNode
    first_attempt: int
    delay_s: float


Action = Send | Warn | Tell | Replace
