"""Feed queue: the chunks of one feed in a worker by epoch, the ends of epochs, exact row counts.

Covers: the order of chunks and epoch ends, which chunks are late, which rows are trained or
dropped.
Does not: lock or wait (channel), talk to feeders (handler), count by epoch (epoch_rows).
Threads: pure; the caller serialises all calls.

Epochs end strictly in order. A chunk of epoch 1 that arrives before the order to end epoch 0 waits
behind that epoch's end. A chunk of epoch 0 that arrives after the order is refused, unless a new
round of feeding lost rows reopened the epoch before its end was read. An order to end an epoch
names the rounds that are over, so a late feeder or a late order changes nothing. At every moment
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
"""Past epochs whose counts are kept for the driver."""


@dataclass(frozen=True, slots=True)
class FeedStats:
    """Counts of one feed. `starved_s` near the step time: add partitions or executors."""

    feed: str
    fed_rows: int
    taken_rows: int
    """Read from the queue, possibly ahead of the trainer."""
    trained_rows: int
    """Rows of finished batches; see feeding.receiver.epoch_rows."""
    dropped_rows: int
    in_flight_rows: int
    """Unread, read ahead, or at the trainer."""
    unread_bytes: int
    starved_s: float
    is_drained: bool
    is_terminated: bool
    """It is drained because the consumer has terminated this feed; otherwise all feeds ended."""
    epochs: tuple[EpochStats, ...]
    """The last epochs, the newest last."""


@dataclass(frozen=True, slots=True)
class ValidationRows:
    """Which rows validate which epoch."""

    of_epoch: int
    feed: str
    epoch: int
    """Epoch of that feed."""


@dataclass(slots=True)
class _Epoch:
    chunks: deque[Chunk] = field(default_factory=deque)
    flushed: bool = False
    round_number: int = 0
    """The newest round of feeding lost rows again that a feeder has announced."""
    rounds_over: int = -1
    """The newest round that was over when the epoch's end was ordered; -1: no such order yet."""


class FeedQueue:
    """Accepted chunks that the consumer has not read. The caller serialises all calls.

    Args:
        feed: its name, for messages.
    """

    def __init__(self, feed: str) -> None:
        self.feed = feed
        self.epoch = 0
        self.fed_rows = 0
        self.taken_rows = 0
        self.trained_rows = 0
        self.train_rows = 0
        """How many of `trained_rows` are for training; inference rows are answered instead."""
        self.dropped_rows = 0
        self.unread_bytes = 0
        self.taken_bytes = 0
        self.starved_s = 0.0
        self.draining = False
        self.is_terminated = False
        """Whether the consumer has stopped reading this feed, not all of them."""
        self.finished = False
        self.validation: ValidationRows | None = None
        """Validation of the last epoch that was ended with one."""
        self.validates = False
        """Whether its rows validate another feed's epochs."""
        self.fed_again = -1
        """The newest epoch whose lost rows are fed again; -1: none."""
        self._skipped = -1
        self._is_epoch_begun = False
        self._pending_end: EpochEnd | None = None
        self._epochs: dict[int, _Epoch] = {}
        self._session_bytes: dict[int, int] = {}
        self._rows: dict[int, EpochRows] = {}
        self._at_trainer: deque[Receipt] = deque()
        self._reader = 0
        self.trainer_epoch = 0
        """Epoch of the rows that the trainer got last."""

    def rows(self, epoch: int) -> EpochRows:
        """Return the counts of an epoch, made on first use."""
        found = self._rows.get(epoch)
        if found is None:
            found = self._rows[epoch] = EpochRows()
            for old in [n for n in self._rows if n < max(self._rows) - _KEPT_EPOCHS]:
                del self._rows[old]
        return found

    def begin_at(self, epoch: int) -> None:
        """Skip the epochs before this one, of which no row comes."""
        self.epoch = max(self.epoch, epoch)
        self.trainer_epoch = max(self.trainer_epoch, epoch)

    def reopen(self, epoch: int, round_number: int) -> bool:
        """Take back the order to end an epoch, for a round of feeding lost rows again.

        Args:
            epoch: epoch of this feed.
            round_number: number of the round, from 1.

        Returns:
            False if the epoch's end was read, or its order came after this round.
        """
        # The consumer has read the end, or no row can be read any more.
        if epoch < self.epoch or self.finished or self.draining:
            return False
        slot = self._epochs.setdefault(epoch, _Epoch())
        # A feeder of a round that is over: its Spark task outlived its job.
        if round_number <= slot.rounds_over:
            return False
        slot.round_number = max(slot.round_number, round_number)
        slot.flushed = False
        return True

    def offer(self, chunk: Chunk, owner: int = 0) -> int:
        """Accept a chunk; while draining, count and drop it.

        Args:
            chunk: from a feeder.
            owner: number of the attempt that feeds the chunk, for claimed partitions.

        Returns:
            Position of the chunk's first row among all accepted rows of its epoch.

        Raises:
            LateChunk: its epoch has ended, or another feeder has claimed its partition.
        """
        # Inference rows have no epoch of their own: they join the one that the consumer reads.
        inference = chunk.meta.mode == "inference"
        number = self.epoch if inference else chunk.meta.epoch
        # Skipped validation rows are accepted and dropped at once: a refusal would fail their task.
        if not inference and number <= self._skipped:
            position = self._accept(chunk.meta, owner)
            self.fed_rows += chunk.num_rows
            if self.draining:
                self.dropped_rows += chunk.num_rows  # in the epoch's counts they are dropped
            self.close_epoch(number)
            return position
        slot = self._epochs.get(number)
        ended = number < self.epoch or (slot is not None and slot.flushed)
        # While draining, late chunks are dropped like all others: their task should not fail.
        if not self.draining and (self.finished or (ended and not inference)):
            which = "the feed" if self.finished else f"epoch {number + 1}"
            raise LateChunk(
                f"feed {self.feed!r}: {which} had ended when rows {chunk.meta.first_row}.. of "
                f"partition {chunk.meta.partition} came; their task outlived its job"
            )
        position = 0
        # Only training rows have positions: they tell which rows a lost worker had trained.
        if not inference:
            position = self._accept(chunk.meta, owner)
        self.fed_rows += chunk.num_rows
        if self.draining:
            self.dropped_rows += chunk.num_rows
            return position
        # Counted before it is queued: the feeder's back-pressure depends on the unread bytes.
        self._count_unread(chunk, chunk.num_bytes)
        placed = dataclasses.replace(chunk, position=position)
        self._epochs.setdefault(number, _Epoch()).chunks.append(placed)
        return position

    def _accept(self, meta: ChunkMeta, owner: int) -> int:
        rows = self.rows(meta.epoch)
        if rows.is_claimed_from(meta.partition, owner):
            raise LateChunk(
                f"feed {self.feed!r}: another attempt feeds partition {meta.partition} of epoch "
                f"{meta.epoch + 1} now, exactly once; this one's task was given up by Spark"
            )
        position = rows.accept(meta.partition, meta.first_row, meta.num_rows)
        if self.draining:
            rows.dropped_rows += meta.num_rows
        return position

    def flush(self, epoch: int, rounds: int = 0) -> None:
        """Mark the end of an epoch and of all earlier ones; idempotent.

        Args:
            epoch: epoch of this feed.
            rounds: number of finished rounds of feeding its lost rows again. An order from before
                the newest round is stale; another one follows.
        """
        # A repeated order: its end was read already.
        if epoch < self.epoch:
            return
        ending = self._epochs.setdefault(epoch, _Epoch())
        if rounds < ending.round_number:
            return
        ending.rounds_over = rounds
        for number, slot in self._epochs.items():
            slot.flushed = slot.flushed or number <= epoch
        # Epochs before the first known one were fed to other workers before this worker started.
        self.epoch = min(number for number, slot in self._epochs.items() if slot.flushed)
        # Nobody reads the ends while draining, so they count as read.
        if self.draining:
            self._epochs = {n: slot for n, slot in self._epochs.items() if not slot.flushed}
            self.epoch = epoch + 1

    def skip(self, epoch: int) -> None:
        """Drop unread and later rows of this epoch and of earlier ones, except those of inference.

        Those belong to no epoch, and their feeders wait for the answers of whoever reads next.
        """
        if epoch <= self._skipped:
            return
        self._skipped = epoch
        asked: deque[Chunk] = deque()
        for number in sorted(number for number in self._epochs if number <= epoch):
            for chunk in self._epochs.pop(number).chunks:
                if chunk.meta.mode == "inference":
                    asked.append(chunk)
                else:
                    self._count_unread(chunk, -chunk.num_bytes)
        if self._is_epoch_begun and self.epoch <= epoch:
            # The consumer has rows of the epoch, so it still has to read its end.
            self._pending_end = EpochEnd(self.epoch)
        self.epoch = max(self.epoch, epoch + 1)
        if asked:
            slot = self._epochs.setdefault(self.epoch, _Epoch(flushed=self.finished))
            slot.chunks.extendleft(reversed(asked))
        self.close_epoch(epoch)

    def finish(self) -> None:
        """End the feed after the queued rows."""
        self.finished = True
        for slot in self._epochs.values():
            slot.flushed = True

    def drain(self) -> None:
        """Drop unread and later rows, because the consumer has stopped."""
        self.settle()
        self.draining = True
        self.dropped_rows = self.fed_rows - self.trained_rows
        for rows in self._rows.values():
            rows.close()
        self.unread_bytes = 0
        self._session_bytes.clear()
        done = [number for number, slot in self._epochs.items() if slot.flushed]
        self._epochs.clear()
        self.epoch = max([self.epoch, *(number + 1 for number in done)])

    def pop(self, session: int = 0) -> Item | None:
        """Return the consumer's next chunk or end; None while there is none.

        Args:
            session: only rows of this inference session, to fill up a batch of it; 0: any rows.
        """
        if session and not self.draining:
            return self._pop_session(session)
        if self._pending_end is not None:
            end, self._pending_end, self._is_epoch_begun = self._pending_end, None, False
            return end
        # A finished feed gets no orders for the epochs between, so go to the next one with rows.
        if self.finished and self.epoch not in self._epochs and self._epochs:
            self.epoch = min(self._epochs)
        slot = self._epochs.get(self.epoch)
        if slot is not None and slot.chunks:
            chunk = slot.chunks.popleft()
            self._count_unread(chunk, -chunk.num_bytes)
            self.taken_bytes += chunk.num_bytes
            self._is_epoch_begun = True
            return chunk
        if slot is not None and slot.flushed:
            self._is_epoch_begun = False
            del self._epochs[self.epoch]
            self.epoch += 1
            return EpochEnd(self.epoch - 1)
        if self.draining or (self.finished and not self._epochs):
            return FeedEnd()
        return None

    def session_bytes(self, session: int) -> int:
        """Return the unread bytes of one inference session."""
        return self._session_bytes.get(session, 0)

    def begin_reading(self, reader: int) -> int:
        """Note who reads from now on.

        Args:
            reader: number of the reader, above 0.

        Returns:
            Rows that another reader has read ahead and not given to the trainer, without the rest
            of its chunk.
        """
        before, self._reader = self._reader, reader
        if before in (0, reader):
            return 0
        return sum(rows.read_ahead_rows for rows in self._rows.values())

    def count_taken(self, num_rows: int) -> None:
        """Count rows of a popped chunk as read; ignored while draining."""
        if not self.draining:
            self.taken_rows += num_rows

    def drop_taken(self, num_rows: int) -> None:
        """Count inference rows that were read as dropped; while draining they are by now."""
        if not self.draining:
            self.dropped_rows += num_rows

    def hand(self, receipt: Receipt, *, with_last: bool = False) -> None:
        """Note that the trainer has a batch; ignored while draining.

        Args:
            receipt: which rows the batch holds.
            with_last: it trains none of them: they count together with the batch before.
        """
        if self.draining:
            return
        if with_last and self._at_trainer:
            self._at_trainer[-1] += receipt
        else:
            self._at_trainer.append(receipt)
        for piece in receipt:
            if piece.epoch == INFERENCE:
                continue
            if piece.epoch > self.trainer_epoch:
                self.trainer_epoch = piece.epoch
                # Batches come in order, so earlier epochs are over.
                self.close_epoch(piece.epoch - 1)
            self.dropped_rows += self.rows(piece.epoch).hand(piece)

    def settle(self, keep: int = 0) -> bool:
        """Count all batches at the trainer as trained, except the last `keep`.

        Returns:
            Whether this may complete an epoch whose end was read.
        """
        may_complete = False
        while len(self._at_trainer) > keep:
            for piece in self._at_trainer.popleft():
                self.trained_rows += piece.num_rows
                if piece.epoch != INFERENCE:
                    self.train_rows += piece.num_rows
                    self.dropped_rows -= self.rows(piece.epoch).train(piece)
                    may_complete |= piece.epoch < self.epoch
        return may_complete

    def close_epoch(self, epoch: int) -> None:
        """Drop rows of ended epochs that were read but never given to the trainer."""
        for number, rows in self._rows.items():
            if number <= epoch < self.epoch:
                self.dropped_rows += rows.close()
                rows.drop_claims()

    def is_left_out(self, epoch: int) -> bool:
        """Return whether the consumer has stopped before it has trained a row of an epoch."""
        rows = self._rows.get(epoch)
        return self.draining and (rows is None or not rows.has_trained)

    def is_over(self, epoch: int) -> bool:
        """Return whether an epoch's end was read and all its rows are trained or dropped."""
        rows = self._rows.get(epoch)
        return epoch < self.epoch and (rows is None or not rows.in_flight_rows)

    def abandon(self, session: int) -> None:
        """Drop a disconnected feeder's unread inference chunks; end its last batch."""
        slot = self._epochs.get(self.epoch)
        if slot is None:
            if self.finished or self.draining:
                return  # no chunks are left, and an epoch made now would never end
            slot = self._epochs[self.epoch] = _Epoch()
        kept: deque[Chunk] = deque()
        for chunk in slot.chunks:
            if chunk.meta.session == session:
                self._count_unread(chunk, -chunk.num_bytes)
                self.dropped_rows += chunk.num_rows
            else:
                kept.append(chunk)
        # The consumer may have the session's first rows and wait for the rest of the batch.
        kept.appendleft(_break_marker(self.feed, session))
        slot.chunks = kept

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

    def break_for(self, session: int) -> Chunk | None:
        """End the batch of an inference session without unread rows if others have some."""
        slot = self._epochs.get(self.epoch)
        return _break_marker(self.feed, session) if slot is not None and slot.chunks else None

    def _count_unread(self, chunk: Chunk, num_bytes: int) -> None:
        self.unread_bytes += num_bytes
        session = chunk.meta.session
        if session:
            left = self._session_bytes.pop(session, 0) + num_bytes
            if left:
                self._session_bytes[session] = left

    def stats(self) -> FeedStats:
        """Return a snapshot of the counts."""
        return FeedStats(
            feed=self.feed,
            fed_rows=self.fed_rows,
            taken_rows=self.taken_rows,
            dropped_rows=self.dropped_rows,
            trained_rows=self.trained_rows,
            in_flight_rows=self.fed_rows - self.trained_rows - self.dropped_rows,
            unread_bytes=self.unread_bytes,
            starved_s=self.starved_s,
            is_drained=self.draining,
            is_terminated=self.is_terminated,
            epochs=tuple(
                EpochStats(epoch, rows.accepted_rows, *rows.done)
                for epoch, rows in sorted(self._rows.items())
            ),
        )


def _break_marker(feed: str, session: int) -> Chunk:
    meta = ChunkMeta(feed, 0, 0, 0, 0, Schema(()), (), (), True, mode="inference", session=session)
    return Chunk(meta, ())
