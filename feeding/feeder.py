"""Sends the rows of one partition to the workers, chunk by chunk.

Covers: routing each chunk, waiting for room, lost workers, giving up.
Does not: pack (packer), choose (routing), hold connections (lane), send rows that need results
(inference).
Runs in: a Spark task.      Threads: one.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from feeding.chunk import Chunk
from feeding.config import FeedConfig
from feeding.errors import FeedTimeout, NoWorkerLeft
from feeding.lane import PATIENCE_S, FeedTarget, Lane, LostWorker, greet, hold_s, wait_lanes
from feeding.messages import Hello, Wait
from feeding.packer import Packer
from feeding.routing import choose
from rpc.handshake import Credentials, Identity, Role


@dataclass(frozen=True, slots=True)
class FeedReport:
    """What became of one partition.

    rows = sum of worker_rows + dropped_rows + rows accepted by workers that were lost later.
    """

    partition: int
    rows: int = 0
    num_bytes: int = 0
    chunks: int = 0
    dropped_rows: int = 0
    """Rows that were not sent because no trainer wanted any more."""
    worker_rows: dict[int, int] = field(default_factory=dict)
    """Rows accepted by each worker that was still there at the end."""
    lost: tuple[LostWorker, ...] = ()
    """Workers that hung up or broke off before this partition's end, whether or not rows were
    still to be sent to them."""


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
    """Feeds one partition with the chunks that `packer` makes of its rows; used once."""

    def __init__(
        self,
        targets: Sequence[FeedTarget],
        credentials: Credentials,
        config: FeedConfig,
        packer: Packer,
        *,
        feed: str,
        partition: int,
    ) -> None:
        self._credentials = credentials
        self._config = config
        self._feed = feed
        self._partition = partition
        self._packer = packer
        self._lanes = [Lane(target) for target in targets]
        self._todo: deque[Chunk] = deque()

    def run(self, rows: Iterator[Any]) -> FeedReport:
        """Send all rows; returns once every chunk was accepted.

        Raises:
            RowError: a row does not fit a chunk.
            TrainerFailed: `main_fun` raised.
            FeedTimeout: no worker consumed anything for `feed_timeout_s`.
            NoWorkerLeft: every worker is gone.
            FeedClosed: the cluster is stopping.
        """
        chunks = self._packer.chunks(rows)
        first = next(chunks, None)
        if first is None:
            return FeedReport(self._partition)
        try:
            identity = Identity(Role.FEEDER, self._partition)
            hello = Hello(self._feed, first.meta.schema)
            greet(self._lanes, identity, self._credentials, hello, self._config.connect_timeout_s)
            wanted = True
            for chunk in itertools.chain([first], chunks):
                self._todo.append(chunk)
                wanted = self._send_todo()
                if not wanted:
                    break
            while self._settle() and wanted:
                wanted = self._send_todo()
            return self._report(rows)
        finally:
            for lane in self._lanes:
                lane.close()

    def _send_todo(self) -> bool:
        """Send what is to be sent; False when no trainer wants rows any more."""
        stall = Stall(self._config.feed_timeout_s)
        while self._todo:
            alive = self._alive()
            if all(lane.status.draining for lane in alive):
                return False
            chunk = self._todo[0]
            index = choose([lane.view() for lane in alive], chunk.num_bytes, self._partition)
            if index is None:
                self._wait(stall)
            elif alive[index].put(chunk, self._config.feed_timeout_s):
                self._todo.popleft()
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
            chunk = lane.heard()
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

    def _alive(self) -> list[Lane]:
        alive = [lane for lane in self._lanes if lane.alive]
        if not alive:
            raise NoWorkerLeft(gone_text(self._lanes, f"partition {self._partition}"))
        return alive

    def _report(self, rows: Iterator[Any]) -> FeedReport:
        for lane in self._lanes:
            lane.look()
        lost = tuple(lane.lost for lane in self._lanes if lane.lost is not None)
        accepted = sum(lane.accepted_rows for lane in self._lanes)
        # Rows nobody wants are still read to their end: their count is part of the report.
        total = self._packer.rows_read + self._packer.skip(rows)
        return FeedReport(
            partition=self._partition,
            rows=total,
            num_bytes=sum(lane.sent_bytes for lane in self._lanes),
            chunks=sum(lane.sent_chunks for lane in self._lanes),
            dropped_rows=total - accepted,
            worker_rows={
                lane.target.worker: lane.accepted_rows for lane in self._lanes if lane.alive
            },
            lost=lost,
        )


def gone_text(lanes: Sequence[Lane], what: str) -> str:
    """Say why no worker is left."""
    if not lanes:
        return f"{what} has no worker to go to; the cluster has none"
    reasons = "; ".join(f"{lane.lost.name}: {lane.lost.reason}" for lane in lanes if lane.lost)
    return f"{what} has no worker left to go to: {reasons}. Their own failures say why"
