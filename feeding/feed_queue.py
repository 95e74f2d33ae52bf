"""One named feed inside a worker: chunks by epoch, markers, exact counts.

Covers: the order of chunks and epoch ends, what is late, what was dropped.
Does not: lock, wait, talk (channel).      Pure.

Epochs end strictly in order. A chunk of epoch 1 that arrives before the order to flush epoch 0
waits behind that marker; a chunk of epoch 0 that arrives after it is refused. At every moment
    fed_rows = taken_rows + dropped_rows + unread_rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from feeding.chunk import Chunk, ChunkMeta
from feeding.errors import LateChunk
from feeding.schema import Schema


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All rows of this epoch were handed out."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """No row will ever come again."""


Item = Chunk | EpochEnd | FeedEnd


@dataclass(frozen=True, slots=True)
class FeedStats:
    """Counts of one feed; `starved_s` near the step time means: add partitions or executors."""

    feed: str
    fed_rows: int
    taken_rows: int
    dropped_rows: int
    unread_rows: int
    unread_bytes: int
    starved_s: float
    epoch: int
    """The epoch that the consumer reads or will read next."""
    epochs_done: int
    draining: bool
    finished: bool


@dataclass(slots=True)
class _Epoch:
    chunks: deque[Chunk] = field(default_factory=deque)
    flushed: bool = False


class FeedQueue:
    """Chunks that were accepted and not read yet. The caller serialises all calls."""

    def __init__(self, feed: str, first_epoch: int = 0) -> None:
        self.feed = feed
        self.epoch = first_epoch
        self.epochs_done = 0
        self.fed_rows = 0
        self.taken_rows = 0
        self.dropped_rows = 0
        self.unread_bytes = 0
        self.taken_bytes = 0
        self.starved_s = 0.0
        self.draining = False
        self.finished = False
        self.schema: Schema | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._session_bytes: dict[int, int] = {}

    def offer(self, chunk: Chunk) -> None:
        """Accept a chunk; while draining, count and drop it.

        Raises:
            LateChunk: its epoch was flushed before.
        """
        inference = chunk.meta.mode == "inference"
        number = self.epoch if inference else chunk.meta.epoch
        slot = self._epochs.get(number)
        ended = number < self.epoch or (slot is not None and slot.flushed)
        if not self.draining and (self.finished or (ended and not inference)):
            which = "the feed" if self.finished else f"epoch {number}"
            raise LateChunk(
                f"feed {self.feed!r}: {which} had ended when rows {chunk.meta.first_row}.. of "
                f"partition {chunk.meta.partition} came; their task outlived its job"
            )
        self.schema = self.schema or chunk.meta.schema
        self.fed_rows += chunk.num_rows
        if self.draining:
            self.dropped_rows += chunk.num_rows
            return
        self._count_unread(chunk, chunk.num_bytes)
        self._epochs.setdefault(number, _Epoch()).chunks.append(chunk)

    def flush(self, epoch: int) -> None:
        """Mark the end of this epoch and of earlier ones that hold rows; repeats are harmless."""
        if epoch < self.epoch:
            return
        self._epochs.setdefault(epoch, _Epoch())
        for number, slot in self._epochs.items():
            slot.flushed = slot.flushed or number <= epoch
        # Epochs before the first one known here were fed to other workers before this one began.
        self.epoch = min(number for number, slot in self._epochs.items() if slot.flushed)
        if self.draining:
            self.epochs_done += sum(slot.flushed for slot in self._epochs.values())
            self._epochs = {n: slot for n, slot in self._epochs.items() if not slot.flushed}
            self.epoch = epoch + 1

    def finish(self) -> None:
        """No more rows: what is queued can be read, then the feed ends."""
        self.finished = True
        for slot in self._epochs.values():
            slot.flushed = True

    def drain(self) -> None:
        """The consumer is gone: drop what is unread, and everything that still comes."""
        self.draining = True
        self.dropped_rows = self.fed_rows - self.taken_rows
        self.unread_bytes = 0
        self._session_bytes.clear()
        done = [number for number, slot in self._epochs.items() if slot.flushed]
        self._epochs.clear()
        self.epochs_done += len(done)
        self.epoch = max([self.epoch, *(number + 1 for number in done)])

    def pop(self, session: int = 0) -> Item | None:
        """Return what the consumer reads next; None while there is nothing yet.

        Args:
            session: only rows of this inference session, to fill up a batch of it.
        """
        if session and not self.draining:
            return self._pop_session(session)
        if self.finished and self.epoch not in self._epochs and self._epochs:
            self.epoch = min(self._epochs)
        slot = self._epochs.get(self.epoch)
        if slot is not None and slot.chunks:
            chunk = slot.chunks.popleft()
            self._count_unread(chunk, -chunk.num_bytes)
            self.taken_bytes += chunk.num_bytes
            return chunk
        if slot is not None and slot.flushed:
            del self._epochs[self.epoch]
            self.epoch += 1
            self.epochs_done += 1
            return EpochEnd(self.epoch - 1)
        if self.draining or (self.finished and not self._epochs):
            return FeedEnd()
        return None

    def session_bytes(self, session: int) -> int:
        """Return the unread bytes of one inference session."""
        return self._session_bytes.get(session, 0)

    def count_taken(self, num_rows: int) -> None:
        """The consumer was given rows of a chunk it popped; too late once it drains."""
        if not self.draining:
            self.taken_rows += num_rows

    def abandon(self, session: int) -> None:
        """Drop the unread chunks of an inference session whose feeder left; end its last batch."""
        slot = self._epochs.get(self.epoch)
        if slot is None:
            if self.finished or self.draining:
                return  # nothing is left, and an epoch made now would never end
            slot = self._epochs[self.epoch] = _Epoch()
        kept: deque[Chunk] = deque()
        for chunk in slot.chunks:
            if chunk.meta.session == session:
                self._count_unread(chunk, -chunk.num_bytes)
                self.dropped_rows += chunk.num_rows
            else:
                kept.append(chunk)
        # The consumer may hold the session's first rows and wait for the rest of its batch.
        kept.appendleft(_break_marker(self.feed, session))
        slot.chunks = kept

    @property
    def ends_without_rows(self) -> bool:
        """Whether the consumer will meet an end before any row."""
        slot = self._epochs.get(self.epoch)
        empty = slot is not None and slot.flushed and not slot.chunks
        return self.epochs_done > 0 or empty or self.finished or self.draining

    def _pop_session(self, session: int) -> Chunk | None:
        slot = self._epochs.get(self.epoch)
        chunks = slot.chunks if slot is not None else deque[Chunk]()
        for at, chunk in enumerate(chunks):
            if chunk.meta.session == session:
                del chunks[at]
                self._count_unread(chunk, -chunk.num_bytes)
                self.taken_bytes += chunk.num_bytes
                return chunk
        return _break_marker(self.feed, session) if self.finished else None

    def _count_unread(self, chunk: Chunk, num_bytes: int) -> None:
        self.unread_bytes += num_bytes
        session = chunk.meta.session
        if session:
            left = self._session_bytes.pop(session, 0) + num_bytes
            if left:
                self._session_bytes[session] = left

    def stats(self) -> FeedStats:
        """Return the counts as they are now."""
        return FeedStats(
            feed=self.feed,
            fed_rows=self.fed_rows,
            taken_rows=self.taken_rows,
            dropped_rows=self.dropped_rows,
            unread_rows=self.fed_rows - self.taken_rows - self.dropped_rows,
            unread_bytes=self.unread_bytes,
            starved_s=self.starved_s,
            epoch=self.epoch,
            epochs_done=self.epochs_done,
            draining=self.draining,
            finished=self.finished,
        )


def _break_marker(feed: str, session: int) -> Chunk:
    meta = ChunkMeta(feed, 0, 0, 0, 0, Schema(()), (), (), True, mode="inference", session=session)
    return Chunk(meta, ())
