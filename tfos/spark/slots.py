"""Task slots: how many a cluster needs at once, how many Spark has free, and whether to wait.

Covers: the arithmetic and its sentences.
Does not: ask Spark (tfos.spark.facts). Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfos.config import ClusterConfig, InputMode
from tfos.errors import NotEnoughSlots
from tfos.topology import Plan


@dataclass(frozen=True, slots=True)
class ExecutorSlots:
    """One executor as Spark's scheduler sees it now."""

    executor_id: str
    host: str
    slots: int
    """Tasks that it runs at once: cores / spark.task.cpus."""
    busy: int = 0
    """Tasks of this application that it runs now."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Spark's current offer; `expected` is the configured number of executors, if any."""

    executors: tuple[ExecutorSlots, ...]
    expected: int | None = None
    claimed: int = 0
    """Slots of nodes that other clusters of this SparkContext have reserved and not started yet."""
    starting: int = 0
    """Those of them that start now: they may be counted as busy, too, until they register."""
    containers: int | None = None
    """Containers that YARN has given to executors; None: not known."""

    @property
    def total(self) -> int:
        """All slots, busy or not."""
        return sum(executor.slots for executor in self.executors)

    @property
    def free(self) -> int:
        """Slots that no task of this application holds and no other cluster has claimed."""
        return max(0, self.total - self.busy - self.claimed)

    @property
    def free_at_most(self) -> int:
        """Free slots if every node that starts was counted twice."""
        twice = min(self.busy, self.starting)
        return max(0, self.total - self.busy - self.claimed + twice)

    @property
    def busy(self) -> int:
        """Slots that tasks of this application hold."""
        return sum(min(executor.slots, executor.busy) for executor in self.executors)

    @property
    def complete(self) -> bool:
        """Whether every configured executor has registered."""
        return self.expected is not None and len(self.executors) >= self.expected

    @property
    def outstanding(self) -> int:
        """Configured executors that have not registered yet."""
        return max(0, (self.expected or 0) - len(self.executors))

    @property
    def whereabouts(self) -> str:
        """What is known of the executors that have not registered; "": nothing."""
        if self.containers is None or not self.outstanding:
            return ""
        preparing = min(self.outstanding, max(0, self.containers - len(self.executors)))
        asked = self.outstanding - preparing
        parts = []
        if preparing:
            has = "has a container" if preparing == 1 else "have containers"
            parts.append(f"{preparing} {has}: files are being localised, or Java starts")
        if asked:
            parts.append(
                f"for {asked} YARN has given no container yet: its queue or nodes may be full"
            )
        return "; ".join(parts)


ADVICE = "Lower cluster_size or raise --num-executors, spark.executor.cores or spark.cores.max."


@dataclass
class SlotWait:
    """Decides, offer by offer, whether to start, wait or fail.

    Executors of YARN and Kubernetes register tens of seconds after the context exists, and a full
    queue may take minutes, so while configured executors are outstanding the limit is
    `reservation_timeout_s`. Without a configured number
    (standalone), the offer and the claims of other clusters must not change for `slot_settle_s`.
    Their starting nodes are counted twice until they register; SlotWait waits for that too.
    """

    plan: Plan
    config: ClusterConfig
    started_s: float
    _seen: tuple[int, int] = (0, 0)
    _changed_s: float | None = None

    def ready(self, offer: Offer, now_s: float) -> bool:
        """Return whether the cluster fits now.

        Args:
            offer: executors, slots and running tasks.
            now_s: monotonic seconds.

        Raises:
            NotEnoughSlots: it does not, and waiting longer is of no use.
        """
        if offer.free >= self.plan.num_slots:
            return True
        seen = (len(offer.executors), offer.claimed)
        if self._changed_s is None or seen != self._seen:
            self._changed_s = now_s
        self._seen = seen
        still_s = now_s - self._changed_s
        arriving = not offer.complete if offer.expected is not None else not offer.executors
        arriving |= offer.free_at_most >= self.plan.num_slots
        waited_s = now_s - self.started_s
        if offer.complete and offer.total < self.plan.num_slots:
            raise NotEnoughSlots(f"{shortage(self.plan, offer)} {ADVICE}")
        if offer.outstanding:
            if waited_s >= self.config.reservation_timeout_s:
                raise NotEnoughSlots(
                    f"{shortage(self.plan, offer)} {offer.outstanding} executors have not "
                    f"registered within {waited_s:.0f} s{_known(offer)}: see the cluster manager's "
                    "queue for why, raise reservation_timeout, or lower cluster_size."
                )
            return False
        if waited_s >= self.config.slot_wait_s or (
            still_s >= self.config.slot_settle_s and not arriving
        ):
            raise NotEnoughSlots(f"{shortage(self.plan, offer)} {ADVICE}")
        return False

    def until(self, offer: Offer) -> str:
        """Return a sentence that names how long configured executors are awaited, if any are."""
        if not offer.outstanding:
            return ""
        return (
            f" {len(offer.executors)} of {offer.expected} executors have registered"
            f"{_known(offer)}. Waiting for {offer.outstanding} more, "
            f"{self.config.reservation_timeout_s:.0f} s at most"
        )


def _known(offer: Offer) -> str:
    return f" ({offer.whereabouts})" if offer.whereabouts else ""


def shortage(plan: Plan, offer: Offer) -> str:
    """Return the sentence with the arithmetic of too few slots; it gives no advice.

    Args:
        plan: the nodes.
        offer: executors, slots and running tasks.
    """
    need = plan.num_slots
    if not offer.executors:
        seen = "no executor has registered"
    else:
        names = ", ".join(executor.executor_id for executor in offer.executors)
        seen = f"executor{'s' if len(offer.executors) > 1 else ''} {names}: {_products(offer)}"
    held = f", {offer.busy} of them held by running tasks" if offer.busy else ""
    if offer.claimed:
        held += f", {offer.claimed} claimed by clusters that are reserved and not started"
    configured = (
        f"; {offer.expected} executors are configured"
        if offer.expected is not None and not offer.complete
        else ""
    )
    return (
        f"need {need} task slots at once ({plan}), Spark offers {offer.free} "
        f"({seen}{held}{configured})."
    )


def _products(offer: Offer) -> str:
    sizes: dict[int, int] = {}
    for executor in offer.executors:
        sizes[executor.slots] = sizes.get(executor.slots, 0) + 1
    return " + ".join(
        f"{count} x {slots} slot{'s' if slots != 1 else ''}" for slots, count in sizes.items()
    )


def workers_hold_slots(plan: Plan, mode: InputMode, offer: Offer) -> bool:
    """Return whether a worker's task stays for the life of the worker.

    It does when the worker reads its own data, or when every executor has a second slot and as many
    free ones as workers remain for the tasks that feed them. Otherwise it returns after the start
    and its slot serves feed tasks.

    Args:
        plan: the nodes.
        mode: who reads the data.
        offer: executors, slots and running tasks.
    """
    if mode is InputMode.TENSORFLOW:
        return True
    if any(executor.slots < 2 for executor in offer.executors):
        return False
    return offer.free - plan.num_slots >= plan.num_workers
