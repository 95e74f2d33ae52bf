"""Training of one model against the parameter servers: push and pull around each compiled step.

Covers: seeding or adopting the parameters, push_pull around a step or beside the next ones, pull,
assign, non-finite steps, membership of the sync barrier, rendezvous of the workers.
Does not: compute (tfos.keras.step.gradients), hook into Keras (tfos.keras.fit), retry or
reconnect (PSClient), own the thread that sends beside the next steps (pipeline), report times
(tfos.keras.fit.callbacks).
Threads: the thread that runs the model's `fit`; no locks. Another thread that reads the times may
miss the last part.

With pipeline=k, while `fit` runs, a step's push is in flight during the next k steps: when step n
is computed, the variables contain this worker's pushes up to step n-k-1. Everything but a step
first waits for the pushes in flight (`drain`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ps.client.retry import READY_TIMEOUT_S
from ps.errors import NonFiniteGradient
from ps.manifest.manifest import Hyper
from ps.metadata import AttachedMetadata
from tfos.errors import UnsupportedModel
from tfos.keras.data import tensors
from tfos.keras.embedding import dense_embeddings
from tfos.keras.embedding.batch_rows import BatchRows, first_bad_row
from tfos.keras.embedding.loading import load_file_rows
from tfos.keras.protocols import WorkerContext
from tfos.keras.step import optimizers, table_specs, variables
from tfos.keras.step.attach import adopt_frozen, check_same, with_buckets
from tfos.keras.step.gradients.gradient_step import MAX_DENSIFIED_BYTES, GradientStep, StepOutput
from tfos.keras.step.lookahead import Lookahead, TrainingData
from tfos.keras.step.pipeline import InFlight
from tfos.keras.step.positions import DataPositions
from tfos.keras.step.replica import Averages, Received, Replica
from tfos.keras.step.settings import Settings
from tfos.keras.step.step_clock import StepClock
from tfos.keras.step.tables import IdCounts, TableArrays, TableTraining

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = READY_TIMEOUT_S + 600.0
"""For the chief to seed the servers: its imports, its data, its first batch, and then the wait for
the servers' kernels."""
RENDEZVOUS_TIMEOUT_S = 86_400.0
"""For the slowest worker's epoch. A worker that dies or finishes is not waited for."""

BARRIER_TIMEOUT_S = 600.0
"""Sync, ssp: for the slowest worker's next batch; as long as a feed may stand still."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingPush:
    """What a step sends."""

    grads: dict[str, Array | list[Array]]
    """By group the flat gradient, or its parts, or the statistics: [num_elements]."""
    hyper: Hyper
    newest_rows: int
    """Rows of this batch."""
    rows: int
    """Rows of this batch and of those accumulated before it."""
    lag: int
    metadata: AttachedMetadata | None
    table_grads: TableArrays
    ahead: BatchRows | None
    """Filled by the answer."""


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """A push that the servers have acknowledged, and the values that came back."""

    received: Received
    clock: int
    rows: int


class PSTrainer:
    """Keeps one model's variables and the servers' parameters together.

    Args:
        model: compiled and built.
        ctx: the worker's context.
        settings: of `ctx.distribute`.

    Attributes:
        steps: pushes of this worker that the servers have acknowledged.
        rows: rows in those, and in batches that are only accumulated so far.
        skipped_steps: steps whose gradient was not finite and was not sent.
        clock: updates of the servers that the local variables contain.
        is_between_epochs: nobody trains, and the variables are the servers' newest or what
            callbacks have made of them, which is not to be overwritten.
        begin_validation: what the running `fit` does before it validates.
        times: where this worker's time goes.
        positions: notes of the data positions.
    """

    def __init__(self, model: Any, ctx: WorkerContext, settings: Settings) -> None:
        self.model = model
        self.ctx = ctx
        self.settings = settings
        self.optimizer = model.optimizer
        self.steps = 0
        self.rows = 0
        self.skipped_steps = 0
        self.clock = 0
        self.times = StepClock()
        self._rows_waiting = 0
        self.assigned = False
        self.is_between_epochs = False
        self.begin_validation: Callable[[], None] | None = None
        self._client = ctx.ps_client()
        self._member = True
        self._num_builds = 0
        self._asked_this_epoch = False
        self._variables: variables.Variables | None = None
        self._step: GradientStep | None = None
        self._replica: Replica | None = None
        self._averages: Averages | None = None
        self._tables: TableTraining | None = None
        self._batches: Lookahead | None = None
        self._in_flight: InFlight[AppliedPush] = InFlight(lambda: self._client.timeout_s)
        self._most_in_flight = 0
        self._fitting_thread: int | None = None
        self.positions = DataPositions(ctx, self._client)

    @property
    def client(self) -> Any:
        """The process's PSClient."""
        return self._client

    @property
    def is_local(self) -> bool:
        """Whether the servers are in this process, for this model alone."""
        return getattr(self.ctx, "is_local", False)

    @property
    def has_tables(self) -> bool:
        """Whether the model has Embeddings, whose rows the servers hold."""
        return bool(table_specs.embeddings_of(self.model))

    @property
    def pipeline(self) -> int:
        """Pushes that are in flight while `fit` computes."""
        return self.settings.pushes_in_flight(
            has_tables=self.has_tables, damps_itself=optimizers.damps_itself(self.optimizer)
        )

    @property
    def batch_spec(self) -> Any:
        """Nested specs of a batch that was trained on; None: there was none."""
        return None if self._step is None else self._step.batch_spec

    @property
    def fits_elsewhere(self) -> bool:
        """Whether another thread runs `fit`, which keeps the variables new."""
        return self._fitting_thread not in (None, threading.get_ident())

    @property
    def id_counts(self) -> dict[str, IdCounts]:
        """By table the ids of this worker's batches so far; any thread may read it."""
        return {} if self._tables is None else self._tables.id_counts.copy()

    @property
    def attached(self) -> bool:
        """Whether the parameters live on the servers by now."""
        return self._step is not None

    @property
    def sync(self) -> bool:
        """Whether every push waits at a barrier."""
        return self.settings.consistency == "sync"

    @property
    def waits(self) -> bool:
        """Whether workers wait for each other's pushes."""
        return self.settings.consistency != "async"

    # -- beginning

    def attach(self, *, seeds: bool) -> None:
        """Bind the built model to the servers and take their values.

        Args:
            seeds: whether this worker's values fill empty servers.
        """
        found = variables.collect(self.model, self.optimizer)
        settings = self.settings
        manifest = found.manifest(
            self.optimizer,
            consistency=settings.consistency,
            reduction=settings.reduction,
            staleness_bound=settings.bound_for(optimizers.batches_per_update(self.optimizer)),
            staleness_aware=settings.divides_by_staleness(
                damps_itself=optimizers.damps_itself(self.optimizer)
            ),
            compression=settings.compression,
        )
        if seeds:
            dense_embeddings.warn_of_large(self.model, MAX_DENSIFIED_BYTES)
            groups = (*found.groups, *found.frozen)
            manifest = with_buckets(manifest, self._client)
            self._client.seed(manifest, {group.name: group.values() for group in groups})
        adopted = self._client.attach(timeout_s=ATTACH_TIMEOUT_S)
        check_same(manifest, adopted)
        manifest = msgspec.structs.replace(manifest, bucket_bytes=adopted.bucket_bytes)
        adopt_frozen(self._client, manifest, found.frozen, timeout_s=ATTACH_TIMEOUT_S)
        if self.waits:
            self._client.timeout_s = max(self._client.timeout_s, BARRIER_TIMEOUT_S)
        load_file_rows(found.embeddings, self._client, is_chief=self.ctx.is_chief)
        self._variables = found
        self._replica = Replica(found.groups, self.optimizer)
        self._step = GradientStep(
            self.model,
            found,
            clips_here=not settings.has_barrier,
            skips=settings.on_nonfinite == "skip",
        )
        if optimizers.keeps_averages(self.optimizer):
            self._averages = Averages(self.model, found.groups)
        self._tables = TableTraining(
            found.embeddings,
            self._step,
            self._client,
            jit_compile=bool(self.model.jit_compile),
            batches_per_push=optimizers.batches_per_update(self.optimizer),
        )
        self.pull()

    def attach_unbuilt(self, data: Any = None) -> None:
        """Build the model as the workers' first batches ask for, then attach.

        Every unbuilt worker comes here once an epoch until anybody has had a batch: with its first
        batch, or with None at the end of an epoch without one. So all build and attach at the same
        point, and the chief can seed even if it has no rows.
        """
        self._num_builds += 1
        own = b"" if data is None else tensors.describe(data)
        answers = self.rendezvous(f"build/{self._num_builds}", own)
        described = next((answers[rank] for rank in sorted(answers) if answers[rank]), None)
        if described is not None:
            tensors.build(self.model, described)
            self.attach(seeds=self.ctx.is_chief)

    def typed_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raise errors of lookups inside of evaluate and predict as what they are."""
        return contextlib.nullcontext() if self._tables is None else self._tables.typed_errors()

    def begin_epoch(self) -> None:
        """Forget that this epoch's question for a batch to build from was asked."""
        self._asked_this_epoch = False

    def attach_without_batch(self) -> None:
        """Attach at the end of an epoch without rows, if any worker had a batch; once an epoch."""
        if not self.attached and not self._asked_this_epoch:
            self._asked_this_epoch = True
            self.attach_unbuilt()

    # -- steps

    def batches(self, iterator: Iterator[Any]) -> Lookahead:
        """Return the batches of an iterator that Keras trains on."""
        if self._batches is None or self._batches.iterator is not iterator:
            self._batches = Lookahead(iterator)
        return self._batches

    @contextlib.contextmanager
    def apart_from_fit(self) -> Iterator[None]:
        """Train batches of another iterator than that of a running `fit`, which keeps its own.

        Rows that were asked for ahead are asked for again: the block changes them.
        """
        own, self._batches = self._batches, None
        if own is not None and self._tables is not None:
            self.drain()
            own.set_back(self._tables.set_back)
        try:
            yield
        finally:
            self._batches = own

    def train(self, batch: TrainingData, batches: Lookahead) -> Any:
        """Run one step on a batch and exchange its result; returns the step's logs.

        Args:
            batch: taken from `batches`.
            batches: those after it; rows of tables are asked for early.

        Raises:
            NonFiniteGradient: with on_nonfinite="error"; nothing was sent.
            PSError: this step's push, or with a pipeline one of the steps before, failed.
        """
        try:
            return self._train(batch, batches)
        except BaseException:
            self._forget_batches(batch)
            raise

    def _train(self, batch: TrainingData, batches: Lookahead) -> Any:
        data = batch.values
        if self._step is None:
            self.attach_unbuilt(data)
        if self._step is None or self._tables is None:
            raise RuntimeError("attach() left the model without a step")
        self.join()
        self._in_flight.raise_failed()
        with self.times.on("lookup"):
            # A batch that is only accumulated, or skipped, has not waited for a push.
            while batch.rows is not None and batch.rows.are_on_their_way and self._in_flight:
                self._adopt_oldest()
            table_rows = self._tables.rows_of(batch)
        with self.times.on("compute"), self._tables.typed_errors():
            output = self._step(data, table_rows)
            is_finite, is_complete = bool(output.finite), bool(output.complete)
        rows = tensors.num_rows(data)
        if not is_finite:
            self._refuse(output, rows, table_rows)
            self._tables.drop(table_rows)
        elif is_complete:
            gradients = self._tables.gradients(table_rows, output)
            ahead = self._tables.ahead(batches, self._most_in_flight)
            with self.times.on("push"):
                self._push(output, rows, (gradients, ahead))
        else:
            self._tables.keep(table_rows, output)
            self._rows_waiting += rows
            self.rows += rows
        return output.logs

    @contextlib.contextmanager
    def pipelining(self) -> Iterator[None]:
        """Let pushes be in flight, as `distribute` was asked; none is when the block has ended."""
        self._most_in_flight = self.pipeline
        self._fitting_thread = threading.get_ident()
        try:
            yield
            self.drain()
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the block is the news
                self.drain()
            raise
        finally:
            self._most_in_flight = 0
            self._in_flight.close()
            self._forget_batches()
            self._fitting_thread = None

    def _forget_batches(self, running: TrainingData | None = None) -> None:
        """Give up what was prepared for batches that will not be trained now, or not at all."""
        batches, self._batches = self._batches, None
        if self._tables is not None:
            if running is not None:
                self._tables.drop(running.rows)
            if batches is not None:
                batches.set_back(self._tables.drop)

    def drain(self) -> None:
        """Wait until the servers have acknowledged every push; the variables stay as they are."""
        while self._in_flight:
            self._give_back(self._in_flight.oldest())

    def pull(self) -> None:
        """Take the servers' newest values, and their averages if it keeps any.

        Rows that were asked for ahead are asked for again.
        """
        if self._replica is not None:
            self.drain()
            if self._batches is not None and self._tables is not None:
                self._batches.set_back(self._tables.set_back)
            received = self._replica.take()
            with self.times.on("pull"):
                self.clock = self._client.pull(received.arrays).clock
            self._replica.adopt(received, self.clock)
            self._replica.give(received)
        if self._averages is not None:
            self._averages.pull(self._client)

    def finalize(self) -> None:
        """Let the averages, which the model has at the end of `fit`, be the servers' values too."""
        if self._averages is not None:
            self.assign()

    def assign(self) -> None:
        """Put the model's present values on the servers; only the chief's count."""
        if self._variables is not None and self.ctx.is_chief:
            self.drain()
            self._client.assign({group.name: group.values() for group in self._variables.groups})
            self.assigned = True

    def check_unchanged(self) -> None:
        """Refuse a model that was compiled again or whose variables changed."""
        since = "its first fit" if self.is_local else "ctx.distribute(model)"
        if self.model.optimizer is not self.optimizer:
            raise UnsupportedModel(
                f"the model was compiled again after {since}, so its optimizer is not the one "
                "whose rule the parameter servers run; compile once, before it. "
                "model.optimizer.learning_rate may be assigned at any time"
            )
        if self._variables is not None:
            self._variables.check_unchanged(self.model, since)

    def _hyper(self, output: StepOutput) -> Hyper:
        values = [float(value) for value in output.scalars.numpy()]
        if not self.sync or len(values) == 1 or self._variables is None:
            # async: the servers count each bucket's updates themselves, also those of others
            return Hyper(learning_rate=values[0])
        names = [group.name for group in self._variables.trainable]
        scalars: dict[str, tuple[float, ...]] = {
            name: (alpha,) for name, alpha in zip(names, values[1:], strict=False)
        }
        for layer in self._variables.embeddings:
            settings = layer.settings
            if settings.rule is None and not settings.row_steps:
                scalars[layer.table] = (values[-1] * settings.learning_rate_multiplier,)
        return Hyper(learning_rate=values[0], scalars=scalars)

    def _push(
        self, output: StepOutput, rows: int, tables: tuple[TableArrays, BatchRows | None]
    ) -> None:
        variables, replica = self._bound()
        pushed: dict[str, Array | list[Array]] = {
            group.name: list(map(_array, parts))
            for group, parts in zip(variables.trainable, output.gradients, strict=True)
        }
        for group, flat in zip(variables.statistics, output.statistics, strict=True):
            pushed[group.name] = _array(flat)
        push = OutgoingPush(
            grads=pushed,
            hyper=self._hyper(output),
            newest_rows=rows,
            rows=rows + self._rows_waiting,
            lag=len(self._in_flight),
            metadata=self.positions.for_push(),
            table_grads=tables[0],
            ahead=tables[1],
        )
        self._rows_waiting = 0
        send = functools.partial(self._send, push, replica.take())
        if not self._most_in_flight:
            applied = send()
            replica.adopt(applied.received, applied.clock)
            self._give_back(applied)
            return
        if push.ahead is not None:
            push.ahead.is_asked_for = True
        self._in_flight.submit(send)
        if len(self._in_flight) <= self._most_in_flight:
            replica.count(self.clock + len(self._in_flight))
            return
        self._adopt_oldest()

    def _adopt_oldest(self) -> None:
        """Wait for the oldest push in flight and take its values."""
        _, replica = self._bound()
        applied = self._in_flight.oldest()
        # The layers' own statistics have moved on since: they are taken over by the next pull.
        count = applied.clock + len(self._in_flight)
        replica.adopt(applied.received, count, statistics=False)
        self._give_back(applied)

    def _send(self, push: OutgoingPush, received: Received) -> AppliedPush:
        with table_specs.naming_layers(self._bound()[0].embeddings):
            ack = self._client.push_pull(
                push.grads,
                received.arrays,
                hyper=push.hyper,
                rows=push.rows,
                lag=push.lag,
                metadata=push.metadata,
                table_grads=push.table_grads or None,
                next_rows=None if push.ahead is None else push.ahead.into(),
            )
        if push.ahead is not None:
            push.ahead.is_filled = True
        return AppliedPush(received, ack.clock, push.newest_rows)

    def _give_back(self, applied: AppliedPush) -> None:
        _, replica = self._bound()
        replica.give(applied.received)
        self.clock = applied.clock
        self.steps += 1
        self.rows += applied.rows

    def _bound(self) -> tuple[variables.Variables, Replica]:
        if self._variables is None or self._replica is None:
            raise RuntimeError("this model is not attached to its servers yet")
        return self._variables, self._replica

    def _refuse(self, output: StepOutput, rows: int, table_rows: BatchRows | None) -> None:
        """Handle a step whose gradient is not finite; nothing of it is sent."""
        step = self._step
        expected = step is not None and step.skips_nonfinite
        if not expected and self.settings.on_nonfinite == "error":
            where = f"worker:{self.ctx.worker_rank}, step {self.steps + 1} of this worker"
            worst = self._worst(output, table_rows)
            raise NonFiniteGradient(
                f"{worst} of a batch of {rows} rows are NaN or infinite ({where}); nothing was "
                "sent. Lower the learning rate, clip, look at that batch, or "
                'distribute with on_nonfinite="skip"'
            )
        self.skipped_steps += 1
        if self.waits and not (step and step.accumulates):
            _, replica = self._bound()
            received = replica.take()
            self.clock = self._client.push_null(into=received.arrays).clock
            replica.adopt(received, self.clock)
            replica.give(received)

    def _worst(self, output: StepOutput, table_rows: BatchRows | None) -> str:
        """Name the first tensor with non-finite values, and how many; a bad row comes first."""
        if table_rows is not None and (row := first_bad_row(table_rows, table_rows.arrays)):
            return f"{row}: the gradients"
        if self._variables is not None:
            for group, parts in zip(self._variables.trainable, output.gradients, strict=True):
                bad = ~np.isfinite(np.concatenate(list(map(_array, parts))))
                start = 0
                for name, size in zip(group.names, group.sizes, strict=True):
                    if count := int(bad[start : start + size].sum()):
                        return f"{count} of {size} gradient values of {name!r}"
                    start += size
        if self._tables is not None and table_rows is not None:
            sums = {name: each for name, (_, each) in self._tables.sums(table_rows, output).items()}
            if row := first_bad_row(table_rows, sums):
                return f"the gradient of {row}: the gradients"
        return "gradient values (before clipping)"

    # -- other workers

    def join(self) -> None:
        """Be waited for by the others' steps."""
        if self.waits and not self._member:
            self._client.join()
        self._member = True

    def leave(self) -> None:
        """Let the others go on without this worker until it trains again."""
        if self.waits and self._member and self.attached:
            self._client.leave()
            self._member = False

    def rendezvous(self, key: str, value: bytes) -> dict[int, bytes]:
        """Exchange small values with all workers that are not done; returns them by rank.

        Args:
            key: name of the rendezvous.
            value: at most 1 MiB.
        """
        if self.ctx.num_workers == 1:
            return {self.ctx.worker_rank: value}
        answers = self._client.rendezvous(key, value, timeout_s=RENDEZVOUS_TIMEOUT_S)
        return dict(answers)


def _array(tensor: Any) -> Array:
    """Return the memory of a tensor."""
    return np.asarray(memoryview(tensor))
