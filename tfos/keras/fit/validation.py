"""Validation data from a feed: each worker validates its own rows.

Covers: when a pass may begin, how many rows it had; the metrics of training, which a pass resets;
incompatible arguments.
Does not: read rows (tfos.keras.data.dataset), evaluate (Keras), combine the workers' metrics
(tfos.keras.fit.epoch_agreement).
Threads: the thread that runs `fit`.

The rows arrive once all workers have trained the epoch's rows. A rendezvous precedes each pass, so
all workers pull the same parameters: those at the end of the epoch.
"""

from __future__ import annotations

import logging
from typing import Any

from tfos.errors import SettingsError
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.metric_states import EpochMetrics, Measured, measure, measured_rows
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)


class ValidationPasses:
    """The validation passes of one `fit`.

    Args:
        trainer: trainer of the model.
        arguments: arguments of `fit` by name.
        number: number of the fit.

    Attributes:
        name: prefix of the keys of the fit's rendezvous, the same on all workers.
    """

    def __init__(self, trainer: PSTrainer, arguments: dict[str, Any], number: int) -> None:
        self._trainer = trainer
        trained, data = arguments.get("x"), arguments.get("validation_data")
        self._trained = trained if isinstance(trained, FeedDataset) else None
        self._dataset = data if isinstance(data, BatchDataset) else None
        self.name = f"fit/{number}"
        self.epoch = 0
        """Of the fit, that is validated next."""
        self._has_run = self._has_warned = False
        self._training: list[Measured] | None = None

    def begin(self) -> None:
        """Wait for the other workers' last steps, before Keras evaluates."""
        trainer = self._trainer
        trainer.drain()
        if self._trained is not None:  # the driver feeds validation once all rows are trained
            self._trained.batches_under_way = int
            self._trained.all_acknowledged()
        trainer.workers.leave()  # others with more batches need not wait for this worker
        self._has_run = True
        if trainer.ctx.num_workers > 1:
            self._training = measure(trainer.model)  # Keras resets them before it evaluates
        if isinstance(self._dataset, FeedDataset):
            self._warn_unless_fed(self._dataset)
            trainer.workers.rendezvous(f"{self.name}/validation/{self.epoch}", b"")

    def _warn_unless_fed(self, validating: FeedDataset) -> None:
        trained = self._trained
        if trained is None or not trained.over or trained.is_validated or self._has_warned:
            return
        if validating.has_rows:  # fed by a call of their own
            return
        self._has_warned = True
        logger.warning(
            "fit(validation_data=ctx.dataset(feed=%r)) waits for rows, and the call of the driver "
            "that feeds %r has none for it: pass cluster.train(rows, validation=...), or leave "
            "validation_data out, as for a stream",
            validating.feed,
            trained.feed,
        )

    def take_rows(self) -> int:
        """Return the weight of this epoch's metrics: its rows, 1 if they are unknown."""
        has_run, self._has_run = self._has_run, False
        if self._dataset is None:
            return measured_rows(self._trainer.model) if has_run else 1
        return self._dataset.rows if has_run else 0

    def take_metrics(self) -> EpochMetrics:
        """Return this worker's metrics of the epoch that ends."""
        training, self._training = self._training, None
        newest = measure(self._trainer.model)
        if training is None:
            training, newest = newest, []
        return EpochMetrics(
            training,
            newest,
            is_shared=self._dataset is None,
            num_workers=self._trainer.ctx.num_workers,
        )


def check(arguments: dict[str, Any]) -> None:
    """Refuse arguments that are incompatible with validation from a feed.

    Raises:
        SettingsError: the text names the argument.
    """
    if not isinstance(arguments.get("validation_data"), FeedDataset):
        return
    if arguments.get("steps_per_epoch") is not None:
        raise SettingsError(
            "fit(steps_per_epoch=...) ends an epoch before the fed epoch ends, but its validation "
            "rows arrive after that; drop steps_per_epoch, or validate with arrays"
        )
