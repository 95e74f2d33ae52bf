"""Waits for a cluster's slots: asks Spark and YARN, shows the wait, claims slots that fit.

Covers: await_slots.
Does not: decide (tfos.slots.wait), count (tfos.slots.reading, claims, yarn).
Runs in: the driver.      Threads: the one that reserves.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_state import ClusterState
from tfos.errors import PhaseError
from tfos.slots.claims import claims_of
from tfos.slots.offer import Offer
from tfos.slots.placing import Fit
from tfos.slots.reading import read_offer
from tfos.slots.wait import SlotWait, kept_executors, shortage
from tfos.slots.yarn import YarnContainers
from tfos.spark.facts import SparkFacts, num_ending_tasks
from tfos.spark.interruptible import CancelToken
from tfos.watch.job import Job

_OFFER_S = 0.1
"""Seconds between counts of slots while executors are awaited."""


def await_slots(
    sc: Any,
    facts: SparkFacts,
    job: Job,
    wait: SlotWait,
    console: Console,
    cancel: CancelToken,
) -> tuple[Offer, Fit]:
    """Wait until a cluster's nodes fit, and claim their slots for it; return where they go.

    Args:
        sc: the SparkContext.
        facts: Spark's settings, read before the cluster started.
        job: the cluster's job, which answers status requests about the wait.
        wait: the decision to start, wait or fail.
        console: shows what is awaited, on each change and regularly.
        cancel: set when no caller waits for the cluster any more.

    Raises:
        NotEnoughSlots: they do not fit, and a longer wait would not help.
        PhaseError: it was cancelled.
    """
    claims, coordinator = claims_of(sc), job.coordinator
    containers = YarnContainers(sc)
    gpu_resource = wait.config.gpu_resource
    given: int | None = None
    shown = _Shown(coordinator, wait, console)
    try:
        while not cancel.is_set:
            with claims.lock:
                seen = read_offer(sc, facts, gpu_resource)
                claimed, starting = claims.count()
                offer = replace(
                    seen,
                    claimed=claimed,
                    starting=starting,
                    ending=num_ending_tasks(sc) if seen.busy else 0,
                    running=claims.running(),
                    kept=claims.kept(),
                    containers=given,
                )
                if (fit := wait.ready(offer, time.monotonic())) is not None:
                    kept = kept_executors(wait.needs, offer, fit)
                    claims.add(coordinator, job.info.cluster_id, wait.needs.slots_by_node(), kept)
                    coordinator.act(lambda state: state.wait_for(""))
                    return offer, fit
            if offer.outstanding:
                given = containers.count()
                offer = replace(offer, containers=given)
            shown.tell(offer, time.monotonic())
            time.sleep(_OFFER_S)
    finally:
        console.end_progress()
    raise PhaseError("reserve() was interrupted while it waited for executors")


class _Shown:
    """What was shown of a wait: each change at once, and how long nothing has changed.

    Args:
        coordinator: coordinator of the cluster.
        wait: what is awaited.
        console: shows the lines.
    """

    def __init__(self, coordinator: Coordinator, wait: SlotWait, console: Console) -> None:
        self._coordinator = coordinator
        self._wait = wait
        self._console = console
        self._lines = ProgressLines(console, time.monotonic)
        self._told: object = None
        self._warned: set[bool] = set()
        """Of each warning, whether it was about the first executor."""

    def tell(self, offer: Offer, now_s: float) -> None:
        """Show what is new in this offer.

        Args:
            offer: an offer that does not suffice.
            now_s: monotonic seconds.
        """
        wait, seen = self._wait, (len(offer.executors), offer.whereabouts)
        is_first = not offer.executors
        if is_first not in self._warned and (held := wait.held(offer, now_s)):
            self._console.warn(held)  # even if progress is not shown
            self._warned.add(is_first)
        if seen == self._told:
            known = (
                f"{len(offer.executors)}{'' if offer.expected is None else f' of {offer.expected}'}"
            )
            waited = f"{now_s - wait.started_s:.0f} s so far"
            text = f"waiting for slots, {waited}; executors that have registered: {known}"
            self._lines.show(text, is_start=True)
            return
        self._told = seen
        self._lines = ProgressLines(self._console, time.monotonic)
        text = f"waiting for slots: {shortage(wait.needs, offer)}{wait.until(offer)}"
        self._console.line(text)
        self._coordinator.act(functools.partial(ClusterState.wait_for, what=text))
