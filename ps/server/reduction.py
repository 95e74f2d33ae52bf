"""Reduction of a completed barrier: reduce in rank order, clip by norm if asked, apply once.

Covers: the weighted sum in rank order, of rows too (ps.server.row_updates); the reduced gradient
between the two rounds that clipping by norm takes with several servers.
Does not: decide when (ps.consistency.bsp), stage (ps.server.shard), know the other servers.
Runs in: PS processes.
Threads: `reduce` and `settle` are called under the gate's lock; nothing else changes the state.

A norm is one of the whole mean gradient, of which a server has a part:

    1  barrier complete ──► reduce, keep, answer every push with the squares of this part
    2  each worker adds up the squares of all servers and sends the sum to every server: `settle`
       ──► the first to come makes this server scale and apply; all bring the same numbers

A push that is refused is told so in round 1 beside the squares (`Ack.refusal`), and its worker goes
on to round 2: it may be the only one that can settle what other servers keep.

A worker pushes again only after its own round 2, so the next barrier finds the gradient settled if
one of its pushers lives. If none does, no client has an acknowledgement, so the push is dropped.

A server that was started again between the rounds has lost its part, and tells the workers that it
has not answered before (`Ack.is_late`). They bring the sum of the other parts' squares: those are
acknowledged, so they are applied, clipped by no less than their own norm.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.waiting import StagedPushes
from ps.dense.shard import DenseShard
from ps.dense.staging import StagedGradient, StagingPool
from ps.errors import NonFiniteGradient, NonFiniteUpdate, PushError
from ps.manifest.manifest import Hyper, WorkerRank
from ps.metadata import AttachedMetadata
from ps.optim import kernels
from ps.optim.clipping import Norms, servers_take_norms
from ps.server.row_updates import PushedRows, RowUpdates
from ps.stats.counters import Counters

_logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Reduced:
    """The gradient of one clock."""

    clock: int
    hyper: Hyper
    squares: Array
    pushers: frozenset[WorkerRank]
    gradient: StagedGradient | None
    """None once it was applied or dropped."""
    metadata: list[AttachedMetadata] = field(default_factory=list)
    """What its pushers have brought."""
    error: NonFiniteUpdate | None = None
    """Why each of its pushers is refused, though it was applied."""


class Reduction:
    """Reduces the staged gradients of one shard.

    Args:
        dense: values and slots.
        guard: asked before a bucket changes.
        pool: gives the memory for a reduced gradient.
        counters: where to count.
        on_failed: called with the reason why the shard cannot go on.
        tables: applies the rows of the same pushes.
    """

    def __init__(
        self,
        dense: DenseShard,
        guard: CopyOnWrite,
        pool: StagingPool,
        counters: Counters,
        on_failed: Callable[[str], None],
        tables: RowUpdates,
    ) -> None:
        self._dense = dense
        self._guard = guard
        self._pool = pool
        self._counters = counters
        self._on_failed = on_failed
        self._tables = tables
        self._norms = Norms(dense.manifest)
        self._is_mean = dense.manifest.reduction == "mean"
        self._clips = servers_take_norms(dense.manifest, num_workers=dense.num_workers)
        self.in_rounds = self._clips and dense.num_servers > 1
        """Whether a reduced gradient waits for the squares of other servers."""
        self._last: _Reduced | None = None

    @property
    def num_squares(self) -> int:
        """Sums of squares that the servers exchange."""
        return self._norms.size

    @property
    def is_settled(self) -> bool:
        """Whether the parameters contain all that was reduced."""
        return self._last is None or self._last.gradient is None

    def squares(self, clock: int) -> Array | None:
        """Return this shard's squares of the gradient of a clock; None if there was none."""
        last = self._last
        return last.squares if last is not None and last.clock == clock else None

    def reduce(self, staged: StagedPushes[StagedGradient], clock: int) -> None:
        """Reduce in the given order, and apply unless other servers' squares are needed.

        Rows are applied at once: their workers have clipped them.

        Args:
            staged: pushes of one clock, by rank.
            clock: the one that they complete.

        Raises:
            NonFiniteUpdate: the update overflows; see ps.errors.
            NonFiniteGradient: finite gradients have an infinite sum; those buckets are unchanged,
                with clipping by norm all of them.
            TableFull, IdError: some rows are unchanged.
        """
        started_s = time.perf_counter()
        refused: PushError | None = None
        try:
            hyper = staged[0].hyper or Hyper(0.0)
            try:
                if self._clips:
                    self._keep(staged, hyper, clock)
                else:
                    self._apply_each(staged, hyper)
            except NonFiniteGradient as error:
                refused = error
            for push in staged:
                if push.tables is not None:
                    refused = self._apply_rows(staged, hyper) or refused
                    break
            if refused is not None:
                raise refused
        finally:
            self._counters.applied(time.perf_counter() - started_s)

    def check(self, squares: Array) -> None:
        """Refuse squares that no gradient has; see ps.optim.clipping."""
        self._norms.check(squares)

    def keep_metadata(self, brought: AttachedMetadata) -> None:
        """Keep what a push brings that was just reduced: now, or once its gradient is applied."""
        if self._last is None or self._last.gradient is None:
            self._guard.metadata.put(brought.name, brought.text)
        else:
            self._last.metadata.append(brought)

    def has_part(self, clock: int, worker: WorkerRank) -> bool:
        """Say whether this worker's gradient is part of what a clock was reduced to.

        Args:
            clock: as the push was answered.
            worker: the worker that pushed.
        """
        last = self._last
        return last is not None and last.clock == clock and worker in last.pushers

    def settle(
        self, clock: int, squares: Array | None, worker: WorkerRank | None = None
    ) -> NonFiniteUpdate | None:
        """Apply the gradient of a clock if that has not happened, and keep what came with it.

        Returns a NonFiniteUpdate where elements were left out, to each pusher of that clock.

        Args:
            clock: as the pushes were answered.
            squares: squares of the whole gradient, summed over the servers; None: drop it.
            worker: the worker that settles; None: this server does.
        """
        last = self._last
        if last is None or last.clock != clock:
            return None
        if last.gradient is not None:
            gradient, last.gradient = last.gradient, None
            try:
                if squares is not None:
                    last.error = self._apply_scaled(gradient, last.hyper, squares)
                    for brought in last.metadata:
                        self._guard.metadata.put(brought.name, brought.text)
            finally:
                self._pool.give(gradient)
        is_told = worker is None or worker in last.pushers
        return last.error.again() if is_told and last.error is not None else None

    def _apply_each(self, staged: StagedPushes[StagedGradient], hyper: Hyper) -> None:
        gradients, shares, ones = _weighed(staged)
        refused: NonFiniteGradient | None = None
        for index, bucket in enumerate(self._dense.owned):
            part = gradients[0].arrays[index]
            if len(gradients) > 1:
                parts = [gradient.arrays[index] for gradient in gradients]
                weights = shares if self._is_mean or bucket.group.is_average else ones
                # In place: the first gradient's buffer is not read again.
                kernels.reduce_weighted(part, parts, weights)
            try:
                with bucket.lock:
                    if self._guard.snapshot is not None:
                        self._guard.before(index)
                    overflow = self._dense.update(bucket, part, hyper)
                refused = refused or overflow
            except NonFiniteGradient as error:
                refused = refused or error
        if refused is not None:
            raise _after_reduction(refused)

    def _apply_rows(self, staged: StagedPushes[StagedGradient], hyper: Hyper) -> PushError | None:
        _, shares, ones = _weighed(staged)
        rows = [push.tables if isinstance(push.tables, PushedRows) else None for push in staged]
        # In hybrid they were applied as they arrived, so nothing is kept of them.
        if not any(each is not None and each.gradients for each in rows):
            return None
        refused = self._tables.reduce(rows, shares if self._is_mean else ones, hyper)
        return _after_reduction(refused) if isinstance(refused, NonFiniteGradient) else refused

    def _keep(self, staged: StagedPushes[StagedGradient], hyper: Hyper, clock: int) -> None:
        """Reduce into memory of its own, and take the squares."""
        if not self.is_settled and self._last is not None:
            _logger.warning(
                "the gradient of clock %d is dropped: no worker that pushed it has settled it, and "
                "none has an acknowledgement",
                self._last.clock,
            )
            self.settle(self._last.clock, None)
        mean, squares = self._pool.take(), self._norms.zeros()
        gradients, shares, ones = _weighed(staged)
        try:
            for index, bucket in enumerate(self._dense.buckets):
                parts = [gradient.arrays[index] for gradient in gradients]
                is_mean = self._is_mean or self._dense.owned[index].group.is_average
                kernels.reduce_weighted(mean.arrays[index], parts, shares if is_mean else ones)
                self._dense.check_finite(bucket.id, mean.arrays[index])
                self._norms.add(squares, bucket.group, bucket.start, mean.arrays[index])
        except NonFiniteGradient as error:
            self._pool.give(mean)
            raise _after_reduction(error) from error
        pushers = frozenset(push.id.worker for push in staged)
        self._last = _Reduced(clock, hyper, squares, pushers, mean)
        if not self.in_rounds and (overflow := self.settle(clock, squares)) is not None:
            raise overflow

    def _apply_scaled(
        self, gradient: StagedGradient, hyper: Hyper, squares: Array
    ) -> NonFiniteUpdate | None:
        started_s = time.perf_counter()
        overflow: NonFiniteUpdate | None = None
        try:
            for index, owned in enumerate(self._dense.owned):
                bucket, part = owned.bucket, gradient.arrays[index]
                self._norms.scale(squares, bucket.group, bucket.start, part, part)
                with owned.lock:
                    self._guard.before(index)
                    left_out = self._dense.update(owned, part, hyper)
                overflow = overflow or left_out
        except Exception as error:  # some buckets are updated, some are not
            self._on_failed(f"applying a clipped gradient failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._counters.applied(time.perf_counter() - started_s)
        return overflow


_ROWS = operator.attrgetter("rows")


def _weighed(
    staged: StagedPushes[StagedGradient],
) -> tuple[list[StagedGradient], list[float], list[float]]:
    """Return the gradients, their shares of all rows, and as many ones."""
    gradients = [push.gradient for push in staged if push.gradient is not None]
    num_rows = sum(map(_ROWS, staged))
    return gradients, [push.rows / num_rows for push in staged], [1.0] * len(staged)


def _after_reduction(error: NonFiniteGradient) -> NonFiniteGradient:
    """Say that the gradients themselves were finite."""
    return type(error)(f"after the reduction, {error.message}", error.details)
