"""Training of one model against the parameter servers: the order of the parts of a step.

Covers: the parts of a step (rows, compute, send or refuse), when the model attaches, what waits for
pushes in flight, the batches that are prepared ahead.
Does not: compute (tfos.keras.step.gradients), send or receive (tfos.keras.step.exchange), look for
values that the program gave (tfos.keras.step.exchange.given_values), hook into Keras
(tfos.keras.fit), report times (tfos.keras.fit.progress).
Threads: the thread that runs the model's `fit`; no locks. Another thread that reads the times may
miss the last part.

With pipeline=k, while `fit` runs, a step's push is in flight during the next k steps: when step n
is computed, the variables contain this worker's pushes up to step n-k-1. Everything but a step
first waits for the pushes in flight (`drain`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfos.errors import RequestTimeout, UnsupportedModel
from tfos.keras import lookup_errors
from tfos.keras.data import tensors
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.embedding.batch_rows import BatchRows
from tfos.keras.embedding.loading import load_layer_rows
from tfos.keras.protocols import WorkerContext
from tfos.keras.step import attach, nonfinite, optimizers, table_specs, variables
from tfos.keras.step.adapted_layers import AdaptedRecord
from tfos.keras.step.exchange import outgoing_push
from tfos.keras.step.exchange.exchange import ParameterExchange
from tfos.keras.step.exchange.given_values import GivenValues
from tfos.keras.step.exchange.outgoing_push import OutgoingPush
from tfos.keras.step.first_batch import FirstBatch, first_rows
from tfos.keras.step.gradients.gradient_step import GradientStep, StepOutput
from tfos.keras.step.lookahead import Lookahead, TrainingData
from tfos.keras.step.other_workers import OtherWorkers, waited_too_long
from tfos.keras.step.positions import DataPositions
from tfos.keras.step.settings import Settings
from tfos.keras.step.step_clock import StepClock
from tfos.keras.step.tables import IdCounts, ServerRows, TableArrays, TableTraining

logger = logging.getLogger(__name__)

BARRIER_TIMEOUT_S = 600.0
"""Seconds for the slowest worker's next batch (sync, ssp, hybrid), pauses of its feed included; a
program may set more."""


@dataclass(frozen=True, slots=True)
class AttachedModel:
    """Parts of a model whose parameters live on the servers."""

    variables: variables.Variables
    step: GradientStep
    tables: TableTraining
    exchange: ParameterExchange
    given: GivenValues


class PSTrainer:
    """Runs one model's steps and keeps its variables equal to the servers' parameters.

    Args:
        model: the compiled model; it attaches once it is built.
        ctx: the worker's context.
        settings: settings of `ctx.distribute`.

    Attributes:
        skipped_steps: number of steps whose gradient was not finite and was not sent.
        assigned: whether this chief has put values of its own on the servers, and the other workers
            do not know it yet.
        awaits_callbacks: whether a `fit` was called whose callbacks do not know yet that it begins.
        is_between_epochs: whether nobody trains, and the variables are the servers' newest or what
            callbacks have made of them, which must not be overwritten.
        has_left_fit: whether the last `fit` was aborted.
        begin_validation: function that the running `fit` calls before it validates.
        times: clock of the parts of this worker's steps.
        positions: record of the data positions.
        workers: the other workers.
        first_batch: agreement on the batch from which an unbuilt model is built.
    """

    def __init__(self, model: Any, ctx: WorkerContext, settings: Settings) -> None:
        self.model = model
        self.ctx = ctx
        self.settings = settings
        self.optimizer = model.optimizer
        self._compiled = _compiled(model)
        self.client = ctx.ps_client()
        self.skipped_steps = 0
        self.assigned = False
        self.awaits_callbacks = False
        self.is_between_epochs = False
        self.has_left_fit = False
        self.begin_validation: Callable[[], None] | None = None
        self.times = StepClock()
        self.positions = DataPositions(ctx, self.client)
        self.workers = OtherWorkers(self.client, ctx)
        self.first_batch = FirstBatch(self.workers)
        self._adapted = AdaptedRecord(ctx, self.client, model)
        self._awaits_batch = not tensors.is_built(model)
        """Whether the workers have yet to agree on a batch to build the model from. A worker that
        has already taken trained values still comes there: the others wait for it."""
        self._attached: AttachedModel | None = None
        self._batches: Lookahead | None = None
        self._most_in_flight = 0
        self._fitting_thread: int | None = None
        self._is_behind = False
        """Whether a step or a fit was aborted, so that the servers may have newer values."""
        self._updates_found = 0
        """Number of the servers' updates before this process; 0 once an epoch has ended here."""

    @property
    def is_local(self) -> bool:
        """Whether the servers are in this process, for this model alone."""
        return getattr(self.ctx, "is_local", False)

    @property
    def _since(self) -> str:
        """The call that bound the model to its servers, for messages."""
        return "the first fit" if self.is_local else "ctx.distribute(model)"

    @property
    def has_tables(self) -> bool:
        """Whether the model has Embeddings, whose rows the servers hold."""
        return bool(table_specs.embeddings_of(self.model))

    @property
    def has_trained_rows(self) -> bool:
        """Whether this worker has trained rows of tables, which no variable of the model holds."""
        return self._attached is not None and self._attached.exchange.has_trained_rows

    @property
    def was_trained_before(self) -> bool:
        """Whether the servers' values come from steps before this process, which has done none.

        A program that runs again begins as it did the first time, with the same weights.
        """
        return self._updates_found > 0 and self.steps == 0

    @property
    def pipeline(self) -> int:
        """Number of pushes in flight while `fit` computes."""
        return self.settings.pushes_in_flight(
            has_tables=self.has_tables, damps_itself=optimizers.damps_itself(self.optimizer)
        )

    def batches_under_way(self) -> int:
        """Return for how many of the last batches the servers may lack the gradients.

        These are batches of pushes in flight and of an incomplete sum, with skipped ones among and
        after them.
        """
        return 0 if self._attached is None else self._attached.exchange.batches_under_way

    @property
    def waits(self) -> bool:
        """Whether workers wait for each other's pushes."""
        return self.settings.consistency != "async"

    @property
    def fits(self) -> bool:
        """Whether a `fit` runs."""
        return self._fitting_thread is not None

    @property
    def fits_elsewhere(self) -> bool:
        """Whether another thread runs `fit`, which keeps the variables up to date."""
        return self._fitting_thread not in (None, threading.get_ident())

    # -- how far it is

    @property
    def attached(self) -> bool:
        """Whether the parameters already live on the servers."""
        return self._attached is not None

    @property
    def steps(self) -> int:
        """Number of this worker's pushes that the servers have acknowledged."""
        return 0 if self._attached is None else self._attached.exchange.steps

    @property
    def rows(self) -> int:
        """Number of rows in those pushes, and in batches that are only accumulated so far."""
        return 0 if self._attached is None else self._attached.exchange.rows

    @property
    def clock(self) -> int:
        """Number of the servers' updates that the local variables contain."""
        return 0 if self._attached is None else self._attached.exchange.clock

    @property
    def batch_spec(self) -> Any:
        """Nested specs of a batch that was trained on; None: there was none."""
        return None if self._attached is None else self._attached.step.batch_spec

    @property
    def id_counts(self) -> dict[str, IdCounts]:
        """Counts of the ids in this worker's batches so far, by table; any thread may read them."""
        return {} if self._attached is None else self._attached.tables.id_counts.copy()

    # -- beginning

    def attach(self, *, seeds: bool) -> None:
        """Bind the built model to the servers and take their values.

        Args:
            seeds: whether this worker's values fill empty servers.
        """
        model, client = self.model, self.client
        found = variables.collect(model, self.optimizer)
        save = self.ctx.save_now
        before = attach.attach(client, model, found, self.settings, seeds=seeds, save=save)
        if not self.is_local:  # a model without a cluster is adapted again like any of Keras
            self._adapted.attached()
        attach.draw_apart(model, self.ctx.worker_rank)
        ctx = self.ctx
        client.timeout_s = max(client.timeout_s, attach.push_s(client, ctx.num_workers))
        if self.waits:
            client.timeout_s = max(client.timeout_s, BARRIER_TIMEOUT_S)
            self.workers.attached()
        load_layer_rows(found.embeddings, client, is_chief=ctx.is_chief, save=ctx.save_now)
        step = GradientStep(
            model,
            found,
            clips_here=not self.settings.has_barrier,
            skips=self.settings.on_nonfinite == "skip",
        )
        exchange = ParameterExchange(client, model, found, self.times)
        tables = TableTraining(
            found.embeddings,
            step,
            ServerRows(client, ctx),
            jit_compile=bool(model.jit_compile),
            batches_per_push=optimizers.batches_per_update(self.optimizer),
        )
        given = GivenValues(
            found,
            exchange,
            tables,
            since=self._since,
            is_local=self.is_local,
            is_mixed=ctx.num_workers > 1 and not self.settings.has_barrier,
        )
        self._attached = AttachedModel(found, step, tables, exchange, given)
        self.pull(attach.limit_s(client))  # all workers do so now, from the same servers
        # Others may push while the chief attaches; that is no reason to drop its first values.
        self._updates_found = self.clock if before is None else before

    def attach_if_filled(self, x: Any = None) -> bool:
        """Attach a model that no batch has attached here, if the servers are already filled.

        Args:
            x: rows to build it from, if necessary; see first_batch.first_rows.

        Returns:
            False if the servers have values but the model has no variables for them.
        """
        if self.attached or not self.client.is_filled():
            return True
        if not tensors.is_built(self.model) and (rows := first_rows(x)) is not None:
            tensors.build(self.model, tensors.describe(rows))
        if not tensors.is_built(self.model):
            return False
        self.attach(seeds=self.ctx.is_chief)
        return True

    def attach_without_batch(self) -> None:
        """Attach at the end of an epoch without rows, if any worker had a batch; once an epoch."""
        if self._awaits_batch:
            self._attach_like(self.first_batch.agree_without())

    def _attach_like(self, described: bytes | None) -> None:
        if described is not None:
            tensors.build(self.model, described)
            if not self.attached:
                self.attach(seeds=self.ctx.is_chief)
            self._awaits_batch = False

    def check_unchanged(self) -> None:
        """Refuse a model that was compiled again or whose variables changed."""
        since = self._since
        place = "as a new model" if self.is_local else "in a cluster of its own"
        before, now = (
            (self.optimizer, *self._compiled),
            (self.model.optimizer, *_compiled(self.model)),
        )
        if any(map(operator.is_not, now, before)):
            raise UnsupportedModel(
                f"the model was compiled again after {since}, but the parameter servers run the "
                "rule of the previous optimizer, and the step has the previous loss and metrics. "
                "Compile once, before that; model.optimizer.learning_rate may be assigned at any "
                "time. To go on with another loss or optimizer, or with other layers frozen, save "
                f"the model, load it, change and compile it, and train it {place}"
            )
        if self._attached is not None:
            self._attached.variables.check_unchanged(self.model, since, place)

    # -- steps

    def batches(self, iterator: Iterator[Any]) -> Lookahead:
        """Return the batches of an iterator that Keras trains on."""
        if self._batches is None or self._batches.iterator is not iterator:
            self._batches = Lookahead(iterator)
        return self._batches

    @contextlib.contextmanager
    def apart_from_fit(self) -> Iterator[None]:
        """Train batches of an iterator other than that of a running `fit`, which keeps its own.

        Rows that were asked for ahead are asked for again: the block changes them.
        """
        own, self._batches = self._batches, None
        awaits, self.awaits_callbacks = self.awaits_callbacks, False
        if own is not None and self._attached is not None:
            self.drain()
            own.set_back(self._attached.tables.set_back)
        try:
            yield
        finally:
            self._batches = own
            self.awaits_callbacks = awaits

    def train(self, batch: TrainingData, batches: Lookahead) -> Any:
        """Run one step on a batch and exchange its result; return the step's logs.

        Args:
            batch: batch taken from `batches`.
            batches: batches after it, whose table rows are requested early.

        Raises:
            NonFiniteGradient: with on_nonfinite="error"; nothing was sent.
            PSError: the push of this step, or with a pipeline that of an earlier one, failed.
        """
        try:
            return self._train(batch, batches)
        except BaseException as error:
            self._forget_batches(batch)
            self._is_behind = True
            if isinstance(error, RequestTimeout) and "missing" in error.details:
                raise waited_too_long(error, self.client.timeout_s) from error
            raise

    def check_given_values(self) -> None:
        """Refuse values that a callback, or the program, gave to single variables.

        Raises:
            UnsupportedModel: the text names a variable, and how to reach the servers; or the rows
                of an Embedding are another model's now.
        """
        if self._attached is not None:
            self._attached.given.check_call()

    def _train(self, batch: TrainingData, batches: Lookahead) -> Any:
        data = batch.values
        if self._awaits_batch:
            self._attach_like(self.first_batch.agree(tensors.describe(data)))
        if self._attached is None:
            raise RuntimeError("attach() left the model without a step")
        attached = self._attached
        tables, exchange = attached.tables, attached.exchange
        self.workers.join()
        exchange.raise_failed()
        attached.given.tell_mixed()
        exchange.begin_step()
        with self.times.on("lookup"):
            # A batch that is only accumulated, or skipped, has not waited for a push.
            while batch.rows is not None and batch.rows.are_on_their_way and exchange.num_in_flight:
                exchange.adopt_oldest()
            table_rows = tables.rows_of(batch)
        with self.times.on("compute"), lookup_errors.typed_errors():
            output = attached.step(data, table_rows)
            is_finite = bool(output.finite)
            is_complete = not attached.step.accumulates or bool(output.complete)
        num_rows = tensors.num_rows(data)
        if not is_finite:
            self._refuse(attached, output, num_rows, table_rows)
        elif is_complete:
            gradients = tables.gradients(table_rows, output)
            ahead = tables.ahead(batches, self._most_in_flight)
            with self.times.on("push"):
                self._push(attached, output, num_rows, (gradients, ahead))
        else:
            tables.keep(table_rows, output)
            exchange.accumulate(num_rows)
        return output.logs

    def _push(
        self,
        attached: AttachedModel,
        output: StepOutput,
        num_rows: int,
        tables: tuple[TableArrays, BatchRows | None],
    ) -> None:
        own = attached.variables
        is_sync = self.settings.consistency == "sync"
        push = OutgoingPush(
            grads=outgoing_push.arrays_by_group(own, output),
            hyper=outgoing_push.hyper_of(own, output, is_sync=is_sync),
            rows=num_rows,
            metadata=self.positions.for_push(),
            table_grads=tables[0],
            ahead=tables[1],
        )
        attached.exchange.push(push, most_in_flight=self._most_in_flight)

    def _refuse(
        self, attached: AttachedModel, output: StepOutput, num_rows: int, rows: BatchRows | None
    ) -> None:
        """Handle a step whose gradient is not finite; none of it is sent."""
        step, tables = attached.step, attached.tables
        if self.settings.on_nonfinite == "error" and not step.skips_nonfinite:
            worst = nonfinite.worst_value(attached.variables, output, tables, rows)
            where = f"worker:{self.ctx.worker_rank}, step {self.steps + 1} of this worker"
            raise nonfinite.error_of(worst, num_rows=num_rows, where=where)
        self.skipped_steps += 1
        if self.waits and not step.accumulates:
            attached.exchange.push_nothing()
        attached.exchange.skip()
        tables.drop(rows)

    @contextlib.contextmanager
    def pipelining(self) -> Iterator[None]:
        """Allow the pushes in flight that `distribute` was given; none is left after the block."""
        self._most_in_flight = self.pipeline
        self._fitting_thread = threading.get_ident()
        self.awaits_callbacks = True
        try:
            yield
            self.drain()
        except BaseException:
            self._is_behind = True  # nobody took the values of pushes that may be acknowledged
            with contextlib.suppress(Exception):  # the error that ended the block matters
                self.drain()
            raise
        finally:
            self._most_in_flight = 0
            self.awaits_callbacks = False
            if self._attached is not None:
                self._attached.exchange.forget()
            self._forget_batches()
            self._fitting_thread = None

    def _forget_batches(self, running: TrainingData | None = None) -> None:
        """Give up what was prepared for batches that will be trained later, or not at all."""
        batches, self._batches = self._batches, None
        if self._attached is not None:
            drop = self._attached.tables.drop
            if running is not None:
                drop(running.rows)
            if batches is not None:
                batches.set_back(drop)

    def end_fit(self) -> None:
        """Forget the state of the `fit` that has ended, however it ended."""
        self.is_between_epochs = False
        self._check_next_calls()
        self.positions.forget()
        self.begin_validation = None

    # -- values outside of steps

    def drain(self) -> None:
        """Wait until the servers have acknowledged every push; the variables stay as they are."""
        if self._attached is not None:
            self._attached.exchange.drain()

    def pull(self, timeout_s: float | None = None, *, keeps_statistics: bool = True) -> None:
        """Take the servers' newest values, and their averages if it keeps any.

        Rows that were asked for ahead are asked for again.

        Args:
            timeout_s: seconds to wait for the values; None: the client's timeout.
            keeps_statistics: whether statistics may keep the batches of an incomplete sum.
        """
        self.attach_if_filled()
        if self._attached is not None:
            self.drain()
            if self._batches is not None:
                self._batches.set_back(self._attached.tables.set_back)
            if self._is_behind:
                self._attached.given.tell_lost()
            # Those of a step that failed may be NaN; those of several workers must not differ.
            keeps_statistics &= not self._is_behind and self.ctx.num_workers == 1
            self._attached.exchange.pull(timeout_s, keeps_statistics=keeps_statistics)
            self._is_behind = False

    def pull_newest(self, *, is_checked: bool = True, x: Any = None) -> None:
        """Pull, unless the variables are the servers' newest or another thread's fit has them.

        Args:
            is_checked: whether to refuse values that the program gave to single variables; values
                that another model with the same layers has trained are always refused.
            x: rows to build the model from, as for `attach_if_filled`.

        Raises:
            UnsupportedModel: the program gave such values, and the text says how to reach the
                servers; or the servers have trained values for which the model has no variables. If
                a fit runs, which would create them, it only warns.
        """
        if is_checked or self._shares_given_layers():
            self._check_values()
        if self.is_between_epochs or self.fits_elsewhere:
            return
        if self._attached is not None:
            self._attached.given.tell_statistic()
            self.pull()
        elif not self.attach_if_filled(x) and not isinstance(x, BatchDataset):  # it has no rows
            told = (
                f"the model {self.model.name!r} has no weights yet and has trained no batch here, "
                "so it would answer without the trained parameters that the servers hold. Give "
                "it a keras.Input, or call it once, model(x[:1]), before ctx.distribute(model)"
            )
            if not self.fits:
                raise UnsupportedModel(told)
            logger.warning(told)

    def pull_for_fit(self) -> None:
        """Pull what all workers begin a fit with; tell what the program has changed since."""
        if self._attached is not None:
            self._attached.given.tell_statistic()
        self.pull()

    def _shares_given_layers(self) -> bool:
        """Whether another model has since trained with an Embedding of this one."""
        return self._attached is not None and self._attached.tables.given_away() is not None

    def catch_up(self) -> None:
        """Take the servers' values if the previous training was aborted."""
        if self._is_behind:
            self.pull()

    def begin_fit(self) -> None:
        """Begin with the servers' values; refuse those that the program gave to single variables.

        Raises:
            UnsupportedModel: the text names a variable, and how to reach the servers; or the model
                was compiled again; or the rows of an Embedding are another model's now.
            VariablesChanged: the trainable variables are not the previous ones.
            SettingsError: a layer has learned another vocabulary or other bins since.
        """
        self.check_unchanged()
        self._adapted.begin_fit()
        has_left, self.has_left_fit = self.has_left_fit, False
        if has_left and self.ctx.num_workers > 1:
            logger.warning(
                "the previous fit was aborted on worker:%d. The other workers must leave theirs, "
                "too: a worker that is still in it waits for this one at the end of its epoch, "
                "and this one waits for it at the beginning of fit. Make what ends fit on one "
                "worker end it on all, or let main_fun raise it",
                self.ctx.worker_rank,
            )
        self.catch_up()
        if self._attached is not None:
            self._attached.given.check_with_rows()

    def _check_values(self) -> None:
        # Callbacks of a fit may have values of their own; after an aborted one the servers' count.
        if self._attached is not None and not (self.fits or self._is_behind):
            self._attached.given.check()

    def assign(self) -> None:
        """Put the model's current values on the servers; only the chief's count.

        Raises:
            UnsupportedModel: weights that are not trained have changed.
        """
        if self._attached is None:
            return
        self._attached.given.accept()
        if self.ctx.is_chief:
            self._attached.exchange.assign()
            self.assigned = True

    def keep_trained(self, name: str) -> None:
        """Take the servers' values instead of those that the program has begun with.

        Args:
            name: name of the method that has given the model its values.

        Raises:
            UnsupportedModel: weights that are not trained differ from those on the servers.
        """
        if self._attached is None:
            return
        self._attached.given.accept()
        self.pull(keeps_statistics=False)  # they are the program's
        if self.ctx.is_chief:  # what other workers set never reaches the servers
            self._attached.given.tell_kept(name, self._updates_found)

    def begin_epoch(self) -> None:
        """Note that the variables are trained again."""
        self.is_between_epochs = False
        self._check_next_calls()
        self.first_batch.begin_epoch()

    def _check_next_calls(self) -> None:
        if self._attached is not None:
            self._attached.given.check_next_calls()

    def tell_changed(self) -> None:
        """Warn of values that callbacks gave to single variables: a pull is to replace them."""
        if self._attached is not None:
            self._attached.given.tell_changed()

    def end_epoch(self) -> None:
        """Note that what the program sets from now on belongs to its own training."""
        self._updates_found = 0

    def pull_averages(self) -> None:
        """Undo what a callback has swapped: Keras is about to end `fit` with the averages."""
        if self._attached is not None and self._attached.exchange.keeps_averages:
            self.pull()

    def finalize(self) -> None:
        """Make the averages, which the model has at the end of `fit`, the servers' values too."""
        if self._attached is not None and self._attached.exchange.keeps_averages:
            self.assign()


def _compiled(model: Any) -> tuple[Any, ...]:
    """Return what each `compile` replaces and a compiled step contains."""
    return model._compile_loss, model._compile_metrics, model._loss_tracker
