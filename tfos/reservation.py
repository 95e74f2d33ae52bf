"""What reserve() makes: slots counted, keys, an open control plane; and the wait for the roster.

Covers: waiting for executors, the cluster's secrets, the error that names missing nodes.
Does not: check arguments (preflight) or start nodes (node_jobs).
Runs in: the driver.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from rpc.handshake import Credentials
from tfos import slots, spark_facts
from tfos.config import ClusterConfig, InputMode
from tfos.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.control.state import ClusterState
from tfos.errors import ReservationTimeout
from tfos.node_jobs import NodeKeys
from tfos.phases import ClusterPhase
from tfos.topology import Plan

_OFFER_S = 0.1
"""How often slots are counted while executors are awaited."""
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Reservation:
    """An open control plane and all that nodes need to join it."""

    coordinator: Coordinator
    keys: NodeKeys
    credentials: Credentials
    """Of the data plane."""
    driver_address: str
    workers_hold_slots: bool

    def await_roster(self, timeout_s: float) -> None:
        """Wait until every node serves or the cluster has failed.

        Raises:
            ReservationTimeout: names every missing node, where it is and what it did last.
        """
        if self.coordinator.wait(lambda state: state.phase is not ClusterPhase.RESERVED, timeout_s):
            return
        now_s = self.coordinator.now_s()
        missing, text = self.coordinator.read(lambda state: _missing(state, now_s))
        raise ReservationTimeout(
            f"after {timeout_s:.0f} s the cluster is not complete: {text}. Look at the missing "
            f"nodes' executors, check that they reach the driver at {self.driver_address}, or "
            "raise reservation_timeout.",
            missing,
        )


def reserve(
    sc: Any,
    facts: spark_facts.SparkFacts,
    plan: Plan,
    mode: InputMode,
    config: ClusterConfig,
    console: Console,
) -> Reservation:
    """Wait for slots, make the cluster's keys, listen.

    Raises:
        NotEnoughSlots: the cluster does not fit.
        ControlError: the control server cannot listen.
    """
    offer = _await_slots(sc, facts, plan, config, console)
    cluster_id = secrets.token_hex(8)
    authority = ClusterAuthority(cluster_id)
    credentials = Credentials(cluster_id, secrets.token_bytes(_SECRET_BYTES))
    coordinator = Coordinator(plan, config, console)
    port = coordinator.start(facts.bind_host, authority.driver())
    console.line(f"cluster {cluster_id}: {plan}")
    return Reservation(
        coordinator=coordinator,
        keys=NodeKeys(cluster_id, authority, credentials.secret),
        credentials=credentials,
        driver_address=f"{_bracketed(facts.driver_host)}:{port}",
        workers_hold_slots=slots.workers_hold_slots(plan, mode, offer),
    )


def _await_slots(
    sc: Any,
    facts: spark_facts.SparkFacts,
    plan: Plan,
    config: ClusterConfig,
    console: Console,
) -> slots.Offer:
    wait = slots.SlotWait(plan, config, time.monotonic())
    shown = -1
    while True:
        offer = spark_facts.read_offer(sc, facts)
        if wait.ready(offer, time.monotonic()):
            return offer
        if len(offer.executors) != shown:
            shown = len(offer.executors)
            console.line(f"waiting for executors: {slots.shortage(plan, offer)}")
        time.sleep(_OFFER_S)


def _missing(state: ClusterState, now_s: float) -> tuple[list[str], str]:
    missing = state.missing()
    present = [member.name for member in state.members.values() if member not in missing]
    text = (
        f"missing {', '.join(member.describe(now_s) for member in missing)}; "
        f"present: {', '.join(present) or 'none'}"
    )
    return [member.name for member in missing], text


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
