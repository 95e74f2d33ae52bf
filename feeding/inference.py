"""Sends the rows of one partition to one worker and yields its results, one per row, in order.

Covers: choosing the worker, sending ahead while results come back, giving up.
Does not: pack (packer), hold the connection (lane).
Runs in: a Spark task.      Threads: one.

The whole partition goes to one worker, so results need no merging; rows are sent ahead of their
results up to `max_inflight_bytes`, so that batches cross chunk borders.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from feeding.chunk import Chunk
from feeding.config import FeedConfig
from feeding.errors import FeedTimeout, NoWorkerLeft, ResultCountError
from feeding.feeder import Stall, gone_text
from feeding.lane import FeedTarget, Lane, greet, hold_s, wait_lanes
from feeding.messages import Hello, Wait
from feeding.packer import Packer
from feeding.rows import rows_of
from rpc.errors import RpcError
from rpc.handshake import Credentials, Identity, Role


class InferenceFeeder:
    """Answers one partition; used once."""

    def __init__(
        self,
        targets: Sequence[FeedTarget],
        credentials: Credentials,
        config: FeedConfig,
        *,
        feed: str,
        partition: int,
    ) -> None:
        self._credentials = credentials
        self._config = config
        self._feed = feed
        self._partition = partition
        # 0 means "no session"; the worker tells from the connection's incarnation whose it was.
        self._session = secrets.randbits(62) + 1
        self._packer = Packer(
            config, feed=feed, partition=partition, mode="inference", session=self._session
        )
        self._lanes = [Lane(target) for target in targets]
        self._received = 0

    def run(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Yield one result per row.

        Raises:
            ResultCountError: `main_fun` returned more or fewer results than rows.
            TrainerFailed, FeedTimeout, NoWorkerLeft, FeedClosed, RowError: as Feeder.run.
        """
        chunks = self._packer.chunks(rows)
        first = next(chunks, None)
        if first is None:
            return
        try:
            identity = Identity(Role.FEEDER, self._partition, self._session)
            hello = Hello(self._feed, first.meta.schema)
            greet(self._lanes, identity, self._credentials, hello, self._config.connect_timeout_s)
            lane = self._choose()
            sent = 0
            for chunk in itertools.chain([first], chunks):
                yield from self._put(lane, chunk)
                sent += chunk.num_rows
            stall = Stall(self._config.feed_timeout_s)
            while self._received < sent:
                self._ask(lane, stall, None)
                yield from self._results(lane, stall)
        finally:
            for lane in self._lanes:
                lane.close()

    def _choose(self) -> Lane:
        """Return the worker with the fewest unread bytes and leave the others."""
        alive = [lane for lane in self._lanes if lane.alive]
        if not alive:
            raise NoWorkerLeft(gone_text(self._lanes, f"partition {self._partition}"))
        wanted = [lane for lane in alive if not lane.status.draining]
        if not wanted:
            raise NoWorkerLeft(
                f"partition {self._partition}: no worker takes rows for inference any more, "
                "main_fun has returned or called terminate() on all of them"
            )
        turn = self._partition % len(wanted)
        best = min(wanted[turn:] + wanted[:turn], key=lambda lane: lane.status.unread_bytes)
        for lane in self._lanes:
            if lane is not best:
                lane.close()
        return best

    def _put(self, lane: Lane, chunk: Chunk) -> Iterator[Any]:
        """Send a chunk, and yield results until the worker has room for the next."""
        stall = Stall(self._config.feed_timeout_s)
        self._ask(lane, stall, chunk)
        yield from self._results(lane, stall)
        while not lane.status.room and not chunk.meta.last_in_partition:
            self._ask(lane, stall, None, room=True)
            yield from self._results(lane, stall)

    def _results(self, lane: Lane, stall: Stall) -> Iterator[Any]:
        while lane.status.ready:
            try:
                chunk = lane.fetch(self._feed, self._session, self._config.feed_timeout_s)
            except RpcError as error:
                lane.lose(f"{type(error).__name__}: {error}")
                raise self._lost() from error
            self._received += chunk.num_rows
            if self._received > self._packer.rows_read:
                raise ResultCountError(
                    f"{lane.target.name} returned {self._received} results for "
                    f"{self._packer.rows_read} rows"
                )
            yield from rows_of(chunk)
            # The task that takes the results may be slow: that is no stall of the trainer.
            stall.moved()

    def _ask(self, lane: Lane, stall: Stall, chunk: Chunk | None, *, room: bool = False) -> None:
        """Send a chunk or ask for news, and hear the answer."""
        before = (lane.status.taken_bytes, lane.status.answered_rows)
        if chunk is not None:
            sent = lane.put(chunk, self._config.feed_timeout_s)
        else:
            wait = Wait(self._feed, hold_s(self._config), self._session, room)
            sent = lane.ask(wait, self._config.feed_timeout_s)
        while sent and lane.pending is not None and stall.left_s > 0:
            for done in wait_lanes([lane], stall.left_s):
                done.heard()
        if not lane.alive:
            raise self._lost()
        if (lane.status.taken_bytes, lane.status.answered_rows) != before:
            stall.moved()
        if stall.left_s <= 0:
            raise FeedTimeout(
                f"partition {self._partition}: {self._received} of {self._packer.rows_read} rows "
                f"answered, then nothing for {self._config.feed_timeout_s:g} s: "
                f"{lane.describe()}. If a batch takes that long, raise feed_timeout"
            )

    def _lost(self) -> NoWorkerLeft:
        return NoWorkerLeft(
            gone_text([lane for lane in self._lanes if lane.lost], f"partition {self._partition}")
            + f"; {self._received} of {self._packer.rows_read} rows were answered"
        )
