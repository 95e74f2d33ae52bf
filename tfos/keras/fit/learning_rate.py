"""Learning rate of a distributed `fit`: its changes by callbacks survive an interruption.

Covers: reading it, the chief's record on the servers, which checkpoints contain, restoring it in
the run that resumes.
Does not: agree on it within a run (tfos.keras.fit.epoch_agreement), send it with a push
(tfos.keras.step).      Threads: the thread that runs `fit`.

A schedule needs no record: it counts the servers' updates. The record exists while `fit` runs, so a
run after one that has ended begins with the program's own rate.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras
import msgspec

from ps.errors import ServerPhaseError
from tfos.keras.step import optimizers
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)

METADATA_NAME = "tfos.learning_rate"


class RateRecord(msgspec.Struct, frozen=True):
    """The rate at the end of an epoch, and what identifies the program that had it."""

    fit: int
    """Number of the fit, from 0."""
    first: float
    """Rate that the run's first fit began with."""
    began: float
    """Rate that the program gave this fit."""
    now: float


class KeptRate:
    """The learning rate of one model through its fits.

    Args:
        trainer: trainer of the model.
    """

    def __init__(self, trainer: PSTrainer) -> None:
        self._trainer = trainer
        self._left: RateRecord | None = None
        """Record of the interrupted run, until the fit in which it was."""
        self._own: RateRecord | None = None
        """Record with which a resuming run would compare its program's rates; None: no fit yet."""
        self._is_recorded = False

    def begin(self, number: int) -> None:
        """Begin a fit; the one in which the run was interrupted takes the rate it had then.

        Args:
            number: number of the fit.
        """
        rate = learning_rate(self._trainer.optimizer)
        if rate is None:
            return
        if self._own is None:
            self._left = self._read()
        first = rate if self._own is None else self._own.first
        self._own = RateRecord(number, first, rate, rate)
        if self._left is not None and self._left.fit == number:
            self._is_recorded = True
            self._take(self._left, rate)
        self.record()

    def record(self) -> None:
        """On the chief, make the servers keep the rate if the program would begin with another.

        Once they keep a rate, they also keep its return to the program's own.
        """
        own, rate = self._own, learning_rate(self._trainer.optimizer)
        if own is None or rate is None:
            return
        if own.first == own.began == rate and not self._is_recorded:
            return
        if not self._trainer.ctx.is_chief:
            return
        self._is_recorded = True
        self._keep(msgspec.structs.replace(own, now=rate))

    def end(self) -> None:
        """On the chief, note that the fit is over, so no later run goes on within it."""
        if self._is_recorded:
            self._is_recorded = False
            self._keep(None)

    def _keep(self, record: RateRecord | None) -> None:
        value = None if record is None else msgspec.to_builtins(record)
        with contextlib.suppress(ServerPhaseError):  # no model yet, so there is nothing to save
            self._trainer.ctx.ps_client().set_metadata(METADATA_NAME, value)

    def _read(self) -> RateRecord | None:
        ctx = self._trainer.ctx
        if not ctx.resumes_rate and ctx.fit_place is None:
            return None
        kept = ctx.ps_client().metadata().get(METADATA_NAME)
        return None if kept is None else msgspec.convert(kept, RateRecord)

    def _take(self, left: RateRecord, rate: float) -> None:
        if rate not in (left.first, left.began):
            logger.warning(
                "fit begins with the program's learning rate %g. In the run that it resumes, the "
                "program had set %g, which had become %g; set that rate if you want it",
                rate,
                left.began,
                left.now,
            )
        elif left.now != rate:
            tell = logger.warning if self._trainer.ctx.is_chief else logger.info
            tell(
                "the learning rate is %g, as when the run was interrupted; the program had set %g",
                left.now,
                rate,
            )
            optimizers.unwrap(self._trainer.optimizer).learning_rate = left.now


def learning_rate(optimizer: Any) -> float | None:
    """Return the settable learning rate; None if a schedule decides."""
    rate = optimizers.unwrap(optimizer)._learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None
