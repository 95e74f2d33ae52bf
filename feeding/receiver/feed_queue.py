"""One named feed inside a worker: chunks by epoch, markers, exact counts.

Covers: the order of chunks and epoch ends, what is late, what was trained and dropped.
Does not: lock, wait, talk (channel), count by epoch (epoch_rows).      Pure.

Epochs end strictly in order. A chunk of epoch 1 that arrives before the order to flush epoch 0
waits behind that marker; a chunk of epoch 0 that arrives after it is refused, unless the order was
taken back before its marker was read. Lost rows are fed again in rounds, and an order to end the
epoch says which rounds are over: a feeder or an order that comes late changes nothing. At every
moment
    fed_rows = trained_rows + in_flight_rows + dropped_rows.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field

from feeding.columnar.batch import EpochEnd, FeedEnd
from feeding.columnar.chunk import Chunk, ChunkMeta
from feeding.columnar.schema import Schema
from feeding.errors import LateChunk
from feeding.receiver.epoch_rows import INFERENCE, EpochRows, EpochStats, Receipt

Item = Chunk | EpochEnd | FeedEnd
_KEPT_EPOCHS = 8
"""Counts of so many past epochs are kept for the driver's questions."""


@dataclass(frozen=True, slots=True)
class FeedStats:
    """Counts of one feed; `starved_s` near the step time means: add partitions or executors."""

    feed: str
    fed_rows: int
    taken_rows: int
    """Read from the queue, perhaps ahead of the trainer."""
    trained_rows: int
    """Of batches from which the trainer has come back; see feeding.receiver.epoch_rows."""
    dropped_rows: int
    in_flight_rows: int
    """Unread, read ahead, or at the trainer."""
    unread_bytes: int
    starved_s: float
    epoch: int
    """The epoch that the consumer reads or will read next."""
    epochs_done: int
    draining: bool
    finished: bool
    epochs: tuple[EpochStats, ...] = ()
    """The last epochs, the newest last."""


@dataclass(frozen=True, slots=True)
class ValidationRows:
    """The rows that validate an epoch."""

    of_epoch: int
    feed: str
    epoch: int
    """Of that feed."""


@dataclass(slots=True)
class _Epoch:
    chunks: deque[Chunk] = field(default_factory=deque)
    flushed: bool = False
    round_number: int = 0
    """The newest round of feeding rows again that a feeder has named."""
    rounds_over: int = -1
    """The newest round that ended before the epoch's end was ordered; -1: it was not."""


class FeedQueue:
    """Chunks that were accepted and not read yet. The caller serialises all calls."""

    def __init__(self, feed: str, first_epoch: int = 0) -> None:
        self.feed = feed
        self.epoch = first_epoch
        self.epochs_done = 0
        self.fed_rows = 0
        self.taken_rows = 0
        self.trained_rows = 0
        self.dropped_rows = 0
        self.unread_bytes = 0
        self.taken_bytes = 0
        self.starved_s = 0.0
        self.draining = False
        self.finished = False
        self.schema: Schema | None = None
        self.validation: ValidationRows | None = None
        """Of the last epoch that was flushed with one."""
        self.validates = False
        """Whether its rows validate another feed's epochs."""
        self._skipped = -1
        self._is_begun = False
        self._owed: EpochEnd | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._session_bytes: dict[int, int] = {}
        self._rows: dict[int, EpochRows] = {}
        self._handed: deque[Receipt] = deque()
        self._at_epoch = first_epoch
        """Of the rows that the trainer was handed last."""

    def rows(self, epoch: int) -> EpochRows:
        """Return the counts of an epoch, made on first use."""
        found = self._rows.get(epoch)
        if found is None:
            found = self._rows[epoch] = EpochRows()
            for old in [n for n in self._rows if n < max(self._rows) - _KEPT_EPOCHS]:
                del self._rows[old]
        return found

    def reopen(self, epoch: int, round_number: int) -> bool:
        """Take back the order to end this epoch, for a round of feeding rows again.

        Returns:
            False if the epoch's end was read, or was ordered when this round was over.
        """
        if epoch < self.epoch or self.finished or self.draining:
            return False
        slot = self._epochs.setdefault(epoch, _Epoch())
        if round_number <= slot.rounds_over:
            return False
        slot.round_number = max(slot.round_number, round_number)
        slot.flushed = False
        return True

    def offer(self, chunk: Chunk, owner: int = 0) -> int:
        """Accept a chunk; while draining, count and drop it.

        Args:
            chunk: from a feeder.
            owner: which feeder, where partitions are claimed.

        Returns:
            Where its first row stands among all rows accepted of its epoch.

        Raises:
            LateChunk: its epoch was flushed before, or another feeder claimed its partition.
        """
        inference = chunk.meta.mode == "inference"
        number = self.epoch if inference else chunk.meta.epoch
        if not inference and number <= self._skipped:
            position = self._accept(chunk.meta, owner)
            self.fed_rows += chunk.num_rows
            self.close_epoch(number)
            return position
        slot = self._epochs.get(number)
        ended = number < self.epoch or (slot is not None and slot.flushed)
        if not self.draining and (self.finished or (ended and not inference)):
            which = "the feed" if self.finished else f"epoch {number}"
            raise LateChunk(
                f"feed {self.feed!r}: {which} had ended when rows {chunk.meta.first_row}.. of "
                f"partition {chunk.meta.partition} came; their task outlived its job"
            )
        position = 0
        if not inference:
            position = self._accept(chunk.meta, owner)
        self.schema = self.schema or chunk.meta.schema
        self.fed_rows += chunk.num_rows
        if self.draining:
            self.dropped_rows += chunk.num_rows
            return position
        self._count_unread(chunk, chunk.num_bytes)
        placed = dataclasses.replace(chunk, position=position)
        self._epochs.setdefault(number, _Epoch()).chunks.append(placed)
        return position

    def _accept(self, meta: ChunkMeta, owner: int) -> int:
        rows = self.rows(meta.epoch)
        if rows.is_claimed_from(meta.partition, owner):
            raise LateChunk(
                f"feed {self.feed!r}: another attempt feeds partition {meta.partition} of epoch "
                f"{meta.epoch} now, exactly once; this one's task was given up by Spark"
            )
        position = rows.accept(meta.partition, meta.first_row, meta.num_rows)
        if self.draining:
            rows.dropped_rows += meta.num_rows
        return position

    def flush(self, epoch: int, rounds: int = 0) -> None:
        """Mark the end of this epoch and of earlier ones that hold rows; repeats are harmless.

        Args:
            epoch: which one.
            rounds: of feeding its lost rows again, which are over. An order from before the newest
                round is overtaken: another one follows.
        """
        if epoch < self.epoch:
            return
        ending = self._epochs.setdefault(epoch, _Epoch())
        if rounds < ending.round_number:
            return
        ending.rounds_over = rounds
        for number, slot in self._epochs.items():
            slot.flushed = slot.flushed or number <= epoch
        # Epochs before the first one known here were fed to other workers before this one began.
        self.epoch = min(number for number, slot in self._epochs.items() if slot.flushed)
        if self.draining:
            self.epochs_done += sum(slot.flushed for slot in self._epochs.values())
            self._epochs = {n: slot for n, slot in self._epochs.items() if not slot.flushed}
            self.epoch = epoch + 1

    def skip(self, epoch: int) -> None:
        """Drop what is unread of this epoch and those before, and what still comes of them."""
        if epoch <= self._skipped:
            return
        self._skipped = epoch
        for number in [number for number in self._epochs if number <= epoch]:
            for chunk in self._epochs.pop(number).chunks:
                self._count_unread(chunk, -chunk.num_bytes)
        if self._is_begun and self.epoch <= epoch:
            # The consumer holds rows of it and has not seen its end yet.
            self._owed = EpochEnd(self.epoch)
        self.epoch = max(self.epoch, epoch + 1)
        self.close_epoch(epoch)

    def finish(self) -> None:
        """No more rows: what is queued can be read, then the feed ends."""
        self.finished = True
        for slot in self._epochs.values():
            slot.flushed = True

    def drain(self) -> None:
        """The consumer is gone: drop what is unread, and everything that still comes."""
        self.settle()
        self.draining = True
        self.dropped_rows = self.fed_rows - self.trained_rows
        for rows in self._rows.values():
            rows.close()
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
        if self._owed is not None:
            owed, self._owed, self._is_begun = self._owed, None, False
            return owed
        if self.finished and self.epoch not in self._epochs and self._epochs:
            self.epoch = min(self._epochs)
        slot = self._epochs.get(self.epoch)
        if slot is not None and slot.chunks:
            chunk = slot.chunks.popleft()
            self._count_unread(chunk, -chunk.num_bytes)
            self.taken_bytes += chunk.num_bytes
            self._is_begun = True
            return chunk
        if slot is not None and slot.flushed:
            self._is_begun = False
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

    def hand(self, receipt: Receipt) -> None:
        """The trainer has a batch; too late once the feed drains."""
        if self.draining:
            return
        self._handed.append(receipt)
        for piece in receipt:
            if piece.epoch == INFERENCE:
                continue
            if piece.epoch > self._at_epoch:
                self._at_epoch = piece.epoch
                self.close_epoch(piece.epoch - 1)  # whoever has its rows has left those before
            self.rows(piece.epoch).hand(piece)

    def settle(self, keep: int = 0) -> bool:
        """The trainer has come back: all it was handed is trained, but the last `keep` batches.

        Returns:
            Whether an epoch whose end was read may be over by it.
        """
        is_news = False
        while len(self._handed) > keep:
            for piece in self._handed.popleft():
                self.trained_rows += piece.num_rows
                if piece.epoch != INFERENCE:
                    self.rows(piece.epoch).train(piece)
                    is_news |= piece.epoch < self.epoch
        return is_news

    def close_epoch(self, epoch: int) -> None:
        """The trainer saw the end of this epoch: what was read and never handed out is lost."""
        for number, rows in self._rows.items():
            if number <= epoch < self.epoch:
                self.dropped_rows += rows.close()
                rows.forget_partitions()

    def is_over(self, epoch: int) -> bool:
        """Whether the end of this epoch was read and all of its rows are trained or dropped."""
        rows = self._rows.get(epoch)
        return epoch < self.epoch and (rows is None or not rows.in_flight_rows)

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
            trained_rows=self.trained_rows,
            in_flight_rows=self.fed_rows - self.trained_rows - self.dropped_rows,
            unread_bytes=self.unread_bytes,
            starved_s=self.starved_s,
            epoch=self.epoch,
            epochs_done=self.epochs_done,
            draining=self.draining,
            finished=self.finished,
            epochs=tuple(
                EpochStats(epoch, rows.accepted_rows, rows.trained.first_gap)
                for epoch, rows in sorted(self._rows.items())
            ),
        )


def _break_marker(feed: str, session: int) -> Chunk:
    meta = ChunkMeta(feed, 0, 0, 0, 0, Schema(()), (), (), True, mode="inference", session=session)
    return Chunk(meta, ())
