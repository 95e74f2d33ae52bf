"""Epoch boundaries of a distributed `fit`: the workers' rendezvous and the chief's decisions.

Covers: the callbacks that `distribute` puts around the user's: combined metrics before them, the
chief's decisions after them; the end of the feed; the last pull.
Does not: push gradients (tfos.keras.step.exchange).     Threads: the thread that runs `fit`.

At the end of an epoch every worker
    1. waits for its pushes in flight; leaves the barrier (sync, ssp), so that workers with more
       batches go on;
    2. reaches a rendezvous: the metrics over all rows become the logs of all workers;
    3. records a micro-batch of a stream as trained, and saves it, as the chief; pulls, so that
       ModelCheckpoint and best weights hold the servers' newest parameters. Where a worker was
       lost, all wait before the pull until the driver has had its rows fed again;
    4. runs the user's callbacks (EarlyStopping, ReduceLROnPlateau, ...);
    5. joins again and reaches a second rendezvous: learning rate and stop are the chief's;
    6. waits for the next epoch of a feed, or its end, which ends Keras' loop.
The next epoch begins after 5 on all workers, so no worker steps without the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import msgspec
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from tfos.fit_place import FitPlace
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.epoch_length import EpochLength
from tfos.keras.data.running_fit import drop_unmeasured, running_fit
from tfos.keras.fit.learning_rate import KeptRate, learning_rate
from tfos.keras.fit.metric_states import (
    VALIDATION,
    EpochMetrics,
    MetricStates,
    all_know,
    inexact,
    uncommon,
)
from tfos.keras.fit.validation import ValidationPasses
from tfos.keras.step import optimizers
from tfos.keras.step.beginning import Beginning, DataState, FitData
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)

Logs = dict[str, Any] | None


class Report(msgspec.Struct, frozen=True):
    """One worker's epoch."""

    rows: int
    logs: dict[str, float]
    fed_epoch: int | None = None
    """Newest epoch of the feed that this worker has fully trained; None: it reads no feed."""
    val_rows: int = 1
    """Number of rows of the validation metrics; 1 if it is unknown."""
    metrics: MetricStates = MetricStates()
    steps: int = 0
    """Number of pushes that the servers have acknowledged."""


class Decision(msgspec.Struct, frozen=True):
    """Decisions of one worker's callbacks; all workers follow the same one, see `_leading`."""

    chief: bool
    stop: bool
    learning_rate: float | None = None
    assigned: bool = False
    data: DataState | None = None
    joins: bool = False
    """Whether the worker joins before its first epoch, with no decisions of its callbacks."""


class FitEnded(Exception):
    """Leaves a loop that is not Keras' own, or has begun no epoch, when no epoch is left.

    The `fit` of `distribute` catches it.
    """


class BeforeCallbacks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """First in the list of callbacks.

    Args:
        trainer: trainer of the model.
        arguments: arguments of `fit`, by name.
        validation: the feed's validation passes.
        number: number of the fit.
        place: place where this worker joins others that train; None: all begin together.
        check: function that refuses arguments by name with which no fit can run.

    Attributes:
        name: prefix of the keys of the fit's rendezvous.
        last: callbacks that run after all others, in their order.
        given_on: all callbacks that the model's own `fit` was given, a list or a CallbackList.
        rows: number of rows of all workers in the epoch that has just ended.
        steps: number of their steps in that epoch.
        measured_on: generation of each server whose parameters the epoch's metrics measure.
        epochs_run: number of epochs in this fit.
        epochs: epochs that Keras' own fit was asked for, by the call or by a fit of the class.
        steps_per_epoch: steps per epoch that it was asked for.
        ends_with_feed: whether Keras' loop was ended after the last fed epoch.
        fed_of_asked: number of fed epochs and of requested ones, if the loop was ended so.
    """

    def __init__(
        self,
        trainer: PSTrainer,
        arguments: Mapping[str, Any],
        validation: ValidationPasses,
        number: int,
        place: FitPlace | None,
        check: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        dataset = arguments.get("x")
        self.data = FitData(trainer.ctx, arguments, trainer.model)
        self._number = number
        self._place = place
        self._arguments, self._check = arguments, check
        self._trainer = trainer
        self._validation = validation
        self._dataset = dataset if isinstance(dataset, BatchDataset) else None
        self._feed = "" if self._dataset is None else self._dataset.feed
        self.name = validation.name
        self._rows_before = self._steps_before = 0
        self._told: set[str] = set()
        self._has_told_unshared = self._has_told_names = False
        self._absent: tuple[int, ...] = ()
        """The workers that were missing in the last epoch's metrics."""
        self._last_logs: Logs = None
        self._running: Any = None
        """CallbackList of Keras' own fit; None: the class has its own loop."""
        self._has_ended = self._stops_next = self.is_stopped = False
        self.last: Sequence[Any] = ()
        self.given_on: Any = ()
        self.rows = self.steps = self.epochs_run = 0
        self.measured_on: tuple[int, ...] | None = None
        self.epochs = arguments["epochs"]
        self.steps_per_epoch = arguments.get("steps_per_epoch")
        self.ends_with_feed = False
        self.fed_of_asked: tuple[int, int] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Start all workers together, so that none trains what the others do not."""
        self._trainer.awaits_callbacks = False
        self.ends_with_feed = self._has_ended = False  # set by an earlier loop of the class's fit
        self._take_places()
        if self._feed:
            self._trainer.ctx.trained_feeds.follow(self._feed)
        if self._place is not None:
            self._join_others(self._place)
        else:
            self._trainer.workers.join()
            self.data.begin(self._beginnings(), self._number)
            if self._trainer.attached and self._trainer.ctx.num_workers > 1:
                # The chief may have put values of its own on the servers.
                self._trainer.pull_for_fit()

    def _take_places(self) -> None:
        """Make callbacks that the class's fit has added run between those of tfos, too.

        Keras iterates over the previous list, so each callback begins once.
        """
        fit = running_fit()
        if fit is None or fit.model is not self.model:  # the class's own loop
            return
        self.epochs, self._running = fit.epochs, fit.callbacks
        if self.fed_of_asked is not None and fit.x is not self._dataset:
            self._dataset = None  # the feed has ended, and this loop has other data
        if fit.steps_per_epoch != self.steps_per_epoch:  # changed by the class's fit
            self.steps_per_epoch = fit.steps_per_epoch
            self._check({**self._arguments, "steps_per_epoch": fit.steps_per_epoch})
        places = {id(each): place for place, each in enumerate(self.last, 1)} | {id(self): -1}
        given = fit.callbacks.callbacks
        fit.callbacks.callbacks = sorted(given, key=lambda each: places.get(id(each), 0))
        params = fit.callbacks.params or {}
        if isinstance(params.get("steps"), EpochLength):
            params["steps"] = None  # for all callbacks: the next epoch may have another number

    def end_early(self) -> Any:
        """End a fit that FitEnded has left, as Keras does after its loop of epochs.

        Returns:
            The history; None: the class's own loop made none.
        """
        model = self.model
        if self.epochs_run or self.is_stopped:
            self._trainer.pull()  # a callback may have swapped weights and averages
            if self._trainer.attached:
                model.optimizer.finalize_variable_values(model.trainable_weights)
        if self._running is not None:
            self._running.on_train_end(self._last_logs)
        elif not self._has_ended:
            for callback in getattr(self.given_on, "callbacks", self.given_on):
                callback.on_train_end(self._last_logs)
        return getattr(model, "history", None)

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Record that the callbacks end; a loop that ended with the feed was not stopped by any."""
        self._has_ended = True
        if self.ends_with_feed:
            self.model.stop_training = False

    def end_last_epoch(self, epoch: int) -> None:
        """End Keras' loop here if it would have more epochs but none will be fed.

        It runs after all callbacks, so the code after the loop, also in the class's fit, then runs.

        Args:
            epoch: number of the epoch that has ended.
        """
        if self._running is None or self._dataset is None or not self._feed:
            return
        if epoch + 1 < self.epochs and not self.model.stop_training:
            self.ends_with_feed = not self._has_epoch(self._dataset)
            if self.ends_with_feed:
                self.fed_of_asked = self.epochs_run, self.epochs
                self.model.stop_training = True
            elif self.model.stop_training:  # by another thread; the others begin the next epoch
                self._stops_next, self.model.stop_training = True, False

    def _beginnings(self) -> dict[int, Beginning]:
        own = msgspec.msgpack.encode(self.data.beginning())
        told = self._trainer.workers.rendezvous(f"{self.name}/begin", own)
        return _by_rank(told, Beginning)

    def _join_others(self, place: FitPlace) -> None:
        """Meet the others at the end of the previous epoch, which they have reported.

        From here on they wait for this worker at the ends of epochs; in modes with waits, also at
        steps, from its first batch on.
        """
        if place.epoch == place.first:  # the others reported only at the beginning
            told = {rank: each.data for rank, each in self._beginnings().items()}
            self.data.join(told, place)
            return
        key = f"{self.name}/{place.epoch - 1}/decision"
        own = Decision(chief=False, stop=False, data=self.data.state(), joins=True)
        answers = self._trainer.workers.rendezvous(key, msgspec.msgpack.encode(own))
        decisions = _by_rank(answers, Decision)
        decision = _leading(decisions) or own
        self.is_stopped = decision.stop
        if decision.learning_rate is not None:
            optimizers.unwrap(self._trainer.optimizer).learning_rate = decision.learning_rate
        states = {rank: each.data for rank, each in decisions.items() if each.data is not None}
        self.data.join(states, place)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Wait for the epoch's first batch, or for the end of the feed."""
        self._validation.epoch = epoch
        if self.is_stopped:  # by the others, which begin no further epoch
            self.model.stop_training = True
            raise FitEnded
        if self._stops_next:
            self._stops_next, self.model.stop_training = False, True
        if self._dataset is not None:
            if not self._has_epoch(self._dataset):
                self.fed_of_asked = self.epochs_run, self.epochs
                raise FitEnded
            self._dataset.batches_under_way = self._trainer.batches_under_way
        self._trainer.begin_epoch()
        self.measured_on = None
        self._rows_before, self._steps_before = self._trainer.rows, self._trainer.steps

    def _has_epoch(self, dataset: BatchDataset) -> bool:
        """Wait for the next epoch's first batch; False: the feed has ended.

        If lost rows of the previous epoch are fed again, another worker trains them first: the
        barrier must not hold it up until this one has rows.
        """
        has_left = False

        def let_others_go_on() -> None:
            nonlocal has_left
            if not has_left and dataset.others_train:
                has_left = True
                self._trainer.workers.leave()

        if not dataset.start_epoch(let_others_go_on):
            return False
        if has_left:
            self._trainer.workers.join()
        return True

    def on_test_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Note whose parameters are validated."""
        self.measured_on = self._trainer.client.heard_generations

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Take steps 1 to 3 of the module's list."""
        trainer = self._trainer
        trainer.attach_without_batch()
        trainer.drain()
        self.measured_on = self.measured_on or trainer.client.heard_generations
        if self._dataset is not None:
            self._dataset.batches_under_way = int
            self._dataset.all_acknowledged()
        if trainer.attached:
            trainer.positions.at_end()
        trainer.workers.leave()
        rows = trainer.rows - self._rows_before
        val_rows = self._validation.take_rows()
        found = {} if logs is None else logs
        drop_unmeasured(found, rows, val_rows)
        reports = self._agree(epoch, found, rows, val_rows)
        if logs is not None:
            self._last_logs = dict(logs)
        self.rows, self.steps = sum(r.rows for r in reports), sum(r.steps for r in reports)
        self.epochs_run += 1
        self._end_trained(epoch, reports)
        trainer.pull()
        trainer.end_epoch()
        trainer.is_between_epochs = True

    def _agree(self, epoch: int, logs: dict[str, Any], rows: int, val_rows: int) -> list[Report]:
        """Replace this worker's logs by those of all workers; return the workers' reports."""
        fed_epoch = self._dataset.ended_epoch if self._dataset and self._feed else None
        steps = self._trainer.steps - self._steps_before
        report = Report(rows, dict(numbers_in(logs)), fed_epoch, val_rows, steps=steps)
        if self._trainer.ctx.num_workers == 1:
            return [report]
        own = self._validation.take_metrics()
        report = msgspec.structs.replace(report, metrics=own.states(logs))
        key = f"{self.name}/{epoch}"
        answers = self._trainer.workers.rendezvous(f"{key}/metrics", msgspec.msgpack.encode(report))
        by_rank: dict[int, Report] = _by_rank(answers, Report)
        reports = list(by_rank.values())
        states = [each.metrics for each in reports]
        values = own.values(states)
        if not all_know(states):
            told = self._trainer.workers.rendezvous(f"{key}/values", msgspec.msgpack.encode(values))
            for rank in sorted(told, reverse=True):  # so that all get the lowest rank's values
                values |= msgspec.msgpack.decode(told[rank], type=dict[str, Any])
        logs.update(combine(reports))
        arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in values.items()}
        logs.update(pythonify_logs(arrays))
        self._tell_inexact(states)
        self._tell_unshared(own, states)
        if self._trainer.ctx.is_chief:
            self._tell_absent(epoch, by_rank)
            self._tell_names(by_rank)
        return reports

    def _tell_absent(self, epoch: int, by_rank: Mapping[int, Report]) -> None:
        """Warn if other workers than before are missing in the epoch's metrics."""
        num_workers = self._trainer.ctx.num_workers
        absent = tuple(sorted(set(range(num_workers)) - by_rank.keys()))
        if absent == self._absent:
            return
        self._absent = absent
        if not absent:
            logger.warning(
                "from epoch %d on, metrics, steps and rows cover all workers again", epoch + 1
            )
            return
        logger.warning(
            "from epoch %d on, metrics, steps and rows cover %d of %d workers, also in fit's "
            "history; missing: worker %s. A missing worker was lost or has returned, or it was "
            "started again and has yet to end an epoch together with the others. The driver's line "
            "of an epoch counts the rows of all workers",
            epoch + 1,
            len(by_rank),
            num_workers,
            ", ".join(map(str, absent)),
        )

    def _tell_names(self, by_rank: Mapping[int, Report]) -> None:
        """Warn, once, of metrics whose names differ between workers: Keras numbers unnamed ones."""
        own = uncommon({rank: each.metrics.known for rank, each in by_rank.items() if each.rows})
        if own and not self._has_told_names:
            self._has_told_names = True
            logger.warning(
                "metrics have other names on other workers (%s), so each of these values covers "
                "only the rows of the workers with that name. Keras numbers the metrics that a "
                "process makes: give each a name, as in keras.metrics.AUC(name='auc'), or make the "
                "same models in the same order on every worker",
                "; ".join(f"worker {rank}: {', '.join(each)}" for rank, each in own.items()),
            )

    def _tell_inexact(self, states: Iterable[MetricStates]) -> None:
        """Warn of metrics that are not exact, on the chief, once per metric."""
        for name, reason in inexact(states).items():
            metric = name.removeprefix(VALIDATION)
            if self._trainer.ctx.is_chief and metric not in self._told:
                self._told.add(metric)
                logger.warning(
                    "the metric %r is the mean of the workers' own values, weighted by their rows, "
                    "not the value over all rows: %s",
                    metric,
                    reason,
                )

    def _tell_unshared(self, own: EpochMetrics, states: Iterable[MetricStates]) -> None:
        """Warn, on the chief, once: validation data that are not a feed are taken as shared."""
        if not self._trainer.ctx.is_chief or self._has_told_unshared:
            return
        if counts := own.unshared(states):
            self._has_told_unshared = True
            logger.warning(
                "%s: the workers have measured different values. Either their parameters differ, "
                "as they may if workers do not wait for each other, or each validates different "
                "rows, as with validation_split or dataset.shard(...). For different rows, the sum "
                "is right, not the mean. Give each worker the same validation_data, or feed them "
                '(validation_data=ctx.dataset(n, feed="validation")), so that each row counts once',
                "; ".join(
                    f"{name} is {mean}, the mean of the workers' counts, whose sum is {total}"
                    for name, (mean, total) in counts.items()
                ),
            )

    def _end_trained(self, epoch: int, reports: Sequence[Report]) -> None:
        """Go on once no worker trains and the parameters contain the epochs of these reports.

        The chief records them. If a worker is missing, its next attempt may train the rest of its
        rows until the chief has heard of it: outside of the others' barrier, so that it waits for
        none of them.
        """
        ended = [report.fed_epoch for report in reports if report.fed_epoch is not None]
        if not ended:
            return
        lacks = len(reports) < self._trainer.ctx.num_workers
        if self._trainer.ctx.is_chief and self._feed:
            following = FitPlace(self._number, epoch + 1)
            feeds = self._trainer.ctx.trained_feeds
            feeds.trained(self._feed, min(ended), following, lacks_worker=lacks)
        if lacks:  # every worker that has these reports sees it
            self._trainer.workers.rendezvous(f"{self.name}/{epoch}/decided", b"")


class AfterCallbacks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Last in the list of callbacks.

    Args:
        trainer: trainer of the model.
        kept_rate: kept rate of the model.
        before: the first callback.
    """

    def __init__(self, trainer: PSTrainer, kept_rate: KeptRate, before: BeforeCallbacks) -> None:
        super().__init__()
        self._before = before
        self._trainer = trainer
        self._kept_rate = kept_rate
        self._has_run = self._has_overruled = False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Let only the chief's callbacks end an epoch early: a worker that stops there is ahead."""
        if self._trainer.ctx.is_chief or not self.model.stop_training:
            return
        self.model.stop_training = False
        if not self._has_overruled:
            self._has_overruled = True
            logger.warning(
                "a callback of worker:%d has set stop_training inside an epoch, at batch %d. It "
                "trains on, because the chief's callbacks decide for all workers when fit stops. "
                "Set it in the chief's callback",
                self._trainer.ctx.worker_rank,
                batch,
            )

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Take step 5 of the module's list."""
        trainer = self._trainer
        self._has_run = True
        trainer.workers.join()
        self._kept_rate.record()
        self._follow(f"{self._before.name}/{epoch}/decision")
        self._before.end_last_epoch(epoch)
        if self.model.stop_training:
            trainer.pull_averages()

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: ARG002
        """End with the same parameters everywhere, restored best weights included."""
        self._trainer.is_between_epochs = False
        self._trainer.workers.leave()
        before = self._before
        if self._has_run or before.is_stopped or before.data.is_trained(before.epochs or 0):
            self._trainer.finalize()
        self._kept_rate.end()
        self._trainer.tell_changed()
        self._follow(f"{before.name}/end")
        self._trainer.pull()

    def _follow(self, key: str) -> None:
        trainer = self._trainer
        rate = learning_rate(trainer.optimizer)
        stop = bool(self.model.stop_training) or trainer.ctx.stop_asked
        state = self._before.data.state() if trainer.ctx.num_workers > 1 else None
        own = Decision(trainer.ctx.is_chief, stop, rate, trainer.assigned, state)
        trainer.assigned = False
        answers = trainer.workers.rendezvous(key, msgspec.msgpack.encode(own))
        decision = _leading(_by_rank(answers, Decision)) or own
        self.model.stop_training = decision.stop
        if decision.learning_rate is not None and decision.learning_rate != rate:
            optimizers.unwrap(trainer.optimizer).learning_rate = decision.learning_rate
        if decision.assigned:
            trainer.pull()


def _leading(decisions: Mapping[int, Decision]) -> Decision | None:
    """Return the chief's, or if it was lost the lowest rank's; None: no worker has decided.

    All workers that read these, also a chief that returns, follow the same one.
    """
    decided = [each for _, each in sorted(decisions.items()) if not each.joins]
    return next((each for each in decided if each.chief), next(iter(decided), None))


def combine(reports: Iterable[Report]) -> dict[str, float]:
    """Return the means of the workers' logs, weighted by rows.

    It is for logs that no MetricStates has.
    """
    weighted: dict[str, list[tuple[float, int]]] = {}
    for report in reports:
        for name, value in report.logs.items():
            weight = report.val_rows if name.startswith("val_") else report.rows
            if weight:
                weighted.setdefault(name, []).append((value, weight))
    return {
        name: sum(value * weight for value, weight in values) / sum(w for _, w in values)
        for name, values in weighted.items()
    }


def numbers_in(logs: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield name and value of the logs that are numbers."""
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):  # a log may be anything; numbers combine
            yield name, float(value)


def _by_rank(answers: Mapping[int, bytes], kind: type[Any]) -> dict[int, Any]:
    return {rank: msgspec.msgpack.decode(value, type=kind) for rank, value in answers.items()}
