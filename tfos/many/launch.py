"""Launch of a run: what the executors receive, the jobs of its slots, an earlier run's results.

Covers: Spark's slots, broadcasts, keys, the queue's first state.
Does not: check the user's arguments (tfos.many.map_train) or run slots (tfos.many.run).
Runs in: the driver.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import bracketed
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.control.authority import ClusterAuthority
from tfos.driver import server_address
from tfos.errors import NotEnoughSlots, SettingsError
from tfos.many import groups
from tfos.many.items import ListedItems, digest_of
from tfos.many.messages import CLIENT_NAME
from tfos.many.queue import ItemTraining, TrainingQueue
from tfos.many.results import ClaimedResults, ResultHead, ResultsDirectory
from tfos.many.run import MapRun, SlotJobs
from tfos.many.server import many_server
from tfos.many.slot.specs import RunSettings
from tfos.many.slot.task import SlotTask
from tfos.many.trainings import ManyTrainings
from tfos.node import versions
from tfos.slots.offer import Offer
from tfos.slots.reading import read_offer
from tfos.spark.facts import SparkFacts, max_result_bytes
from tfos.spark.jobs import collect_in_order
from tfos.spark.task_secrets import give_keys

_LOOK_S = 0.2
_LOOK_AGAIN_S = (0.5, 1.5)
"""Pauses before a result is looked for again: a mounted directory may show it late."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run takes place."""

    sc: Any
    facts: SparkFacts
    console: Console
    wait_s: float
    """Seconds to wait for the first slot."""

    def count_slots(self, asked: int | None) -> int:
        """Return the number of slots to start; say so if Spark has fewer now.

        Args:
            asked: the user's number; None: all free slots.

        Raises:
            NotEnoughSlots: no executor has registered in time.
            SettingsError: `asked` is None, and Spark has no executor and requests one only for a
                job.
        """
        deadline_s = time.monotonic() + self.wait_s
        while not (offer := read_offer(self.sc, self.facts)).executors:
            if self.facts.is_dynamic:
                if asked is None:
                    raise SettingsError(
                        "slots=None takes the slots that are free, and "
                        "spark.dynamicAllocation.enabled=true has left no executor: pass slots=N, "
                        "and Spark asks for executors"
                    )
                return asked  # the run's own wait is bounded
            if time.monotonic() > deadline_s:
                raise NotEnoughSlots(
                    f"no executor has registered within {self.wait_s:.0f} s: see the cluster "
                    "manager's queue, or raise slot_wait_s"
                )
            time.sleep(_LOOK_S)
        if asked is None:
            return max(1, offer.free)
        if offer.free < asked:
            self.console.line(
                f"map_train: {asked} slots asked for, Spark has {offer.free} free now "
                f"({_words(offer)}); it goes on with those, and with more as they come"
            )
        return asked

    def limits(self) -> dict[str, Any]:
        """Return the slot settings that depend on Spark's own."""
        return {
            "max_result_bytes": max_result_bytes(self.sc),
            "driver_heap_bytes": int(self.sc._jvm.java.lang.Runtime.getRuntime().maxMemory()),
            "shares_gpus": self.facts.task_share("gpu").gpus % 1 != 0,
            "loopback": self.facts.is_local,
        }

    def offer(self) -> str:
        """Return what Spark offers now, in words."""
        return _words(read_offer(self.sc, self.facts))

    def are_slots_held(self) -> bool:
        """Return whether executors exist and this program's tasks hold all their slots."""
        offer = read_offer(self.sc, self.facts)
        return bool(offer.executors) and not offer.free


def _words(offer: Offer) -> str:
    words = (
        f"{len(offer.executors)} executors with {offer.total} task slots, "
        f"{offer.busy - offer.launching} of them held by running tasks"
    )
    if offer.launching:
        words += f", {offer.launching} on executors that are still starting"
    return words


@dataclass(frozen=True, slots=True)
class RunWork:
    """The items of a run, on their way to its slots."""

    names: tuple[str, ...]
    digest: str
    pickled: tuple[bytes, ...] | None
    """Pickled items; None: Spark has them, in `groups`."""
    groups: groups.GroupedItems | None
    digests: tuple[str, ...]
    """Digest of each group's rows or listed item; empty texts if no results are kept."""

    def release(self) -> None:
        """Unpersist them."""
        if self.groups is not None:
            self.groups.release()


def listed_work(items: ListedItems, *, with_digests: bool) -> RunWork:
    """Return the items of a list.

    Args:
        items: their names and pickles.
        with_digests: whether they will be compared with those of an earlier run.
    """
    digests = items.digests if with_digests else ("",) * len(items.names)
    digest = digest_of(zip(items.names, digests, strict=True))
    return RunWork(items.names, digest, items.pickled, None, digests)


def grouped_work(given: Any, num_slots: int, *, with_digests: bool) -> RunWork:
    """Return the groups of a DataFrame, in `num_slots` partitions.

    Args:
        given: the result of `df.groupBy(...)`.
        num_slots: number of partitions.
        with_digests: whether the rows will be compared with those of an earlier run.
    """
    found = groups.group(given, num_slots, with_digests=with_digests)
    return RunWork(found.names, found.digest, None, found, found.row_digests)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The user's options."""

    slots: int | None
    retries: int
    timeout_s: float | None
    function: bytes
    """Pickled."""


def start(
    place: RunPlace,
    work: RunWork,
    options: RunOptions,
    num_slots: int,
    claimed: ClaimedResults | None,
) -> ManyTrainings:
    """Start the slots of a run; if that fails, clean up everything.

    Args:
        place: Spark's side.
        work: items of the run.
        options: the user's options.
        num_slots: number of partitions of groups, and the largest number of slots.
        claimed: directory of the results of this or an earlier run; None: Spark carries values.
    """
    results = claimed.directory if claimed is not None else None
    is_grouped = work.groups is not None
    run_id = secrets.token_hex(8)
    authority = ClusterAuthority(run_id)
    try:
        run = _restored(place, work, options, claimed)
        server = many_server(run, authority.driver(), num_slots=num_slots)
    except BaseException:
        work.release()
        raise
    broadcasts: list[Any] = []

    def release() -> None:
        work.release()
        for each in broadcasts:
            each.destroy()

    try:
        host = server_address.server_host(os.environ, place.facts)
        port = server.start(host.bound, server_address.wanted_ports(os.environ))
        settings = RunSettings(
            run_id=run_id,
            driver_address=f"{bracketed(host.told)}:{port}",
            timeout_s=options.timeout_s,
            results_dir=results.path if results is not None else "",
            is_grouped=is_grouped,
            **place.limits(),
        )
        keys = authority.node(CLIENT_NAME)
        jobs = SlotJobs(
            sc=place.sc,
            run_id=run_id,
            num_slots=num_slots if is_grouped else min(num_slots, len(work.names)),
            action=_action(place.sc, settings, keys, options.function, work, broadcasts),
            wait_s=place.wait_s,
            offer=place.offer,
            are_slots_held=place.are_slots_held,
        )
        run.start(server, jobs)
    except BaseException:
        server.close()
        release()
        raise
    return ManyTrainings(run, _known(work), results, release)


def _known(work: RunWork) -> dict[str, str]:
    """Return the digest of each item by name; for groups only slots know it."""
    digests = work.digests if work.groups is None else ("",) * len(work.names)
    return dict(zip(work.names, digests, strict=True))


def _restored(
    place: RunPlace, work: RunWork, options: RunOptions, claimed: ClaimedResults | None
) -> MapRun:
    """Return the run, including what an earlier one has done."""
    queue = TrainingQueue(
        work.names,
        retries=options.retries,
        homes=work.groups.homes if work.groups is not None else None,
        is_durable=claimed is not None,
    )
    if claimed is None:
        return MapRun(queue, place.console)
    changed = _restore(queue, claimed, work, place.console)
    check = _seen_from_here(claimed.directory, work.names, changed)
    return MapRun(queue, place.console, check)


def _action(
    sc: Any,
    settings: RunSettings,
    keys: TlsCredentials,
    pickled: bytes,
    work: RunWork,
    broadcasts: list[Any],
) -> Callable[[int, int], list[tuple[int, bytes]]]:
    """Return the function that runs the job of one slot."""

    def broadcast(value: Any) -> Any:
        broadcasts.append(sc.broadcast(value))
        return broadcasts[-1]

    function, names, items = broadcast(pickled), broadcast(work.names), None
    if work.pickled is not None:
        items = broadcast(tuple(zip(work.pickled, work.digests, strict=True)))
    here = versions.installed()
    rows = work.groups.frame.rdd if work.groups is not None else None

    def action(slot: int, first_attempt: int) -> list[tuple[int, bytes]]:
        task = SlotTask(settings, function, names, items, first_attempt, here)
        give_keys(sc, settings.run_id, keys)  # the thread belongs to this job
        data = rows if rows is not None else sc.parallelize(range(slot + 1), slot + 1)
        return collect_in_order(data.mapPartitionsWithIndex(task), lambda _: [slot])

    return action


def _restore(
    queue: TrainingQueue, claimed: ClaimedResults, work: RunWork, console: Console
) -> dict[int, ResultHead]:
    """Take over what an earlier run has done; return results of items that have changed.

    Raises:
        SettingsError: a list's item has a result of another value of the item.
    """
    results = claimed.directory
    done: dict[int, ItemTraining] = {}
    changed: dict[int, ResultHead] = {}
    lines = ProgressLines(console)
    for count, (item, head) in enumerate(results.done(work.names), 1):
        lines.show(f"map_train: {count} results of an earlier run are read")
        if (head.item, head.digest) == (work.names[item], work.digests[item]):
            done[item] = ItemTraining(
                item=head.item, seconds=head.seconds, attempts=0, metrics=head.metrics
            )
        elif not claimed.has_same_items and work.groups is None:
            raise SettingsError(
                f"results_dir={results.path} holds results of other items: that of {head.item!r} "
                "is of another value. Pass another results_dir, or delete that one; to keep its "
                f"results of items that have not changed, delete only {results.mark_path}."
            )
        else:
            changed[item] = head
    console.end_progress()
    queue.restore(done)
    if done or changed:
        left = len(queue.table) - len(done)
        again = f", {len(changed)} of them because they have changed" if changed else ""
        console.line(
            f"map_train: {len(done)} of {len(queue.table)} items are done in {results.path}; "
            f"{left} to train{again}"
        )
    return changed


def _seen_from_here(
    results: ResultsDirectory, names: Sequence[str], changed: Mapping[int, ResultHead]
) -> Callable[[int], None]:
    """Return a check that the driver sees an executor's file of an item.

    Args:
        results: directory of the file.
        names: names of the items.
        changed: results that were there before. A new result's digest may differ from the
            driver's: a lost group is recomputed, perhaps with other rows.
    """

    def is_seen(item: int) -> bool:
        found, old = results.head(names[item]), changed.get(item)
        # As texts: a NaN metric does not equal itself.
        return found is not None and str(found) != str(old)

    def check(item: int) -> None:
        for pause_s in _LOOK_AGAIN_S:
            with contextlib.suppress(OSError):  # the file system may be busy
                if is_seen(item):
                    return
            time.sleep(pause_s)
        if not is_seen(item):
            raise SettingsError(
                f"results_dir={results.path}: a slot has written the result of item "
                f"{names[item]!r} there, and the driver does not see it. Pass a directory "
                "that all hosts share, such as hdfs://…"
            )

    return check
