"""Beginning of a fit: what all workers must have in common, and which rows come first.

Covers: the epochs that each worker asks for; what its layers have learned by `adapt`; the files
that its training and validation data have found; the epoch of its data with which a restarted
worker goes on.
Does not: exchange it (tfos.keras.fit.epoch_agreement), cut shares of files (feeding.reading).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from feeding.reading.found_files import FoundFiles, difference, summed_up
from tfos.errors import SettingsError
from tfos.fit_place import FitPlace
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.protocols import WorkerContext
from tfos.keras.step.adapted_layers import AdaptedLayer, adapted_layers, differing


class DataState(msgspec.Struct, frozen=True):
    """What one worker reads, its progress, and what its layers make of the rows."""

    files: FoundFiles | None = None
    """Files of the training data; None: the data are not files."""
    epoch: int = 0
    """Next epoch of the training data."""
    validation_epoch: int = 0
    """Next epoch of the validation data."""
    validation_files: FoundFiles | None = None
    """Files of the validation data; None: the data are not files."""
    adapted: tuple[AdaptedLayer, ...] = ()
    """What `adapt` has taught the model's layers."""


class Beginning(msgspec.Struct, frozen=True):
    """Epochs with which one worker begins a fit."""

    first: int
    """Epoch that Keras begins with."""
    end: int | None
    """Epoch after its last one; None: the model's own fit decides."""
    data: DataState = DataState()

    def __str__(self) -> str:
        end = "?" if self.end in (None, AllEpochs()) else self.end
        return f"fit(initial_epoch={self.first}, epochs={end})"


class FitData:
    """The data of one fit of this worker, and the epochs that it asks for.

    Args:
        ctx: the worker's context.
        arguments: arguments of `fit`, by name.
        model: the model.
    """

    def __init__(self, ctx: WorkerContext, arguments: Mapping[str, Any], model: Any) -> None:
        self._ctx = ctx
        self._model = model
        self._trained = _rows(arguments.get("x"))
        self._validated = _rows(arguments.get("validation_data"))
        self._first = int(arguments.get("initial_epoch") or 0)
        epochs = arguments["epochs"]
        self._end = None if epochs is None else int(epochs)

    @functools.cached_property
    def _found(self) -> tuple[FoundFiles | None, FoundFiles | None]:
        """Files that the training and the validation data have found."""
        return _summary(self._trained), _summary(self._validated)

    @functools.cached_property
    def _adapted(self) -> tuple[AdaptedLayer, ...]:
        return adapted_layers(self._model) if self._ctx.num_workers > 1 else ()

    def is_trained(self, epochs: int) -> bool:
        """Return whether no epoch is left, as in a run that is resumed after its last one.

        Args:
            epochs: epochs of Keras' own fit.
        """
        return self._first >= epochs > 0

    def beginning(self) -> Beginning:
        """Return what the others compare with their own."""
        return Beginning(self._first, self._end, self._state(*self._found))

    def state(self) -> DataState:
        """Return what a worker that joins later compares; it names no files."""
        trained, validated = (
            files and msgspec.structs.replace(files, digests=b"") for files in self._found
        )
        return self._state(trained, validated)

    def _state(self, files: FoundFiles | None, validation_files: FoundFiles | None) -> DataState:
        trained, validated = (
            0 if data is None else data.next_epoch for data in (self._trained, self._validated)
        )
        return DataState(files, trained, validated, validation_files, self._adapted)

    def begin(self, told: Mapping[int, Beginning], number: int) -> None:
        """Begin together with the others; a restarted worker takes their epochs of data.

        Args:
            told: beginnings of all workers by rank, this one included.
            number: number of the fit, from 0.

        Raises:
            SettingsError: another worker asks for other epochs, has found other files, or its
                layers have learned other vocabularies or bins.
        """
        rank, own = self._ctx.worker_rank, self.beginning()
        for other, each in sorted(told.items()):
            if (each.first, each.end) != (own.first, own.end):
                raise SettingsError(
                    f"fit number {number + 1}: worker {other} calls {each}, worker {rank} {own}. "
                    "They would wait for each other at the ends of different epochs. Pass the same "
                    "initial_epoch and epochs on every worker"
                )
        states = {other: each.data for other, each in told.items()}
        self._check(states)
        if self._ctx.fit_place is not None:
            self._go_on(max((each.epoch for each in states.values()), default=0), states)

    def join(self, told: Mapping[int, DataState], place: FitPlace) -> None:
        """Go on with the data epochs that come next for the others.

        Args:
            told: states of the others by rank.
            place: place where they train.

        Raises:
            SettingsError: another worker has found other files, or its layers have learned other
                vocabularies or bins.
        """
        self._check(told)
        self._go_on(place.files_epoch, told)

    def _check(self, told: Mapping[int, DataState]) -> None:
        rank, adapted = self._ctx.worker_rank, {r: each.adapted for r, each in told.items()}
        if layers := differing(self._adapted, rank, adapted):
            raise SettingsError(
                f"{layers} have learned different vocabularies or bins, so the same number would "
                "mean different things in their rows. Call adapt with the same data on every "
                "worker, or once in the driver, and pass what it has found: "
                "StringLookup(vocabulary=...), Discretization(bin_boundaries=...)"
            )
        found = {rank: each.files for rank, each in told.items()}
        self._check_same(self._trained, found, "fit on files", "trained")
        found = {rank: each.validation_files for rank, each in told.items()}
        self._check_same(self._validated, found, "fit(validation_data=...) of files", "validated")

    def _check_same(
        self,
        own: BatchDataset | None,
        found: Mapping[int, FoundFiles | None],
        where: str,
        used: str,
    ) -> None:
        if own is None or not own.files:
            return
        if differs := difference(own.files, self._ctx.worker_rank, found):
            raise SettingsError(
                f"{where}: {differs}. Each worker cuts its share from its own list, so rows would "
                f"be {used} twice or never. Name the same files on every worker, and do not change "
                "them"
            )

    def _go_on(self, epoch: int, told: Mapping[int, DataState]) -> None:
        if self._trained is not None:
            self._trained.begin_at(epoch)
        if self._validated is not None:
            self._validated.begin_at(max((e.validation_epoch for e in told.values()), default=0))


def _summary(data: BatchDataset | None) -> FoundFiles | None:
    return summed_up(data.files) if data is not None and data.files else None


def _rows(data: Any) -> BatchDataset | None:
    return data if isinstance(data, BatchDataset) else None
