"""Trained feeds at the chief: which rows of each feed the servers' parameters contain.

Covers: micro-batches of streams: the order that makes an epoch one, its id once every worker has
trained its rows, the save after it, the reports to the driver. Other epochs: which to record for a
run that resumes this one.
Does not: feed (feeding), detect that rows were trained (tfos.keras.fit.epoch_agreement), save
(tfos.worker.saver), keep the record of epochs (tfos.reading.fed_epochs), decide what an order or
the end of an epoch changes (tfos.worker.trained.feed).
Runs in: the chief's process.
Threads: orders come from `tfos-orders` and are carried out on short-lived threads; `trained` comes
from the thread that runs `fit`; `_lock` guards the states, not the servers' calls.

    TrainBatch ─► no save begins, the batch before is over ─► "its rows may come"
               ─► every worker trained them ─► kept ─► save ─► "done"
The id is set while no worker trains: all are past the rendezvous at the end of the epoch, and
none begins the next one before the chief. So a checkpoint holds a whole batch and its id, or
neither. That rendezvous does not wait for a lost worker. If one is missing, the chief waits for the
driver, which feeds its rows again (then ComeTo) or revokes the batch. The driver revokes a batch
whose feed failed (LeaveBatch) before its epoch ends, so its id is never recorded. A driver that has
stopped waiting for the end of a batch learns from the next answer whether the parameters contain
it: that batch is over by then.

A restarted server goes back to its last save. If that happens after a batch is expected, the
parameters do not contain the whole batch, even if a save after it succeeds. The batch is answered
with an error and its id is taken back, so that Spark repeats it, unless the server went back to a
save that has the batch. So no rows come before each server has reported its generation.
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
from tfos.worker.trained.feed import TrainedFeed, Unsaved

if TYPE_CHECKING:
    from ps.client.client import PSClient
    from tfos.worker.saver import ChiefSaver

METADATA_NAME = "tfos.streams"
"""Name of the metadata: a mapping from query id to the last batch id."""
_MAX_QUERIES = 16
"""Most query ids that are kept, those trained last; metadata is small."""
_LOOK_S = 0.2
"""Seconds between two requests to a server that is away."""
_RETURN_S = 300.0
"""Seconds for a server that is away after a save to restart and restore that save."""


class _Outcome(NamedTuple):
    """Outcome of a save, as in BatchReport."""

    error: str = ""
    is_lost: bool = False


_SAVED = _Outcome()


class TrainedFeeds:
    """Record of the trained feeds, shared by the driver's orders and the training code.

    Args:
        report: function that sends a report to the driver.
        stopped: event set once the node is stopped; None: it never is.
    """

    def __init__(
        self, report: Callable[[BatchReport], object], stopped: threading.Event | None = None
    ) -> None:
        self._report = report
        self._stopped = stopped or threading.Event()
        self._is_ended = False
        self._client: Callable[[], PSClient] | None = None
        self._lock = threading.Lock()
        self._heard = threading.Condition(self._lock)
        """Notified of orders that may end the wait for the driver's decision on an epoch."""
        self._saver: ChiefSaver | None = None
        self._feeds: dict[str, TrainedFeed] = {}
        self._trained: dict[str, int] = {}
        self._fed = FedEpochRecord()
        self.keeps_epochs = False
        """Whether the record of epochs outlives main_fun: the driver says elsewhere that the run
        has ended, and if it could not, the next one must not train them again."""
        self._late: list[SaveBatches] = []
        """Orders that came after the end of main_fun: the last save answers them."""
        self._last_error: str | None = None
        """Reason why the last save failed, or an empty string; None: it was not made yet."""

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
            client: function that returns the client of the servers that `fit` uses.
            run: id of this cluster.
            resumes: whether fed epochs go on where an interrupted run stopped.
        """
        self._saver, self._client = saver, client
        if saver is not None:
            saver.watch(self._note_save)
            metadata = saver.restored_metadata()
            found = metadata.get(METADATA_NAME, {})
            self._trained = {str(query): int(batch) for query, batch in found.items()}
            self._fed.begin(metadata, client, run=run, resumes=resumes)
        self._answer("", 0, epochs=self._fed.before)

    def begin_late(self, saver: ChiefSaver, client: Callable[[], PSClient]) -> None:
        """Save from now on; for servers that begin within main_fun, when there are no streams yet.

        Args:
            saver: as for `begin`.
            client: as for `begin`.

        Raises:
            SettingsError: a stream trains this cluster, or trained the run that it resumes.
        """
        with self._lock:
            is_streamed = any(each.is_streamed for each in self._feeds.values())
            is_streamed = is_streamed or bool(self._trained)
        if is_streamed or saver.restored_metadata().get(METADATA_NAME):
            raise SettingsError(
                "Checkpoints and a stream with num_ps=0: the servers must hold the ids of its "
                "micro-batches before the first one comes, but the workers' own servers begin "
                "later; use num_ps >= 1"
            )
        self._saver, self._client = saver, client
        saver.watch(self._note_save)

    def end(self) -> None:
        """Note that main_fun has returned: a run that resumes this one feeds all its epochs.

        Not with `keeps_epochs`: then its driver decides.
        """
        self._is_ended = True
        if not self.keeps_epochs:
            self._fed.end()

    def closed(self, error: str) -> None:
        """Note that the saver has ended with a last save, which answers later orders to save.

        Args:
            error: reason why it failed, or an empty string.
        """
        with self._lock:
            self._last_error = error
            late, self._late = self._late, []
        for order in late:
            self._answer_last(order, error)

    def expect(self, order: TrainBatch) -> None:
        """Carry out an order: admit its rows once no running save could contain a part of them.

        The batch before it must also be over, and each server must have reported its generation.
        The driver revokes the order of a batch whose rows have to wait for too long, which ends
        the wait.
        """
        if self._saver is not None and order.holds:
            self._saver.hold(order)
        if self._admits(order):
            self._answer(order.feed, order.number, is_done=False)
        else:
            self.release(order)

    def leave(self, order: LeaveBatch) -> TrainBatch | None:
        """Carry out an order to revoke a batch; return the batch that no longer holds saves.

        Args:
            order: order to revoke it.
        """
        state = self._state(order.feed)
        with self._heard:
            self._heard.notify_all()
            return state.leave(order)

    def release(self, order: TrainBatch | None) -> None:
        """Allow periodic saves again, as far as this batch is concerned."""
        if self._saver is not None and order is not None and order.holds:
            self._saver.release(order)

    def save(self, order: SaveBatches) -> None:
        """Carry out an order to save the trained batches, between two batches of the feed."""
        outcome = self._save_between(order.feed)
        if outcome is None:  # main_fun has returned: the last save is what counts
            with self._lock:
                error = self._last_error
                if error is None:
                    self._late.append(order)
                    return
            self._answer_last(order, error)
            return
        self._answer(order.feed, order.number, **outcome._asdict())

    def _answer_last(self, order: SaveBatches, error: str) -> None:
        """Report what the last save means for an order that came after it.

        Args:
            order: order to save.
            error: reason why the last save failed, or an empty string.
        """
        unsaved, outcome = self._state(order.feed).unsaved, _Outcome(error)
        if not error and unsaved is not None and unsaved.saved_step < 0:
            outcome = _Outcome(unsaved.loss, is_lost=True)
        self._answer(order.feed, order.number, **outcome._asdict())

    def count(self, feed: str, epoch: int, num_fed: int) -> None:
        """Record this epoch once it is trained, for a run that resumes this one.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
            num_fed: the count of fed epochs, as the driver says; 0: this epoch does not count.
        """
        state = self._state(feed)
        with self._heard:
            state.count(epoch, num_fed)
            self._heard.notify_all()

    def come_to(self, feed: str, epoch: int) -> None:
        """Note that, as the driver says, all rows of earlier epochs are trained or dropped.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        state = self._state(feed)
        with self._heard:
            state.come_to = epoch
            self._heard.notify_all()

    def follow(self, feed: str) -> None:
        """Note that `fit` reads this feed and reports its trained epochs."""
        self._state(feed).is_followed = True

    def trained(
        self, feed: str, epoch: int, place: FitPlace, *, lacks_worker: bool = False
    ) -> None:
        """Note that the servers' parameters contain all workers' rows of this and earlier epochs.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
            place: the place where `fit` goes on.
            lacks_worker: whether a worker did not report this, as it was lost or has returned; the
                driver knows whether it left rows.
        """
        state = self._state(feed)
        if lacks_worker and not self._await_driver(state, epoch):
            return
        with self._lock:
            num_fed = state.counted(epoch)
        if num_fed:
            self._fed.note(feed, num_fed, place)
        order = self._end_of(feed, epoch)
        if order is None:
            self._pass(feed, epoch)
            return
        outcome = self._lost_before_save(feed) if order.saves else _SAVED
        if not outcome.is_lost:
            self._note(order)
            outcome = self._save(feed) if order.saves else _SAVED
        if not outcome.is_lost:
            self._finish(order, **outcome._asdict())
            return
        with self._lock:
            before = state.fail()
        self.release(before)
        self._answer(feed, order.number, **outcome._asdict())

    def fit_stopped(self, feed: str, number: int) -> None:
        """Note that a callback has stopped a fit before its last epoch.

        Args:
            feed: name of the feed that the fit read.
            number: number of the fit.
        """
        self._fed.stopped(feed, number)

    def flushed(self, feed: str, epoch: int) -> None:
        """Handle an epoch whose rows were read; if no `fit` reads the feed, it is over.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        if self._state(feed).is_followed:
            return
        order = self._end_of(feed, epoch)
        if order is None:
            self._pass(feed, epoch)
        else:
            self._finish(order, is_noted=False)

    def _await_driver(self, state: TrainedFeed, epoch: int) -> bool:
        """Wait until the driver has decided on the rows of an epoch; False: this worker ends.

        Args:
            state: state of the feed.
            epoch: number of the epoch, from 0.
        """
        with self._heard:
            while state.awaits_driver(epoch):
                if self._is_over():
                    return False
                self._heard.wait(_LOOK_S)
        return True

    def _end_of(self, feed: str, epoch: int) -> TrainBatch | None:
        state, num_begun = self._state(feed), 0 if self._saver is None else self._saver.num_begun
        with self._lock:
            return state.end_of(epoch, num_begun)

    def _pass(self, feed: str, epoch: int) -> None:
        """Release the saves that wait because of a failed batch, if this epoch came after it."""
        state = self._state(feed)
        with self._lock:
            failed = state.passed(epoch)
        self.release(failed)

    def _finish(self, order: TrainBatch, **changes: Any) -> None:
        state = self._state(order.feed)
        with self._lock:
            state.done()
        self._pass(order.feed, order.epoch)
        self.release(order)
        self._answer(order.feed, order.number, **changes)

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
            feed: feed whose newest batch has to be in the save.
        """
        if self._saver is None:
            return _SAVED
        state = self._state(feed)
        was_saved = state.unsaved is not None and state.unsaved.saved_step >= 0
        if not was_saved and (error := self._saver.save_now()):
            return _Outcome(error)
        unsaved = state.unsaved  # the save has told its step by now
        outcome = _SAVED if unsaved is None else self._kept(self._saver, unsaved)
        if outcome.is_lost and unsaved is not None:
            return self._save_without(self._saver, feed, unsaved, outcome.error)
        if outcome.error:
            return outcome
        if was_saved and (error := self._saver.save_now()):
            return _Outcome(error)
        self._forget(feed)
        return _SAVED

    def _save_between(self, feed: str) -> _Outcome | None:
        """Save between two batches of a feed; None: main_fun has returned, so the saver ended."""
        state = self._state(feed)
        while not self._is_over():
            with self._lock:
                is_begun = state.begin_save()
            if not is_begun:
                self._stopped.wait(_LOOK_S)
                continue
            try:
                outcome = self._save(feed)
            finally:
                state.is_saving = False
            return None if outcome.error and self._is_ended else outcome
        return None

    def _forget(self, feed: str) -> None:
        """Note that the newest batch of a feed is saved, or lost."""
        state = self._state(feed)
        with self._lock:
            state.unsaved = None

    def _state(self, feed: str) -> TrainedFeed:
        with self._lock:
            return self._feeds.setdefault(feed, TrainedFeed())

    def _note_save(self, number: int, step: int, generations: tuple[int, ...]) -> None:
        """Take a save, ordered or periodic.

        Args:
            number: number of the save among all that have begun.
            step: step of the checkpoint.
            generations: generation of each server in it.
        """
        with self._lock:
            for state in self._feeds.values():
                state.note_save(number, step, generations)

    def _lost_before_save(self, feed: str) -> _Outcome:
        """Return whether the newest batch of a feed is no longer whole in the parameters."""
        unsaved = self._state(feed).unsaved
        if self._saver is None or unsaved is None:
            return _SAVED
        if self._generations(self._saver) == unsaved.generations:
            return _SAVED
        self._forget(feed)
        return _Outcome(unsaved.loss, is_lost=True)

    def _kept(self, saver: ChiefSaver, unsaved: Unsaved) -> _Outcome:
        """Return whether a save has the batch, and the servers do now.

        Args:
            saver: the saver that has made the saves.
            unsaved: the batch.
        """
        step, deadline_s = unsaved.saved_step, time.monotonic() + _RETURN_S
        if step < 0:
            return _Outcome(unsaved.loss, is_lost=True)
        while True:
            is_kept = self._is_held_since(saver, step, unsaved.generations)
            if is_kept is not None:
                return _SAVED if is_kept else _Outcome(unsaved.loss, is_lost=True)
            if time.monotonic() >= deadline_s or self._is_over():
                break
            self._stopped.wait(_LOOK_S)
        return _Outcome(
            f"the save of step {step} has batch {unsaved.batch_id}, but a parameter server has "
            "been away since then; it is unknown whether it restores that save"
        )

    def _is_held_since(
        self, saver: ChiefSaver, step: int, generations: tuple[int, ...]
    ) -> bool | None:
        """Return whether every server still has what it had at a save; None: one is away.

        Args:
            saver: the saver that has made the save.
            step: step of the save.
            generations: generation of each server in it.
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

    def _save_without(self, saver: ChiefSaver, feed: str, lost: Unsaved, error: str) -> _Outcome:
        """Take back the id of a lost batch, also on disk: a run that resumes would skip the batch.

        Args:
            saver: the saver that has made a save that names the batch.
            feed: feed of the batch.
            lost: the batch.
            error: reason why it is lost.
        """
        self._forget(feed)
        self._take_back(lost)
        failed = saver.save_now()
        if failed:
            error = (
                f"{error}; the save without its id failed ({failed}). A run that resumes from step "
                f"{saver.saved_step} skips the batch, unless a later save of this run succeeds"
            )
        return _Outcome(error, is_lost=True)

    def _take_back(self, lost: Unsaved) -> None:
        """Remove the batch from the record."""
        with self._lock:
            self._trained.pop(lost.query, None)
            if lost.before is not None:
                self._trained[lost.query] = lost.before
        self._record()

    def _is_over(self) -> bool:
        return self._is_ended or self._stopped.is_set()

    def _admits(self, order: TrainBatch) -> bool:
        """Wait until the rows of a batch may come; False: it was revoked, or this worker ends.

        Args:
            order: order whose rows wait.
        """
        state = self._state(order.feed)
        while not self._is_over() and not state.is_revoked(order):
            generations = () if self._saver is None else self._generations(self._saver)
            with self._lock:
                if state.admit(order, self._trained.get(order.query), generations):
                    return True
            self._stopped.wait(_LOOK_S)
        return False

    @staticmethod
    def _generations(saver: ChiefSaver) -> tuple[int, ...] | None:
        """Return the generation of each server; None: one is away.

        Args:
            saver: the saver that asks them.
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
                **changes,
            )
        self._report(report)
