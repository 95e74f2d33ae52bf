"""Trained feeds at the chief: what of each feed the servers' parameters contain, kept beside them.

Covers: micro-batches of streams: the order that an epoch is one, its id once every worker has
trained its rows, the save after it, the reports to the driver. Other epochs: which are to be
recorded for a run that resumes this one.
Does not: feed (feeding), detect that rows were trained (tfos.keras.fit.epoch_agreement), save
(tfos.worker.saver), keep the record of epochs (tfos.reading.fed_epochs).
Runs in: the chief's process.
Threads: orders come from `tfos-orders` and are carried out on short-lived threads; `trained` comes
from the thread that runs `fit`; `_lock` guards the tables, not the servers' calls.

    TrainBatch ─► no save begins ─► "its rows may come" ─► every worker trained them ─► kept ─► save
               ─► "done"
The id is set while no worker trains: all are past the rendezvous at the end of the epoch, and
none begins the next one before the chief. So a checkpoint holds a whole batch and its id, or
neither. The driver revokes a batch whose feed failed (LeaveBatch) before its epoch ends, so its
id is never recorded.

A server that is restarted goes back to its last save. If one was since a batch was expected, that
batch is not whole in the parameters, though a save after it succeeds: it is answered with an error
and its id is taken back, so that Spark brings it again. Not if it went back to the batch's own
save. So no rows come before each server has said which start of it is at work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ps.errors import PSError
from rpc.errors import RpcError
from tfos.control.messages import BatchReport, LeaveBatch, SaveBatches, TrainBatch
from tfos.errors import SettingsError
from tfos.fit_place import FitPlace
from tfos.reading.fed_epochs import FedEpochRecord

if TYPE_CHECKING:
    from ps.client.client import PSClient
    from tfos.worker.saver import ChiefSaver

METADATA_NAME = "tfos.streams"
"""Name of the metadata: a mapping of query id to the last batch id."""
_MAX_QUERIES = 16
"""Ids of the queries trained last; metadata is small."""
_LOOK_S = 0.2
"""How often to ask again a server that is away."""
_RETURN_S = 300.0
"""For a server that is away after a save: to be started again and to restore that save."""


class _Expected(NamedTuple):
    """A batch that is in no save yet, or that a server may have lost since."""

    query: str
    batch_id: int
    before: int | None
    """The id that was recorded for its query before; None: there was none."""
    generations: tuple[int, ...]
    """The servers' when its rows were let in."""
    saved_step: int = -1
    """Of the save that has it, while it is unknown whether the servers still do; -1: none."""


class _Outcome(NamedTuple):
    """Of a save, as BatchReport says it."""

    error: str = ""
    is_lost: bool = False


_SAVED = _Outcome()


class TrainedFeeds:
    """What is trained of the feeds, shared by the driver's orders and the training code.

    Args:
        report: sends a report to the driver.
        stopped: set once the node is stopped; None: it never is.
    """

    def __init__(
        self, report: Callable[[BatchReport], object], stopped: threading.Event | None = None
    ) -> None:
        self._report = report
        self._stopped = stopped or threading.Event()
        self._is_ended = False
        self._client: Callable[[], PSClient] | None = None
        self._lock = threading.Lock()
        self._saver: ChiefSaver | None = None
        self._due: dict[str, TrainBatch] = {}
        self._left: dict[str, int] = {}
        """By feed, the last order that was revoked."""
        self._in_part: dict[str, TrainBatch] = {}
        """By feed, a failed batch: the parameters may contain a part of it, so it holds saves."""
        self._expected: dict[str, _Expected] = {}
        """By feed, the newest batch."""
        self._followed: set[str] = set()
        self._trained: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        """By feed, the newest epoch whose end was ordered and that is of no stream."""
        self._fed = FedEpochRecord()

    def begin(
        self,
        saver: ChiefSaver | None,
        client: Callable[[], PSClient],
        *,
        run: str = "",
        resumes: bool = False,
    ) -> None:
        """Report what the restored parameters contain; the servers hold parameters now.

        Args:
            saver: the chief's saver; None: the cluster does not save.
            client: returns the client of the servers that `fit` uses.
            run: id of this cluster.
            resumes: fed epochs go on where an interrupted run was.
        """
        self._saver, self._client = saver, client
        if saver is not None:
            metadata = saver.restored_metadata()
            found = metadata.get(METADATA_NAME, {})
            self._trained = {str(query): int(batch) for query, batch in found.items()}
            self._saved = dict(self._trained)
            self._fed.begin(metadata, client, run=run, resumes=resumes)
        self._answer("", 0, epochs=self._fed.before)

    def begin_late(self, saver: ChiefSaver, client: Callable[[], PSClient]) -> None:
        """Save from now on; for servers that begin within main_fun, so without streams so far.

        Args:
            saver: as of `begin`.
            client: as of `begin`.

        Raises:
            SettingsError: a stream trains this cluster, or the run that it resumes.
        """
        with self._lock:
            is_streamed = bool(self._due or self._left or self._trained)
        if is_streamed or saver.restored_metadata().get(METADATA_NAME):
            raise SettingsError(
                "Checkpoints and a stream with num_ps=0: the servers are to hold the ids of its "
                "micro-batches before the first of them comes, and the workers' own begin later; "
                "use num_ps >= 1"
            )
        self._saver, self._client = saver, client

    def end(self) -> None:
        """main_fun has returned: a run that resumes this one feeds all of its epochs."""
        self._is_ended = True
        self._fed.end()

    def expect(self, order: TrainBatch) -> None:
        """Carry out an order: admit its rows once no running save could contain a part of them.

        And once each server has said which start of it is at work. The driver revokes the order of
        a batch whose rows may not come for `feed_timeout`, which ends the wait.
        """
        if self._saver is not None and order.holds:
            self._saver.hold(order)
        generations = self._await_generations(order)
        with self._lock:
            is_admitted = generations is not None and not self._is_revoked(order)
            if generations is not None and is_admitted:
                self._due[order.feed] = order
                before = self._trained.get(order.query)
                expected = _Expected(order.query, order.batch_id, before, generations)
                self._expected[order.feed] = expected
        if is_admitted:
            self._answer(order.feed, order.number, is_done=False)
        else:
            self.release(order)

    def leave(self, order: LeaveBatch) -> TrainBatch | None:
        """Carry out an order to revoke a batch; return the batch for which no save waits any more.

        For one that failed saves wait until a later epoch is trained: the repeated batch, or other
        data that the user feeds.
        """
        with self._lock:
            self._left[order.feed] = order.number
            due = self._due.get(order.feed)
            if due is None or due.number > order.number:
                return None
            del self._due[order.feed]
            return self._holds_on(due) if order.in_part else due

    def release(self, order: TrainBatch) -> None:
        """Allow saves by time and steps again, as far as this batch is concerned."""
        if self._saver is not None:
            self._saver.release(order)

    def save(self, order: SaveBatches) -> None:
        """Carry out an order to save the trained batches."""
        self._answer(order.feed, order.number, **self._save(order.feed)._asdict())

    def count(self, feed: str, epoch: int) -> None:
        """Record this epoch once it is trained, for a run that resumes this one.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        self._counted[feed] = epoch

    def follow(self, feed: str) -> None:
        """`fit` reads this feed and reports its trained epochs."""
        with self._lock:
            self._followed.add(feed)

    def trained(self, feed: str, epoch: int, place: FitPlace) -> None:
        """Every worker's rows of this and earlier epochs are in the servers' parameters.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
            place: where `fit` goes on.
        """
        order = self._take(feed, epoch)
        if order is None:
            self._go_on(feed, epoch)
            if feed in self._counted and epoch <= self._counted[feed]:
                self._fed.note(feed, epoch, place)
            return
        outcome = self._lost_before_save(feed) if order.saves else _SAVED
        if not outcome.is_lost:
            self._note(order)
            outcome = self._save(feed) if order.saves else _SAVED
        if not outcome.is_lost:
            self._finish(order, **outcome._asdict())
            return
        with self._lock:
            before = self._holds_on(order)
        if before is not None:
            self.release(before)
        self._answer(feed, order.number, **outcome._asdict())

    def stopped(self, feed: str, number: int) -> None:
        """A fit has stopped before its last epoch, by a callback.

        Args:
            feed: name of the feed that it read.
            number: of the fit.
        """
        self._fed.stopped(feed, number)

    def flushed(self, feed: str, epoch: int) -> None:
        """Handle an epoch whose rows were read; without a `fit` on this feed it is over.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        with self._lock:
            is_followed = feed in self._followed
        if is_followed:
            return
        order = self._take(feed, epoch)
        if order is None:
            self._go_on(feed, epoch)
        else:
            self._finish(order, is_noted=False)

    def _finish(self, order: TrainBatch, **changes: Any) -> None:
        self._go_on(order.feed, order.epoch)
        self.release(order)
        self._answer(order.feed, order.number, **changes)

    def _holds_on(self, order: TrainBatch) -> TrainBatch | None:
        """Note that a batch has failed; return the one that it holds saves in the place of."""
        before = self._in_part.get(order.feed)
        self._in_part[order.feed] = order
        return before

    def _go_on(self, feed: str, epoch: int) -> None:
        """Release the saves that wait because of a failed batch, if this epoch came after it."""
        with self._lock:
            failed = self._in_part.get(feed)
            is_behind = failed is not None and failed.epoch < epoch
            if is_behind:
                del self._in_part[feed]
        if failed is not None and is_behind:
            self.release(failed)

    def _take(self, feed: str, epoch: int) -> TrainBatch | None:
        with self._lock:
            order = self._due.get(feed)
            return self._due.pop(feed) if order is not None and order.epoch <= epoch else None

    def _note(self, order: TrainBatch) -> None:
        with self._lock:
            self._trained.pop(order.query, None)  # the newest last
            self._trained[order.query] = order.batch_id
            while len(self._trained) > _MAX_QUERIES:
                del self._trained[next(iter(self._trained))]
        self._record()

    def _record(self) -> None:
        with self._lock:
            value = dict(self._trained)
        if self._client is not None:
            self._client().set_metadata(METADATA_NAME, value)

    def _save(self, feed: str) -> _Outcome:
        """Save what is trained.

        Args:
            feed: whose newest batch has to be in the save.
        """
        if self._saver is None:
            return _SAVED
        with self._lock:
            trained, expected = dict(self._trained), self._expected.get(feed)
        was_saved = expected is not None and expected.saved_step >= 0
        if not was_saved and (error := self._saver.save_now()):
            return _Outcome(error)
        outcome = _SAVED if expected is None else self._kept(self._saver, feed, expected)
        if outcome.is_lost and expected is not None:
            return self._save_without(self._saver, feed, expected, outcome.error)
        if outcome.error:
            return outcome
        if was_saved and (error := self._saver.save_now()):
            return _Outcome(error)
        with self._lock:
            self._saved = trained
            self._expected.pop(feed, None)
        return _SAVED

    def _lost_before_save(self, feed: str) -> _Outcome:
        """Return whether the newest batch of a feed is not whole in the parameters any more."""
        with self._lock:
            expected = self._expected.get(feed)
        if self._saver is None or expected is None:
            return _SAVED
        if self._generations(self._saver) == expected.generations:
            return _SAVED
        with self._lock:
            self._expected.pop(feed, None)
        return _lost(expected)

    def _kept(self, saver: ChiefSaver, feed: str, expected: _Expected) -> _Outcome:
        """Return whether its save, or the one just made, has the batch, and the servers do now.

        Args:
            saver: has made the save.
            feed: of the batch.
            expected: the batch.
        """
        step, deadline_s = expected.saved_step, time.monotonic() + _RETURN_S
        if step < 0:
            # The save's own starts: a server restarted twice may hold a save that lacks the batch.
            if saver.saved_generations != expected.generations:
                return _lost(expected)
            step = saver.saved_step
        while True:
            is_kept = self._is_held_since(saver, step, expected.generations)
            if is_kept is not None:
                return _SAVED if is_kept else _lost(expected)
            if time.monotonic() >= deadline_s or self._is_over():
                break
            self._stopped.wait(_LOOK_S)
        with self._lock:
            self._expected[feed] = expected._replace(saved_step=step)
        return _Outcome(
            f"the save of step {step} has batch {expected.batch_id}, and a parameter server has "
            "been away since then: whether it goes on from that save is unknown"
        )

    def _is_held_since(
        self, saver: ChiefSaver, step: int, generations: tuple[int, ...]
    ) -> bool | None:
        """Return whether every server still has what it had at a save; None: one is away.

        Args:
            saver: has made the save.
            step: of the save.
            generations: which starts of the servers it holds.
        """
        found = self._generations(saver)
        if found == generations:
            return True
        if found is None:
            return None
        try:
            restored = saver.restored_steps()
        except (PSError, RpcError):
            return None
        starts = zip(found, generations, restored, strict=True)
        return all(now == then or at >= step for now, then, at in starts)

    def _save_without(
        self, saver: ChiefSaver, feed: str, expected: _Expected, error: str
    ) -> _Outcome:
        """Take back the id of a lost batch, also on disk: a run that resumes would skip the batch.

        Args:
            saver: has made a save that names the batch.
            feed: of the batch.
            expected: the batch.
            error: why it is lost.
        """
        with self._lock:
            self._expected.pop(feed, None)
        self._take_back(expected)
        failed = saver.save_now()
        if failed:
            error = (
                f"{error}; the save without its id failed ({failed}): a run that resumes from step "
                f"{saver.saved_step} skips the batch, unless a later save of this run succeeds"
            )
        return _Outcome(error, is_lost=True)

    def _take_back(self, expected: _Expected) -> None:
        """Record the batch no more."""
        with self._lock:
            self._trained.pop(expected.query, None)
            if expected.before is not None:
                self._trained[expected.query] = expected.before
        self._record()

    def _is_over(self) -> bool:
        return self._is_ended or self._stopped.is_set()

    def _is_revoked(self, order: TrainBatch) -> bool:
        return order.number <= self._left.get(order.feed, -1)

    def _await_generations(self, order: TrainBatch) -> tuple[int, ...] | None:
        """Return the servers' starts; None: the order was revoked, or this worker ends.

        Args:
            order: whose rows wait.
        """
        if self._saver is None:
            return ()
        while not self._is_over() and not self._is_revoked(order):
            found = self._generations(self._saver)
            if found is not None:
                return found
            self._stopped.wait(_LOOK_S)
        return None

    @staticmethod
    def _generations(saver: ChiefSaver) -> tuple[int, ...] | None:
        """Return which start of each server is at work; None: one is away.

        Args:
            saver: asks them.
        """
        try:
            return saver.server_generations()
        except (PSError, RpcError):
            return None

    def _answer(self, feed: str, number: int, **changes: Any) -> None:
        with self._lock:
            report = BatchReport(
                feed,
                number,
                changes.pop("is_done", True),
                dict(self._trained),
                dict(self._saved),
                **changes,
            )
        self._report(report)


def _lost(expected: _Expected) -> _Outcome:
    """Return what is said of a batch that is not whole in the parameters any more."""
    error = (
        f"a parameter server was restarted while batch {expected.batch_id} was trained or saved, "
        "and went back to the save before it: the batch is not whole in the parameters"
    )
    return _Outcome(error, is_lost=True)
