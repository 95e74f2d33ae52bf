"""Programs of an estimator's workers: fit or evaluate a model, then hand it over.

Covers: main_fun of both; the trained model's bytes as answers to rows of the feed `model`, since a
worker's return value is small and executors need not share a disk with the driver.
Does not: start clusters (tfos.estimators.training).
Runs in: workers. Keras is imported in functions only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.file_pieces import FilePieces
from tfos.estimators.finite_training import check_finite, finite_loss
from tfos.estimators.fitted_inputs import map_fn_of
from tfos.estimators.recipe import (
    ModelRecipe,
    check_saved,
    content_of,
    tensors_of,
    warn_of_predictions,
)
from tfos.feed.dataframe_columns import Leaf
from tfos.keras.data.dataset_order import check_order

MODEL_FEED = "model"
"""Its rows are numbers of pieces."""
_FEEDS = ("input", "validation")
_ENDING = ("_TakeDataset", "_TakeWhileDataset")
"""TensorFlow's datasets that cut an endless dataset after a number of batches not known here."""
_ARRAYS = (tuple, list, dict, np.ndarray)


@dataclass(frozen=True, slots=True)
class FedData:
    """Rows of a DataFrame that reach the worker by a feed."""

    plan: ColumnPlan
    batch_size: int
    """Rows of one worker's step."""
    feed: str = "input"
    times: tuple[Leaf, ...] = ()
    """Features that are timestamps; they reach the worker as integers."""

    def begun(self) -> FedData:
        """Return itself: a feed begins with its first row."""
        return self

    def dataset(self, ctx: Any, model: Any) -> Any:
        """Return the dataset that `fit` takes.

        Args:
            ctx: the node's context.
            model: has an input or output per column.

        Raises:
            SettingsError: an input of floats would round timestamps.
        """
        given = self.plan.selectors(*tensors_of(model))
        fit = map_fn_of(model, self.plan.features)
        if fit is not None:
            fit.check_times(self.times)
            given |= {"map_fn": fit, "dtypes": (None,)}  # x has its dtypes
        return ctx.dataset(self.batch_size, feed=self.feed, **given)

    def held(self, ctx: Any, model: Any) -> Any:
        """Return the validation data: fed rows, whose metrics the workers add up; see `dataset`."""
        return self.dataset(ctx, model)


@dataclass(frozen=True, slots=True)
class MadeData:
    """A tf.data.Dataset that the user's function makes in each worker."""

    make: Callable[[], Any]
    seed: int = 0
    """Keras' seed while the dataset is made, and numpy's and Python's also while it is first read.
    All workers have the same."""

    def begun(self) -> MadeData:
        """Make the dataset, before the worker has a seed of its own.

        Workers take turns in its batches. If `make` shuffles, all workers must shuffle alike;
        otherwise some batches are trained twice and others never.
        """
        import keras

        keras.utils.set_random_seed(self.seed)
        made = self.make()
        return MadeData(lambda: made, self.seed)

    def dataset(self, ctx: Any, model: Any) -> Any:
        """Return this worker's share of it, batch by batch; it is read next.

        Args:
            ctx: the node's context.
            model: has its weights and layers; their random draws are this worker's own.

        Raises:
            SettingsError: it has no end, or it is nothing or arrays; or it has no order, or is no
                tf.data.Dataset, and several workers take turns in its batches.
        """
        import tensorflow as tf

        made = self.held(ctx, model)
        if isinstance(made, _ARRAYS):  # Keras reads others, such as a PyDataset
            raise _refused(made)
        if ctx.num_workers == 1:
            return made
        if not isinstance(made, tf.data.Dataset):
            raise _refused(made, "; with several workers")
        check_order(made)
        random.seed(self.seed)  # a Python generator draws its order while it is read
        np.random.seed(self.seed)
        return made.shard(ctx.num_workers, ctx.rank)

    def held(self, ctx: Any, model: Any) -> Any:
        """Return all of it: each worker validates the same rows, as it does with arrays.

        Args:
            ctx: any.
            model: any.

        Raises:
            SettingsError: it has no end, or it is nothing.
        """
        del ctx, model
        made = self.make()
        if made is None:
            raise _refused(made)
        if _is_endless(made):
            raise SettingsError(
                f"the function of data returned a dataset without an end ({made!r}), so one epoch "
                "or evaluation would never end. Leave out repeat(), since epochs= repeats the "
                "data; or end it with take(number of batches)"
            )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgram:
    """main_fun of a fit."""

    recipe: ModelRecipe
    data: FedData | MadeData
    validation: FedData | MadeData | None
    epochs: int
    consistency: str | None
    """Mode of `ctx.distribute`; None: the one worker trains alone."""
    staleness_bound: int | None = None
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    class_weight: Mapping[int, float] | None = None
    learning_rate: float | None = None
    seed: int | None = None
    keeps_epochs: bool = False
    """See FitSettings."""

    def __call__(self, args: Any, ctx: Any) -> None:
        """Train, then answer with the model until the feeds end."""
        import keras
        import tensorflow as tf

        from tfos.keras.fit.callbacks import of_rank
        from tfos.keras.step.attach import draw_apart

        del args
        ctx.trained_feeds.keeps_epochs = self.keeps_epochs
        data, validation = self.data.begun(), self.validation and self.validation.begun()
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed + ctx.rank)
        model = self.recipe.build(is_distributed=self.consistency is not None)
        if self.recipe.has_trained:  # a layer's own seed begins again with each load
            draw_apart(model, self.seed or 0)
        if not self.recipe.content and ctx.rank == 0:
            check_saved(model, self.recipe.custom_objects)
            warn_of_predictions(model)  # for model=, the driver has warned
        if self.learning_rate is not None:
            model.optimizer.learning_rate = self.learning_rate
        if self.consistency is not None:
            bound = self.staleness_bound
            ctx.distribute(model, consistency=self.consistency, staleness_bound=bound)
        made = self.callbacks() if callable(self.callbacks) else self.callbacks
        watching = [finite_loss()] if self.consistency is None else []  # servers check it
        rows = data.dataset(ctx, model)
        model.fit(
            rows,
            shuffle=not isinstance(rows, tf.data.Dataset),  # has its own order: Keras would warn
            epochs=self.epochs,
            validation_data=validation and validation.held(ctx, model),
            # Those of ctx come last: their report has the metrics that the user's callbacks add.
            callbacks=[*watching, *of_rank(made, ctx.rank), *ctx.callbacks()],
            class_weight=dict(self.class_weight) if self.class_weight else None,
            verbose=0,
        )
        if self.consistency is None:
            check_finite(model)
        for feed in _FEEDS:  # the rows that EarlyStopping leaves
            ctx.get_data_feed(qname_in=feed).terminate()
        _answer(ctx, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateProgram:
    """main_fun of an evaluation by one worker; returns the metrics by name."""

    recipe: ModelRecipe
    data: FedData | MadeData

    def __call__(self, args: Any, ctx: Any) -> dict[str, float]:
        """Evaluate one epoch."""
        from tfos.keras.fit.epoch_report import shown_metrics

        del args
        model = self.recipe.build(trains=False)
        found = model.evaluate(self.data.dataset(ctx, model), verbose=0, return_dict=True)
        return shown_metrics(found, most=len(found))


def _refused(made: Any, where: str = ";") -> SettingsError:
    return SettingsError(
        f"the function of data returned a {type(made).__qualname__}{where} it must return a "
        "tf.data.Dataset in batches, such as "
        "tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)"
    )


def _is_endless(dataset: Any) -> bool:
    """Say whether it is known to repeat forever; filter() and similar methods hide that."""
    import tensorflow as tf

    while isinstance(dataset, tf.data.Dataset):
        count, inputs = int(dataset.cardinality()), dataset._inputs()
        if count != tf.data.UNKNOWN_CARDINALITY:
            return count == int(tf.data.INFINITE_CARDINALITY)
        if len(inputs) != 1 or type(dataset).__name__ in _ENDING:
            return False
        (dataset,) = inputs
    return False


def _answer(ctx: Any, model: Any) -> None:
    """Answer rows of the feed `model` with pieces of the model's file."""
    feed = ctx.get_data_feed(train_mode=False, qname_in=MODEL_FEED)
    pieces: FilePieces | None = None
    while not feed.should_stop():
        asked = feed.next_batch(1)
        if asked:
            pieces = pieces or FilePieces(content_of(model))
            feed.batch_results([pieces.piece(int(place)) for place in asked])
