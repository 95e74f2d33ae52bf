"""Decides whether a cluster's slots are there, should be awaited, or will not come.

Covers: the decision, offer by offer, and its messages.
Does not: ask Spark or wait itself (tfos.slots.awaiting). Pure: the time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from tfos.config import SHARED_SLOTS_S, ClusterConfig
from tfos.errors import NotEnoughSlots
from tfos.slots.offer import Offer
from tfos.slots.placing import Fit, SlotNeeds
from tfos.slots.resources import WORKER_NODES

_TOLD_S = 60.0
"""Seconds after which a wait without any executor tells where to look, and a fit that waits for
occupied slots names their holders."""
_ADVICE = "Use fewer nodes or raise --num-executors, spark.executor.cores or spark.cores.max."
_OF_MASTER = (
    "Use fewer nodes, or start more workers of the standalone master: its page shows the cores and "
    "the memory of its workers, and which applications hold them."
)


@dataclass
class SlotWait:
    """Decides, offer by offer, whether to start, wait or fail.

    Executors of YARN and Kubernetes register tens of seconds after the context exists, and a full
    queue may take minutes, so while configured executors are outstanding the limit is
    `reservation_timeout_s`. So it is while there is no executor at all: a standalone master may
    queue the application behind others. From its first executor on, without a configured number
    (standalone), the offer and the claims of other clusters must not change for `slot_settle_s`, or
    `slot_wait_s` while fewer cores than `spark.cores.max` are there, or where that is not set and
    too few slots are there, busy or not: on a busy host, Java's start takes longer than the pause
    between two executors.
    Their starting nodes are counted twice until they register; SlotWait waits for that too, and for
    tasks of jobs that have ended: those of a fit that failed may last seconds longer.

    A cluster that shares its slots waits for those that tasks hold, if it would fit without them.
    A slot that is free for one moment may belong to a task whose successor is starting.
    """

    needs: SlotNeeds
    config: ClusterConfig
    started_s: float
    master: str = ""
    """Spark's master, which decides how to get more slots."""
    is_dynamic: bool = False
    """Whether Spark adds executors by itself, for the tasks of a job."""
    _seen: tuple[int, int] = (0, 0)
    _changed_s: float | None = None
    _outstanding_s: float = -math.inf
    """When an executor was last awaited: only after that do slots count as held."""
    _fitted: bool = True
    """Whether the cluster fitted at the last check; at the first one it need not have."""

    def ready(self, offer: Offer, now_s: float) -> Fit | None:
        """Return how the cluster fits now; None: it does not fit yet.

        Args:
            offer: executors, slots and running tasks.
            now_s: monotonic seconds.

        Raises:
            NotEnoughSlots: it does not fit, and a longer wait would not help.
        """
        fit, fitted = offer.fit(self.needs), self._fitted or not self.config.shares_slots
        self._fitted = fit is not None
        if fit is not None:
            return fit if fitted else None
        seen = (len(offer.executors), offer.claimed)
        if self._changed_s is None or seen != self._seen:
            self._changed_s = now_s
        self._seen = seen
        still_s = now_s - self._changed_s
        arriving = not offer.executors
        if self.needs.is_plain:
            arriving |= offer.free_at_most >= self.needs.num_slots
        else:
            arriving |= offer.starting + offer.ending > 0
        arriving |= offer.launching > 0 or offer.may_grow_to(self.needs.num_slots)
        waited_s = now_s - self.started_s
        fits_idle = offer.fit(self.needs, is_idle=True) is not None
        arriving |= offer.is_open and not fits_idle
        if offer.complete and not fits_idle:
            text = f"{shortage(self.needs, offer)} {self._advice(offer)}"
            raise NotEnoughSlots(text)  # it would not fit even if others ended
        is_awaited = self._awaits_executor(offer)
        if is_awaited:
            self._outstanding_s = now_s
        if self.config.shares_slots and fits_idle and waited_s < SHARED_SLOTS_S:
            return None
        if is_awaited:
            if waited_s >= self.config.reservation_timeout_s:
                raise NotEnoughSlots(f"{shortage(self.needs, offer)} {self._late(offer)}")
            return None
        if now_s - max(self.started_s, self._outstanding_s) >= self.config.slot_wait_s or (
            still_s >= self.config.slot_settle_s and not arriving
        ):
            advice = f"{_end_others(offer)}{self._advice(offer)}"
            raise NotEnoughSlots(f"{shortage(self.needs, offer)} {advice}")
        return None

    def held(self, offer: Offer, now_s: float) -> str:
        """Return the warning of a long wait for an executor or occupied slots; "": none is due.

        Args:
            offer: executors, slots and running tasks.
            now_s: monotonic seconds.
        """
        waited_s = now_s - self.started_s
        if self._awaits_executor(offer) and not offer.executors and waited_s >= _TOLD_S:
            return (
                f"no executor has registered for {waited_s:.0f} s{_known(offer)}: the cluster "
                "manager's page or queue shows why, such as other applications that hold its cores "
                "or an executor that is larger than any host. It is awaited for "
                f"{self.config.reservation_timeout_s:.0f} s in all"
            )
        if not self.config.shares_slots or not offer.busy or waited_s < _TOLD_S:
            return ""
        others = "See the running jobs in Spark's UI, and end those that do not end by themselves"
        if offer.running:
            stop = "; ".join(f"tfos stop --job {each}" for each in offer.running)
            others = (
                "If it is no fit that ends by itself, "
                f"end cluster {' and '.join(offer.running)} by shutdown() ({stop})"
            )
        return (
            f"a fit waits up to {SHARED_SLOTS_S / 86400:.0f} days for slots that tasks of this "
            f"program hold: {shortage(self.needs, offer)} {others}"
        )

    def _advice(self, offer: Offer) -> str:
        """Return the next step: no setting changes the slots of a local master."""
        if self.master.startswith("local-cluster"):
            return "Use fewer nodes or raise the numbers in --master local-cluster[…]."
        if self.master.startswith("local"):
            held = offer.busy + offer.claimed
            cores = math.ceil((self.needs.num_slots + held) * offer.task.cores)
            return f"Use fewer nodes or start the driver with --master 'local[{cores}]'."
        if self.is_dynamic:
            return (
                "Use fewer nodes or raise spark.dynamicAllocation.minExecutors: Spark asks for "
                "more executors only for the tasks of a job, and nodes start once all have a slot."
            )
        return _OF_MASTER if offer.is_open else _ADVICE

    def until(self, offer: Offer) -> str:
        """Return a sentence with the time limit for executors, if any are awaited."""
        if offer.outstanding:
            return (
                f" {len(offer.executors)} of {offer.expected} executors have registered"
                f"{_known(offer)}. Waiting for {offer.outstanding} more, "
                f"{self.config.reservation_timeout_s:.0f} s at most"
            )
        if self._awaits_first(offer):
            limit_s = self.config.reservation_timeout_s
            return f" Waiting for the first executor, {limit_s:.0f} s at most"
        may_come = offer.may_grow_to(self.needs.num_slots) or offer.is_open
        if may_come and offer.fit(self.needs, is_idle=True) is None:
            return f" Waiting for more executors, {self.config.slot_wait_s:.0f} s at most"
        return ""

    def _awaits_executor(self, offer: Offer) -> bool:
        """Return whether an executor may still come: a configured one, or the first."""
        return self._awaits_first(offer) or offer.outstanding > 0

    def _awaits_first(self, offer: Offer) -> bool:
        """Return whether the application itself may still wait in the cluster manager's queue."""
        return not offer.executors and not self.is_dynamic

    def _late(self, offer: Offer) -> str:
        """Return what has not come in time, and the next step."""
        within = f"within {self.config.reservation_timeout_s:.0f} s{_known(offer)}"
        see = "see the cluster manager's page or queue for why"
        if not offer.outstanding:
            return f"None came {within}: {see}, or raise reservation_timeout."
        return (
            f"{offer.outstanding} executors have not registered {within}: {see}, raise "
            "reservation_timeout, or use fewer nodes."
        )


def _end_others(offer: Offer) -> str:
    """Return what to do about slots that clusters of this program hold; "" if none runs."""
    if not offer.running:
        return ""
    names, are_more = " and ".join(offer.running), len(offer.running) > 1
    stop = "; ".join(f"tfos stop --job {each}" for each in offer.running)
    return (
        f"Cluster{'s' * are_more} {names} of this program run{'s' * (not are_more)}: end "
        f"{'them' if are_more else 'it'} by shutdown() ({stop}). Or: "
    )


def _known(offer: Offer) -> str:
    return f" ({offer.whereabouts})" if offer.whereabouts else ""


def shortage(needs: SlotNeeds, offer: Offer) -> str:
    """Return the arithmetic of too few slots as a sentence, without advice.

    Args:
        needs: needs of the cluster's nodes.
        offer: executors, slots and running tasks.
    """
    if not offer.executors:
        seen = "no executor has registered"
    else:
        names = ", ".join(executor.executor_id for executor in offer.executors)
        sizes = _products(offer) if needs.is_plain else _capacities(offer)
        seen = f"executor{'s' if len(offer.executors) > 1 else ''} {names}: {sizes}"
    if excluded := ", ".join(each.executor_id for each in offer.executors if not each.slots):
        seen += f"; Spark excludes {excluded} after failed tasks (spark.excludeOnFailure.*)"
    busy = offer.busy - offer.launching
    held = f", {busy} of them held by running tasks" if busy else ""
    if not needs.is_plain and busy:
        held = f", running tasks hold {busy} slots"
    if offer.launching:
        held += f", {offer.launching} on executors that are still starting"
    if offer.claimed:
        held += f", {offer.claimed} claimed by clusters that are reserved and not started"
    if offer.kept:
        names = ", ".join(sorted(offer.kept))
        held += f", nodes of other clusters compute on the GPUs of executors {names}"
    configured = (
        f"; {offer.expected} executors are configured"
        if offer.expected is not None and not offer.complete
        else ""
    )
    offered = f"{offer.free} " if needs.is_plain else "too little on each executor "
    return f"need {needs} at once ({needs.what}), Spark offers {offered}({seen}{held}{configured})."


def _products(offer: Offer) -> str:
    sizes = Counter(executor.slots for executor in offer.executors)
    return " + ".join(
        f"{count} x {slots} slot{'s' if slots != 1 else ''}" for slots, count in sizes.items()
    )


def _capacities(offer: Offer) -> str:
    capacities = Counter(
        str(each.free_capacity(offer.task, is_idle=True).free) for each in offer.executors
    )
    return " + ".join(f"{count} x {capacity}" for capacity, count in capacities.items())


def workers_hold_slots(needs: SlotNeeds, offer: Offer, fit: Fit) -> bool:
    """Return whether a worker's task stays for the life of the worker.

    It does when the worker reads its own data, when it has an executor of its own, or when every
    executor has a second slot and as many free ones as workers remain for the tasks that feed them.
    Otherwise it returns after the start and its slot serves feed tasks.

    Args:
        needs: needs of the cluster's nodes.
        offer: executors, slots and running tasks.
        fit: how the cluster fits there.
    """
    if not needs.num_fed or all(node.group != WORKER_NODES for node in needs.nodes):
        return True
    if any(0 < executor.slots < 2 for executor in offer.executors):
        return False
    return fit.left_slots >= needs.num_fed


def kept_executors(needs: SlotNeeds, offer: Offer, fit: Fit) -> frozenset[str]:
    """Return the executors whose whole GPUs nodes keep after their tasks return.

    Args:
        needs: needs of the cluster's nodes.
        offer: executors, slots and running tasks.
        fit: how the cluster fits there.
    """
    if not needs.shares_tasks or workers_hold_slots(needs, offer, fit):
        return frozenset()
    return frozenset(fit.executors[node.name] for node in needs.nodes if node.share.gpus >= 1)
