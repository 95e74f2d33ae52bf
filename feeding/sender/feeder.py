"""Sends the rows of one partition to the workers, chunk by chunk.

Covers: which rows are sent (Selection), routing each chunk, waiting for room, lost workers, giving
up; leaving out what earlier attempts had fed.
Does not: pack (packer), shuffle (shuffle), choose workers (routing), hold connections (worker_link,
connection_pool), send rows that need results (inference).
Runs in: a Spark task.      Threads: one.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.errors import FeedTimeout, NoWorkerLeft, RowsChanged
from feeding.protocol.messages import Hello, Wait
from feeding.protocol.row_ranges import AcceptedRows, RowRanges, Span
from feeding.sender.connection_pool import Purpose
from feeding.sender.routing import choose
from feeding.sender.worker_link import (
    FRESH_S,
    PATIENCE_S,
    FeedTarget,
    LostWorker,
    WorkerLink,
    greet,
    hold_s,
    wait_lanes,
)
from rpc.auth.handshake import Credentials, Identity, Role


class Selection:
    """Rows by number, in the order in which the partition is fed.

    Args:
        only: these rows; None: all.
    """

    def __init__(self, only: Iterable[Span] | None = None) -> None:
        self._only = None if only is None else RowRanges(only)
        self._done = RowRanges()

    @property
    def num_rows(self) -> int | None:
        """How many rows are wanted; None: all of the partition."""
        return None if self._only is None else self._only.num_rows

    @property
    def last_done(self) -> int:
        """One more than the last row that was accepted before."""
        return self._done.stop

    def ends_before(self, row: int) -> bool:
        """Whether no row from this one on is wanted."""
        return self._only is not None and row >= self._only.stop

    def leave_out(self, accepted: AcceptedRows) -> AcceptedRows:
        """Leave out what a worker accepted before; return what of it is wanted here."""
        found = AcceptedRows()
        for row, count, position in accepted:
            for start, stop in self._wanted(row, row + count):
                found.add(start, stop - start, position + start - row)
                self._done.add(start, stop)
        return found

    def pick(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the parts of a chunk that are to be sent."""
        if self._only is None and not self._done:  # as nearly always
            yield chunk
            return
        first = chunk.meta.first_row
        for start, stop in self._wanted(first, first + chunk.num_rows):
            for low, high in self._done.outside(start, stop):
                yield chunk.rows(low - first, high - first)

    def _wanted(self, start: int, stop: int) -> list[Span]:
        return [(start, stop)] if self._only is None else self._only.inside(start, stop)


@dataclass(frozen=True, slots=True)
class FeedReport:
    """What became of one partition.

    rows = sum of worker_rows + dropped_rows + rows accepted by workers that were lost later.
    Rows that earlier attempts of the task had fed are in them where they are fed exactly once.
    """

    partition: int
    rows: int = 0
    """Of the partition, or those of them that were wanted."""
    partition_rows: int = 0
    """Of the partition as it was read now, wanted or not."""
    num_bytes: int = 0
    chunks: int = 0
    dropped_rows: int = 0
    """Rows that were not sent because no trainer wanted any more."""
    worker_rows: dict[int, int] = field(default_factory=dict)
    """Rows accepted by each worker that was still there at the end."""
    lost: tuple[LostWorker, ...] = ()
    """Workers that hung up or broke off before this partition's end, whether or not rows were
    still to be sent to them."""
    accepted: dict[int, bytes] = field(default_factory=dict)
    """By worker, the lost ones included: `feeding.protocol.row_ranges.AcceptedRows`, packed."""
    ways: tuple[str, ...] = ()
    """How each worker was reached that was reached at all: shared memory, socket, network."""


class RowPacker(Protocol):
    """Makes chunks of the rows of one partition; see feeding.encode.packer.Packer."""

    @property
    def rows_read(self) -> int:
        """Rows taken from the partition so far."""

    def chunks(self, rows: Iterator[Any]) -> Iterator[Chunk]:
        """Yield all rows as chunks."""

    def skip(self, rows: Iterator[Any]) -> int:
        """Read rows to their end and return how many they are."""


class Stall:
    """Notices that nothing moved for too long; runs only while the feeder waits."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until it is too long."""
        return self._deadline - time.monotonic()

    def moved(self) -> None:
        """Something moved: begin again."""
        self._deadline = time.monotonic() + self._timeout_s


class Feeder:
    """Feeds one partition with the chunks that `packer` makes of its rows; used once.

    Args:
        targets: the workers.
        credentials, config: for connecting to them and feeding.
        packer: for this partition.
        hello: what is fed; the schema is filled in.
        only: rows to feed, by their number in the order of feeding; None: all.
    """

    def __init__(
        self,
        targets: Sequence[FeedTarget],
        credentials: Credentials,
        config: FeedConfig,
        packer: RowPacker,
        hello: Hello,
        *,
        only: Sequence[Span] | None = None,
    ) -> None:
        self._credentials = credentials
        self._config = config
        self._hello = hello
        self._feed = hello.feed
        self._partition = hello.partition
        self._packer = packer
        self._selection = Selection(only)
        self._lanes = [WorkerLink(target) for target in targets]
        self._todo: deque[Chunk] = deque()

    def run(self, rows: Iterator[Any]) -> FeedReport:
        """Send all rows; returns once every chunk was accepted.

        Raises:
            RowError: a row does not fit a chunk.
            TrainerFailed: `main_fun` raised.
            FeedTimeout: no worker consumed anything for `feed_timeout_s`.
            NoWorkerLeft: every worker is gone.
            FeedClosed: the cluster is stopping.
            RowsChanged: an earlier attempt found more rows; see `_check_end`.
        """
        chunks = self._packer.chunks(rows)
        first = next(chunks, None)
        if first is None:
            missing = self._selection.num_rows or 0
            return FeedReport(self._partition, rows=missing, dropped_rows=missing)
        try:
            self._begin(first)
            wanted = True
            for chunk in itertools.chain([first], chunks):
                if self._selection.ends_before(chunk.meta.first_row):
                    break
                self._todo.extend(self._selection.pick(chunk))
                wanted = self._send_todo()
                if not wanted:
                    break
            while self._settle() and wanted:
                wanted = self._send_todo()
            report = self._report(rows)
            for lane in self._lanes:
                lane.keep(self._purpose(lane))
            return report
        finally:
            for lane in self._lanes:
                lane.close()

    def _begin(self, first: Chunk) -> None:
        """Take kept connections; greet all workers where each matters before the first chunk."""
        hello = msgspec.structs.replace(self._hello, schema=first.meta.schema)
        if hello.exactly_once:
            hello = msgspec.structs.replace(hello, attempt=secrets.randbits(62) + 1)
        self._hello = hello
        for lane in self._lanes:
            lane.take_kept(self._purpose(lane))
        if not hello.exactly_once and not hello.reopen:
            return
        for lane in self._lanes:
            if lane.pending is not None:  # a Wait, which would hold up this partition
                lane.close()
        self._greet_all(hello, self._lanes)
        for lane in self._lanes:
            found = lane.recall(hello, self._config.connect_timeout_s)
            lane.accepted = self._selection.leave_out(found)

    def _greet(self, lane: WorkerLink) -> None:
        """Ask a worker for its status; greet the others too if the worker says so."""
        # Without the claim: a later attempt may have claimed the partition meanwhile.
        hello = msgspec.structs.replace(self._hello, exactly_once=False, reopen=0)
        self._send_hello(hello, [lane])
        if lane.alive and lane.status.greet_all:
            others = [each for each in self._lanes if each is not lane]
            idle = [each for each in others if each.alive and each.pending is None]
            self._greet_all(hello, idle)

    def _greet_all(self, hello: Hello, lanes: list[WorkerLink]) -> None:
        """Greet these workers, which are all but busy ones."""
        self._send_hello(msgspec.structs.replace(hello, greets_all=True), lanes)

    def _send_hello(self, hello: Hello, lanes: list[WorkerLink]) -> None:
        identity = Identity(Role.FEEDER, os.getpid())
        greet(lanes, identity, self._credentials, hello, self._config.connect_timeout_s)

    def _purpose(self, lane: WorkerLink) -> Purpose:
        return Purpose(self._credentials, lane.target.endpoint, self._feed)

    def _send_todo(self) -> bool:
        """Send what is to be sent; False when no trainer wants rows any more."""
        stall = Stall(self._config.feed_timeout_s)
        # Fixed until a chunk is sent: else the first of many statuses is old when the last arrives.
        since_s = time.monotonic() - FRESH_S
        while self._todo:
            alive = self._alive()
            if all(lane.wants_none for lane in alive):
                return False
            chunk = self._todo[0]
            views = [lane.view(since_s) for lane in alive]
            index = choose(views, chunk.num_bytes, self._partition)
            if index is None:
                self._wait(stall)
            elif not alive[index].is_usable(since_s):
                self._greet(alive[index])
            elif alive[index].put(chunk, self._config.feed_timeout_s, self._hello.attempt):
                self._todo.popleft()
                since_s = time.monotonic() - FRESH_S
        return True

    def _settle(self) -> bool:
        """Wait until no chunk is under way; True if some must be sent again."""
        stall = Stall(self._config.feed_timeout_s)
        while any(lane.chunk for lane in self._lanes):
            self._wait(stall)
        return bool(self._todo)

    def _wait(self, stall: Stall) -> None:
        """Wait a while for replies, and ask full workers to say when they have room."""
        alive = self._alive()
        for lane in alive:
            if lane.pending is None and not lane.status.room:
                lane.ask(Wait(self._feed, hold_s(self._config)), self._config.feed_timeout_s)
        for lane in wait_lanes(alive, min(stall.left_s, PATIENCE_S)):
            taken_bytes = lane.status.taken_bytes
            chunk = lane.receive_reply()
            if chunk is not None:
                self._todo.append(chunk)
            if not lane.alive or lane.status.taken_bytes != taken_bytes or lane.status.room:
                stall.moved()
        if stall.left_s <= 0:
            state = "; ".join(lane.describe() for lane in alive)
            raise FeedTimeout(
                f"no worker consumed anything of feed {self._feed!r} for "
                f"{self._config.feed_timeout_s:g} s: {state}. If a step takes that long, raise "
                "feed_timeout"
            )

    def _alive(self) -> list[WorkerLink]:
        alive = [lane for lane in self._lanes if lane.alive]
        if not alive:
            raise NoWorkerLeft(no_worker_left_text(self._lanes, f"partition {self._partition}"))
        return alive

    def _report(self, rows: Iterator[Any]) -> FeedReport:
        for lane in self._lanes:
            if not lane.is_kept:
                lane.look()
        lost = tuple(lane.lost for lane in self._lanes if lane.lost is not None)
        accepted = sum(lane.accepted_rows for lane in self._lanes)
        # Rows nobody wants are still read to their end: their count is part of the report.
        read = self._packer.rows_read + self._packer.skip(rows)
        total = self._selection.num_rows
        if total is None:
            total = read
            self._check_end(total)
        return FeedReport(
            partition=self._partition,
            rows=total,
            partition_rows=read,
            num_bytes=sum(lane.sent_bytes for lane in self._lanes),
            chunks=sum(lane.sent_chunks for lane in self._lanes),
            dropped_rows=total - accepted,
            worker_rows={
                lane.target.worker: lane.accepted_rows for lane in self._lanes if lane.alive
            },
            lost=lost,
            accepted={
                lane.target.worker: lane.accepted.pack() for lane in self._lanes if lane.accepted
            },
            ways=tuple(lane.way for lane in self._lanes if lane.way),
        )

    def _check_end(self, total: int) -> None:
        """Refuse a partition that has fewer rows than an earlier attempt has fed."""
        if self._selection.last_done > total:
            raise RowsChanged(
                f"partition {self._partition} of feed {self._feed!r} has {total} rows, and had at "
                f"least {self._selection.last_done} when it was fed before: exactly_once needs the "
                "same rows in the same order each time Spark computes a partition. Cache or sort "
                "the data, or train with exactly_once=False"
            )


def no_worker_left_text(lanes: Sequence[WorkerLink], what: str) -> str:
    """Say why no worker is left."""
    if not lanes:
        return f"{what} has no worker to go to; the cluster has none"
    reasons = "; ".join(f"{lane.lost.name}: {lane.lost.reason}" for lane in lanes if lane.lost)
    return f"{what} has no worker left to go to: {reasons}. Their own failures say why"
