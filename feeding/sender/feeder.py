"""Feeder: sends the rows of one partition to the workers, chunk by chunk.

Covers: which rows are sent (Selection), routing each chunk, waiting for room, lost workers, time
limits; skipping the rows that earlier attempts have fed.
Does not: pack (encode.packer), shuffle (shuffle), choose workers (routing), hold connections
(worker_link, connection_pool), send rows that need results (inference).
Runs in: a Spark task.
Threads: one.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import FeedTimeout, NoWorkerLeft, RowsChanged
from feeding.protocol.messages import Hello, Wait
from feeding.protocol.row_ranges import AcceptedRows, RowRanges, Span
from feeding.sender.routing import choose
from feeding.sender.shuffle import Shuffle
from feeding.sender.worker_link import (
    FRESH_S,
    PATIENCE_S,
    FeedTarget,
    LostWorker,
    WorkerLink,
    greet,
    hold_s,
    wait_links,
)
from rpc.auth.handshake import Credentials


class Selection:
    """Which rows of a partition are sent, by their number in the order of feeding.

    Args:
        only: ranges of the wanted rows; None: all.
    """

    def __init__(self, only: Iterable[Span] | None) -> None:
        self._only = None if only is None else RowRanges(only)
        self._done = RowRanges()

    @property
    def num_rows(self) -> int | None:
        """Number of wanted rows; None: all of the partition."""
        return None if self._only is None else self._only.num_rows

    @property
    def last_done(self) -> int:
        """Last row that an earlier attempt has fed, plus one."""
        return self._done.stop

    def ends_before(self, row: int) -> bool:
        """Return whether no row from `row` on is wanted."""
        return self._only is not None and row >= self._only.stop

    def exclude(self, accepted: AcceptedRows) -> AcceptedRows:
        """Exclude the rows that a worker accepted before; return the wanted ones of them.

        A row that another worker has too, since a reply was lost, is in the first one's rows alone.
        """
        found = AcceptedRows()
        for row, count, position in accepted:
            for start, stop in self._to_send(row, row + count):
                found.add(start, stop - start, position + start - row)
                self._done.add(start, stop)
        return found

    def pick(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the parts of a chunk to send."""
        if self._only is None and not self._done:  # the usual case
            yield chunk
            return
        first = chunk.meta.first_row
        for start, stop in self._to_send(first, first + chunk.num_rows):
            yield chunk.rows(start - first, stop - first)

    def _to_send(self, start: int, stop: int) -> Iterator[Span]:
        for span in self.wanted(start, stop):
            yield from self._done.outside(*span)

    def wanted(self, start: int, stop: int) -> list[Span]:
        """Return the wanted parts of [start, stop).

        Args:
            start: the first row.
            stop: the row after the last.
        """
        return [(start, stop)] if self._only is None else self._only.inside(start, stop)


@dataclass(frozen=True, slots=True)
class FeedReport:
    """Counts of one fed partition.

    rows = what `accepted` has + dropped_rows.
    With exactly_once, the rows that earlier attempts of the task have fed count too.
    """

    partition: int
    rows: int = 0
    """Wanted rows of the partition."""
    partition_rows: int = 0
    """Rows of the partition as this attempt has read it, wanted or not."""
    dropped_rows: int = 0
    """Rows that were not sent: every trainer had stopped reading, or `unsent`."""
    lost: tuple[LostWorker, ...] = ()
    """Workers whose connection ended before the partition's end, also without rows to send."""
    accepted: dict[int, bytes] = field(default_factory=dict)
    """By worker, lost ones included: packed `feeding.protocol.row_ranges.AcceptedRows`."""
    transports: tuple[str, ...] = ()
    """The transport to each connected worker: shared memory, socket or network."""
    unsent: tuple[Span, ...] = ()
    """Rows that no worker was left to take, or that came again after all had ended the epoch; with
    `keeps_unsent` only."""
    no_worker: str = ""
    """Why no worker was left; empty: they had ended the epoch."""
    ended: tuple[int, ...] = ()
    """Processes of the workers that refused rows: they had read the end of the epoch."""


class Stall:
    """Deadline that each progress restarts; only the feeder's waits count."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def moved(self) -> None:
        """Restart the deadline after progress."""
        self._deadline = time.monotonic() + self._timeout_s


class Feeder:
    """Feeds one partition; used once.

    Args:
        targets: the workers.
        credentials: credentials of the cluster.
        config: limits and deadlines.
        packer: makes chunks of this partition's rows.
        hello: feed, epoch and partition.
        shuffle: order of the rows; None: that of the partition.
        only: ranges of the rows to feed, numbered in the order of feeding; None: all.
        keeps_unsent: report the rows that no worker is left to take, instead of NoWorkerLeft.
    """

    def __init__(  # noqa: PLR0913 - as FeedTask
        self,
        targets: Sequence[FeedTarget],
        credentials: Credentials,
        config: FeedConfig,
        packer: Packer,
        hello: Hello,
        *,
        shuffle: Shuffle | None = None,
        only: Sequence[Span] | None = None,
        keeps_unsent: bool = False,
    ) -> None:
        self._keeps_unsent = keeps_unsent
        self._config = config
        self._hello = hello
        self._feed = hello.feed
        self._partition = hello.partition
        self._packer = packer
        self._shuffle = shuffle
        self._selection = Selection(only)
        self._links = [WorkerLink(target, credentials, hello.feed) for target in targets]
        self._queued: deque[Chunk] = deque()

    def run(self, rows: Iterator[Any]) -> FeedReport:
        """Send all rows; return once every chunk was accepted.

        Raises:
            RowError: a row does not fit a chunk.
            TrainerFailed: `main_fun` raised.
            FeedTimeout: no worker consumed anything for `feed_timeout_s`.
            NoWorkerLeft: every worker is gone, and the feeder does not keep unsent rows.
            FeedClosed: the cluster is stopping.
            RowsChanged: the partition has fewer rows than an earlier attempt has fed.
        """
        chunks = self._packer.chunks(rows)
        if self._shuffle is not None:
            chunks = self._shuffle.chunks(chunks, self._config.max_inflight_bytes)
        first = next(chunks, None)
        if first is None and not self._hello.exactly_once:  # else an earlier attempt had rows
            missing = self._selection.num_rows or 0
            return FeedReport(self._partition, rows=missing, dropped_rows=missing)
        try:
            self._begin()
            try:
                self._send_all(chunks if first is None else itertools.chain([first], chunks))
            except NoWorkerLeft as error:
                if not self._keeps_unsent:
                    raise
                return self._unsent(self._report(rows), str(error))
            report = self._report(rows)
            has_ended = any(link.ended and not link.status.draining for link in self._links)
            if self._keeps_unsent and self._hello.reopen and report.dropped_rows and has_ended:
                report = self._unsent(report, "")
            for link in self._links:
                link.keep()
            return report
        finally:
            for link in self._links:
                link.close()

    def _begin(self) -> None:
        """Take kept connections; greet all workers first if their answers decide what is sent."""
        hello = self._hello
        if hello.exactly_once:
            hello = msgspec.structs.replace(hello, attempt=secrets.randbits(62) + 1)
        self._hello = hello
        for link in self._links:
            link.take_kept()
        if not hello.exactly_once and not hello.reopen:
            return
        for link in self._links:
            link.is_needed = hello.exactly_once
            if link.pending is not None:  # a Wait, whose reply would delay this partition
                link.close()
        stall = Stall(self._config.feed_timeout_s)
        greet(self._links, hello, self._config.connect_timeout_s)
        for link in self._links:
            found = link.recall(hello, self._config.connect_timeout_s)
            # Its rows are trained, if it lives, so they must not go to others.
            while link.silent and hello.exactly_once:
                greet_again([link], hello, self._config, stall)
                found = link.recall(hello, self._config.connect_timeout_s)
            link.accepted = self._selection.exclude(found)

    def _send_all(self, chunks: Iterator[Chunk]) -> None:
        """Send what is wanted of these chunks; return once every one of them was accepted."""
        wanted = True
        for chunk in chunks:
            if self._selection.ends_before(chunk.meta.first_row):
                break
            self._queued.extend(self._selection.pick(chunk))
            wanted = self._send_queued()
            if not wanted:
                break
        while self._settle() and wanted:
            wanted = self._send_queued()

    def _unsent(self, report: FeedReport, reason: str) -> FeedReport:
        """Return the report of a partition with the rows that no worker was left to take."""
        accepted = RowRanges(span for link in self._links for span in link.accepted.spans())
        wanted = self._selection.wanted(0, report.partition_rows)
        unsent = [part for span in wanted for part in accepted.outside(*span)]
        return replace(report, unsent=tuple(unsent), no_worker=reason)

    def _greet(self, link: WorkerLink) -> None:
        """Greet a worker for its status."""
        # Without the claim: a later attempt may have claimed the partition meanwhile.
        hello = msgspec.structs.replace(self._hello, exactly_once=False, reopen=0)
        greet([link], hello, self._config.connect_timeout_s)

    def _send_queued(self) -> bool:
        """Send the queued chunks; False once every trainer has stopped reading."""
        stall = Stall(self._config.feed_timeout_s)
        # Fixed until a chunk is sent: otherwise the first of many statuses is stale when the last
        # one arrives.
        since_s = time.monotonic() - FRESH_S
        while self._queued:
            alive = self._alive()
            if all(link.wants_none for link in alive):
                return False
            chunk = self._queued[0]
            views = [link.view(since_s) for link in alive]
            index = choose(views, chunk.num_bytes, self._partition)
            if index is None:
                self._wait(stall)
            elif not alive[index].is_usable(since_s):
                self._greet(alive[index])
            elif alive[index].put(chunk, self._config.feed_timeout_s, self._hello.attempt):
                self._queued.popleft()
                since_s = time.monotonic() - FRESH_S
        return True

    def _settle(self) -> bool:
        """Wait until no chunk is in flight; True if some must be sent again."""
        stall = Stall(self._config.feed_timeout_s)
        while any(link.chunk for link in self._links):
            self._wait(stall)
        return bool(self._queued)

    def _wait(self, stall: Stall) -> None:
        """Wait for replies, after a Wait to each full worker, which it answers once it has room."""
        alive = self._alive()
        for link in alive:
            if link.pending is None and not link.status.room:
                link.ask(Wait(self._feed, hold_s(self._config)), self._config.feed_timeout_s)
        for link in wait_links(alive, min(stall.left_s, PATIENCE_S)):
            taken_bytes = link.status.taken_bytes
            chunk = link.receive_reply()
            if chunk is not None:
                self._queued.append(chunk)
            if not link.alive or link.status.taken_bytes != taken_bytes or link.status.room:
                stall.moved()
        if stall.left_s <= 0:
            state = "; ".join(link.describe() for link in alive)
            raise FeedTimeout(
                f"no worker consumed anything of feed {self._feed!r} for "
                f"{self._config.feed_timeout_s:g} s: {state}. If a step takes that long, raise "
                "feed_timeout"
            )

    def _alive(self) -> list[WorkerLink]:
        stall: Stall | None = None
        while not (alive := [link for link in self._links if link.alive]):
            silent = [link for link in self._links if link.may_answer]
            if not silent:
                raise NoWorkerLeft(no_worker_left_text(self._links, self._partition))
            stall = stall or Stall(self._config.feed_timeout_s)
            hello = msgspec.structs.replace(self._hello, exactly_once=False)
            greet_again(silent, hello, self._config, stall)
        return alive

    def _report(self, rows: Iterator[Any]) -> FeedReport:
        for link in self._links:
            if not link.is_kept:
                link.check_closed()
        lost = tuple(link.lost for link in self._links if link.lost is not None)
        accepted = sum(link.accepted.num_rows for link in self._links)
        # Unwanted rows are still read to their end: the report has their number.
        read = self._packer.rows_read + self._packer.skip(rows)
        total = self._selection.num_rows
        if total is None:
            total = read
            self._check_end(total)
        return FeedReport(
            partition=self._partition,
            rows=total,
            partition_rows=read,
            dropped_rows=total - accepted,
            lost=lost,
            accepted={
                link.target.process: link.accepted.pack() for link in self._links if link.accepted
            },
            transports=tuple(link.transport for link in self._links if link.transport),
            ended=tuple(link.target.process for link in self._links if link.ended),
        )

    def _check_end(self, total: int) -> None:
        """Refuse a partition with fewer rows than an earlier attempt has fed."""
        if self._selection.last_done > total:
            raise RowsChanged(
                f"partition {self._partition} of feed {self._feed!r} has {total} rows, but had at "
                f"least {self._selection.last_done} when it was fed before. exactly_once needs the "
                "same rows in the same order each time Spark computes a partition: cache or sort "
                "the data, or train with exactly_once=False"
            )


def greet_again(silent: list[WorkerLink], hello: Hello, config: FeedConfig, stall: Stall) -> None:
    """Greet workers that have not answered; each try waits twice as long as the one before.

    A worker that takes no connections keeps those of all tries in its kernel's queue, which has
    room for 1,024 of all tasks.

    Args:
        silent: the workers.
        hello: the greeting.
        config: the limits.
        stall: the deadline.

    Raises:
        FeedTimeout: the deadline is over.
        FeedError: as `greet`.
    """
    left_s = stall.left_s
    if left_s <= 0:
        reasons = "; ".join(f"{link.lost.name}: {link.lost.reason}" for link in silent if link.lost)
        raise FeedTimeout(
            f"partition {hello.partition}: no answer for {config.feed_timeout_s:g} s, the first "
            f"try waits {config.connect_timeout_s:g} s: {reasons}. A worker is silent while "
            "main_fun runs one long call that holds Python's GIL, such as loading a large JSON "
            "file; if a call needs that long, raise feed_timeout"
        )
    tries = max(link.num_silences for link in silent)
    for link in silent:
        link.revive()
    greet(silent, hello, min(left_s, config.connect_timeout_s * float(1 << tries)))


def no_worker_left_text(links: Sequence[WorkerLink], partition: int) -> str:
    """Return why no worker is left, for an error.

    Args:
        links: links of all workers.
        partition: number of the partition that was to be sent.
    """
    what = f"partition {partition}"
    if not links:
        return f"{what} has no worker to go to: the cluster has none"
    reasons = "; ".join(f"{link.lost.name}: {link.lost.reason}" for link in links if link.lost)
    return f"{what} has no worker left to go to: {reasons}. Their own failures say why"
