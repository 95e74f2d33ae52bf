"""Inference feeder: sends the rows of one partition to one worker and yields one result per row.

Covers: choosing the worker, sending ahead while results come back, time limits.
Does not: pack (encode.packer), make rows or Arrow arrays of results (columnar.rows, arrow.results),
hold the connection (worker_link) or keep it for the next partition (connection_pool).
Runs in: a Spark task.
Threads: one.

The whole partition goes to one worker, so results need no merging. Rows are sent ahead of their
results, up to `max_inflight_bytes`, so that batches cross chunk borders.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import FeedTimeout, NoWorkerLeft, ResultCountError
from feeding.protocol.messages import Hello, Wait
from feeding.sender.feeder import Stall, greet_again, no_worker_left_text
from feeding.sender.worker_link import FeedTarget, WorkerLink, greet, hold_s, wait_links
from rpc.auth.handshake import Credentials
from rpc.errors import RpcError

_CALL_AGAIN = (
    "A worker that was started again since inference() is not known to these results; call "
    "inference() again"
)
CHUNK_FACTOR = 4
"""A chunk of rows for inference is that many times as large as one of a training: all rows of a
partition go to one worker, so small ones spread nothing. Measured by `scripts/bench inference`, 784
numbers a row: feeder and worker need 8.8 µs a row of processor time in place of 10.7."""


class InferenceFeeder:
    """Runs inference on one partition; used once.

    Args:
        targets: the workers.
        credentials: credentials of the cluster.
        config: limits and deadlines.
        feed: name of the feed.
        partition: number of the partition.
        make_packer: returns the packer of the rows.
        held_bytes: returns the bytes of rows that wait here for their results. Beyond
            `max_inflight_bytes`, only rows are sent that a worker needs to fill its batch.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        targets: Sequence[FeedTarget],
        credentials: Credentials,
        config: FeedConfig,
        *,
        feed: str,
        partition: int,
        make_packer: Callable[..., Packer],
        held_bytes: Callable[[], int],
    ) -> None:
        self._config = config
        self._feed = feed
        self._partition = partition
        self._session = secrets.randbits(62) + 1  # 0 means "no session"
        self._packer = make_packer(
            _of_large_chunks(config),
            feed=feed,
            partition=partition,
            mode="inference",
            session=self._session,
        )
        self._links = [WorkerLink(target, credentials, feed) for target in targets]
        self._held_bytes = held_bytes
        self._received = 0

    def run(self, rows: Iterator[Any]) -> Generator[Chunk]:
        """Yield chunks of results, one result per row.

        Raises:
            ResultCountError: `main_fun` returned more or fewer results than rows.
            TrainerFailed, FeedTimeout, NoWorkerLeft, FeedClosed, RowError: as Feeder.run.
        """
        chunks = self._packer.chunks(rows)
        first = next(chunks, None)
        if first is None:
            return
        try:
            link = self._begin()
            sent = 0
            for chunk in itertools.chain([first], chunks):
                yield from self._put(link, chunk)
                sent += chunk.num_rows
            stall = Stall(self._config.feed_timeout_s)
            while self._received < sent:
                self._ask(link, stall, None)
                yield from self._results(link, stall)
            link.keep()
        finally:  # of the worker's connection, if the session has not come to its end
            for link in self._links:
                link.close()

    def _begin(self) -> WorkerLink:
        """Greet all workers, choose one, and keep the connections to the others."""
        for link in self._links:
            link.take_kept()
            if link.pending is not None:  # a Wait, whose reply would delay this partition
                link.close()
        hello = Hello(feed=self._feed, partition=self._partition)
        stall = Stall(self._config.feed_timeout_s)
        greet(self._links, hello, self._config.connect_timeout_s)
        while not any(link.alive for link in self._links):
            silent = [link for link in self._links if link.may_answer]
            if not silent:
                break
            greet_again(silent, hello, self._config, stall)
        chosen = self._choose()
        for link in self._links:
            if link is not chosen:
                link.keep()
        return chosen

    def _choose(self) -> WorkerLink:
        """Return the worker with the fewest unread bytes."""
        alive = [link for link in self._links if link.alive]
        if not alive:
            text = no_worker_left_text(self._links, self._partition)
            raise NoWorkerLeft(f"{text}. {_CALL_AGAIN}")
        wanted = [link for link in alive if not link.status.draining]
        if not wanted:
            raise NoWorkerLeft(
                f"partition {self._partition}: no worker takes rows for inference any more; "
                "main_fun has returned or called terminate() on all of them"
            )
        turn = self._partition % len(wanted)
        return min(wanted[turn:] + wanted[:turn], key=lambda link: link.status.unread_bytes)

    def _put(self, link: WorkerLink, chunk: Chunk) -> Iterator[Chunk]:
        """Send a chunk, and yield results until the next chunk may be sent."""
        stall = Stall(self._config.feed_timeout_s)
        self._ask(link, stall, chunk)
        yield from self._results(link, stall)
        while not chunk.meta.last_in_partition:
            is_full = self._held_bytes() > self._config.max_inflight_bytes
            # A worker that has read all rows may wait for more to fill its batch.
            if not link.status.session_bytes or (link.status.room and not is_full):
                return
            self._ask(link, stall, None, room=not is_full, drained=is_full)
            yield from self._results(link, stall)

    def _results(self, link: WorkerLink, stall: Stall) -> Iterator[Chunk]:
        while link.status.ready:
            try:
                chunk = link.fetch(self._session, self._config.feed_timeout_s)
            except RpcError as error:
                link.lose(f"{type(error).__name__}: {error}")
                raise self._lost() from error
            self._received += chunk.num_rows
            if self._received > self._packer.rows_read:
                raise ResultCountError(
                    f"{link.target.name} returned {self._received} results for "
                    f"{self._packer.rows_read} rows"
                )
            yield chunk
            # The consumer of the results may be slow; that is no stall of the trainer.
            stall.moved()

    def _ask(
        self,
        link: WorkerLink,
        stall: Stall,
        chunk: Chunk | None,
        *,
        room: bool = False,
        drained: bool = False,
    ) -> None:
        """Send a chunk or a Wait, and receive the reply.

        Args:
            link: to the worker.
            stall: the deadline for progress.
            chunk: to send; None: a Wait.
            room: whether the Wait ends once the worker has room.
            drained: whether it ends once the worker has read all rows of the session.
        """
        before = (link.status.taken_bytes, link.status.answered_rows)
        if chunk is not None:
            sent = link.put(chunk, self._config.feed_timeout_s)
        else:
            wait = Wait(self._feed, hold_s(self._config), self._session, room, drained)
            sent = link.ask(wait, self._config.feed_timeout_s)
        while sent and link.pending is not None and stall.left_s > 0:
            for done in wait_links([link], stall.left_s):
                done.receive_reply()
        if not link.alive:
            raise self._lost()
        if (link.status.taken_bytes, link.status.answered_rows) != before:
            stall.moved()
        if stall.left_s <= 0:
            raise FeedTimeout(
                f"partition {self._partition}: {self._received} of {self._packer.rows_read} rows "
                f"answered, then nothing for {self._config.feed_timeout_s:g} s: "
                f"{link.describe()}. If a batch takes that long, raise feed_timeout"
            )

    def _lost(self) -> NoWorkerLeft:
        text = no_worker_left_text([link for link in self._links if link.lost], self._partition)
        of = f"{self._received} of {self._packer.rows_read} rows"
        return NoWorkerLeft(f"{text}; {of} were answered. {_CALL_AGAIN}")


def _of_large_chunks(config: FeedConfig) -> FeedConfig:
    num_bytes = min(config.max_chunk_bytes, CHUNK_FACTOR * config.chunk_bytes)
    return replace(config, chunk_rows=CHUNK_FACTOR * config.chunk_rows, chunk_bytes=num_bytes)
