"""One slot of a MirroredStrategyRunner: a plain `model.fit` trains one model with all slots.

Covers: `fit` of every Keras model in this process while train_fn runs, the slot's part of the data
and of the callbacks, refusals of training that is not distributed.
Does not: train (tfos.keras.fit.distribute, in mode sync), hold parameters (tfos.worker.own_shard),
check the order of data (tfos.keras.data.dataset_order).
Runs in: a worker's process.      Threads: main_fun's.

`fit` gets the batches of one process, and the slots divide each of them: rank r of n computes rows
r, r+n, r+2n, ... of each batch of arrays, or the r-th part of each batch of a dataset. So an epoch
has the same steps and rows as in one process, and the mean weighted by rows is that batch's
gradient. All slots validate the same rows. They have one seed: datasets that shuffle without a seed
yield the same order everywhere. Random draws of layers (dropout, noise) differ between slots.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tfos.errors import NotDistributed, SettingsError, UnsupportedModel
from tfos.keras.data.dataset_order import check_order
from tfos.native.at_import import at_import
from tfos.runner import batch_rows, ranks
from tfos.runner.rank_process import RankWork
from tfos.spark.pickling import pickle_value

if TYPE_CHECKING:
    from tfos.worker.context import NodeContext

_DEFAULT_BATCH = 32
"""Keras'."""
_KERAS_2_FIT = "tf_keras.src.engine.training"
"""Module in which tf-keras has `Model`."""
_ROWS_OF = ("x", "y", "sample_weight")
"""Arguments from which `fit` takes corresponding rows."""


def run_mirrored(work: RankWork, ctx: NodeContext) -> None:
    """Call train_fn as one slot; hand over the first slot's return value.

    Args:
        work: the call of train_fn.
        ctx: context of this worker.

    Raises:
        NotDistributed: train_fn trained no model with all slots.
        UnsupportedModel: it fits a model of Keras 2, or one with its own fit.
        NotPicklable: its return value cannot be pickled.
    """
    import keras

    group = ctx.rank_group()
    if group.size > 1:
        at_import(_KERAS_2_FIT, functools.partial(_refuse_fits_in, size=group.size))
    seed = np.random.default_rng().integers(1 << 31, dtype=np.int64)
    keras.utils.set_random_seed(int(group.broadcast(seed)))
    with ranks.entered(group, ctx.local_rank), distributed_fits(ctx) as models:
        value = work()
    if not models and group.size > 1:
        raise NotDistributed(
            f"train_fn has returned without model.fit(...), so none of {group.size} slots trained "
            "with another. Train by fit of a Keras model that train_fn builds and compiles; "
            "tfos.run(fn, num_proc=N) runs functions that exchange arrays themselves, or nothing"
        )
    own = value if group.rank == 0 else None
    ctx.hand_over(pickle_value(own, f"rank {group.rank}"))


def _refuse_fits_in(module: ModuleType, size: int) -> None:
    """Refuse training of Keras 2 models here: each slot would train its own, on all rows."""

    def refusing(name: str) -> Any:
        def refused(model: Any, *_args: Any, **_kwargs: Any) -> Any:
            from tfos.keras.fit.distribute import keras_2_advice

            kind = type(model)
            raise UnsupportedModel(
                f"{name}() on {size} slots takes a Keras 3 model, got {kind.__module__}."
                f"{kind.__qualname__}{keras_2_advice(model)}"
            )

        return refused

    for name in ("fit", "train_on_batch"):
        setattr(module.Model, name, refusing(name))


@contextlib.contextmanager
def distributed_fits(ctx: NodeContext) -> Iterator[list[Any]]:
    """Make `fit` of a Keras model train with all slots; yield the models that did.

    Args:
        ctx: context of this worker.
    """
    import keras

    # It replaces `fit` too, and train_fn may import the layer: its tables would train only here.
    importlib.import_module("tfos.keras.fit.local")
    models: list[Any] = []
    plain_fit = keras.Model.fit

    @functools.wraps(plain_fit)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "_tfos_trainer" in vars(model):  # inside its distributed fit
            return plain_fit(model, *args, **kwargs)
        if type(model).fit is not fit:
            raise UnsupportedModel(
                f"{type(model).__qualname__} overrides fit(), which would run twice here; "
                "override train_step() in its place, or use tfos.run and ctx.distribute"
            )
        _check_losses(model, ctx.num_workers)
        ctx.distribute(model, consistency="sync")
        vars(model)["fit"] = _sharing(model.fit, ctx.rank, ctx.num_workers)
        models.append(model)
        return model.fit(*args, **kwargs)

    def train_on_batch(_model: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise NotDistributed(
            "train_on_batch() trains this slot's model alone; write model.fit(...), whose batches "
            f"{ctx.num_workers} slots share"
        )

    replaced: dict[str, Any] = {"fit": fit}
    if ctx.num_workers > 1:
        replaced["train_on_batch"] = train_on_batch
    own = {name: vars(keras.Model).get(name) for name in replaced}
    for name, function in replaced.items():
        setattr(keras.Model, name, function)
    try:
        yield models
    finally:
        for name, before in own.items():
            if before is None:
                delattr(keras.Model, name)
            else:
                setattr(keras.Model, name, before)


def _check_losses(model: Any, size: int) -> None:
    """Refuse losses for which the slots' mean is certainly not one process's gradient.

    If that is uncertain, `ctx.distribute` warns.

    Args:
        model: the compiled model.
        size: number of slots.
    """
    from tfos.keras.fit.distribute import summed_losses

    if size > 1 and (names := summed_losses(model, is_sure=True)):
        raise UnsupportedModel(
            f"the model is compiled with {names}, and {size} slots average their gradients: each "
            f"step would have 1/{size} of the gradient of one process. Compile it with "
            "reduction='sum_over_batch_size' and a rate larger by the rows of a batch, "
            "or use tfos.run and ctx.distribute(model, consistency='sync', reduction='sum')"
        )


def _sharing(distributed_fit: Any, rank: int, size: int) -> Any:
    """Return a `fit` that passes this rank's part of its data, and its callbacks, to another."""
    from tfos.keras.fit.callbacks import of_rank

    signature = inspect.signature(distributed_fit)

    @functools.wraps(distributed_fit)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        take_part(bound.arguments, rank, size)
        bound.arguments["callbacks"] = of_rank(bound.arguments.get("callbacks"), rank)
        try:
            return distributed_fit(*bound.args, **bound.kwargs)
        except Exception as error:
            if (refusal := batch_rows.refusal_in(error)) is not None:
                raise refusal from None
            raise

    return fit


def take_part(arguments: dict[str, Any], rank: int, size: int) -> None:
    """Replace the training data among `fit`'s arguments by this rank's part.

    Args:
        arguments: arguments of `fit` by name; changed in place.
        rank: number of this rank, from 0.
        size: number of ranks.

    Raises:
        SettingsError: data that cannot be divided, unequal numbers of rows, or batches with fewer
            rows than ranks.
    """
    import keras
    import tensorflow as tf

    data = arguments.get("x")
    if size == 1:
        return
    if isinstance(data, tf.data.Dataset):
        arguments["x"] = part_of_batches(data, rank, size)
        return
    num_rows = _count_rows({name: arguments.get(name) for name in _ROWS_OF}, size)
    if arguments.get("validation_split") and arguments.get("validation_data") is None:
        num_rows = _hold_back(arguments, size)
    batch_size = arguments.get("batch_size") or _DEFAULT_BATCH
    _check_rows("batch_size", batch_size, size)
    _check_rows("rows", num_rows, size)
    own: Any = slice(rank, None, size)  # a view, for arrays
    if batch_size % size:
        own = np.flatnonzero(np.arange(num_rows) % batch_size % size == rank)

    def part(leaf: Any) -> Any:
        if leaf is None:
            return None
        if tf.is_tensor(leaf) and not isinstance(own, slice):
            return tf.gather(leaf, own)
        return getattr(leaf, "iloc", leaf)[own]  # pandas: by position, not by label

    for name in _ROWS_OF:
        if arguments.get(name) is not None:
            arguments[name] = keras.tree.map_structure(part, arguments[name])
    arguments["batch_size"] = len(range(rank, batch_size, size))


def _hold_back(arguments: dict[str, Any], size: int) -> int:
    """Make all ranks validate the rows that one process would; return how many are left to train.

    Keras would hold back different rows on each rank, and validation metrics count rows that all
    workers share only once.
    """
    from keras.src.trainers.data_adapters.array_slicing import train_validation_split

    arrays = tuple(arguments.get(name) for name in _ROWS_OF)
    trained, held = train_validation_split(arrays, arguments.pop("validation_split"))
    arguments.update(zip(_ROWS_OF, trained, strict=True), validation_data=held)
    return _count_rows({name: arguments[name] for name in _ROWS_OF}, size)


def _count_rows(given: Mapping[str, Any], size: int) -> int:
    """Return the number of rows of all arrays.

    Raises:
        SettingsError: an argument is of another type, or the numbers differ.
    """
    import keras

    counts: dict[str, list[int]] = {}
    for name, value in given.items():
        leaves = [] if value is None else keras.tree.flatten(value)
        leaves = [each for each in leaves if each is not None]  # for an output without labels
        has_rows = all(len(getattr(each, "shape", ())) > 0 for each in leaves)
        if not has_rows or (name == "x" and not leaves):
            raise SettingsError(
                f"fit({name}={type(value).__name__}): {size} slots share arrays or a "
                "tf.data.Dataset, whose rows each can take its part of. Make a tf.data.Dataset of "
                "it, with batches of the size for all slots"
            )
        if leaves:
            counts[name] = [int(each.shape[0]) for each in leaves]
    if len({count for each in counts.values() for count in each}) > 1:
        shown = "; ".join(f"{name}: {', '.join(map(str, each))}" for name, each in counts.items())
        raise SettingsError(
            f"the arrays of fit() have different numbers of rows ({shown}), so a row of one has "
            "no row of the other beside it. Give all of them equally many rows"
        )
    return counts["x"][0]


def part_of_batches(dataset: Any, rank: int, size: int) -> Any:
    """Return a dataset with this rank's part of each batch.

    A last batch with fewer rows than ranks has none for some ranks: their epoch ends before it.
    In a repeating dataset these ranks are then one batch ahead; each row still counts once.
    Reading fails if no batch has as many rows as there are ranks (`batch_rows`).

    Args:
        dataset: dataset of batches, [batch, ...].
        rank: number of this rank, from 0.
        size: number of ranks.

    Raises:
        SettingsError: it has no order, or batches with fewer rows than ranks.
    """
    import keras
    import tensorflow as tf

    check_order(dataset)
    known = keras.tree.flatten(dataset.element_spec)[0].shape
    if known.rank and known[0] is not None:
        _check_rows("batches", known[0], size)
    else:
        dataset = batch_rows.checked(dataset, size)

    def part(*batch: Any) -> Any:
        rows = tf.shape(keras.tree.flatten(batch)[0])[0]
        start, stop = rows * rank // size, rows * (rank + 1) // size
        own = keras.tree.map_structure(lambda each: each[start:stop], batch)
        return own if len(batch) > 1 else own[0]

    def has_rows(*batch: Any) -> Any:
        return tf.shape(keras.tree.flatten(batch)[0])[0] > 0

    return dataset.map(part).filter(has_rows).prefetch(2)


def _check_rows(what: str, count: int, size: int) -> None:
    if count < size:
        raise SettingsError(
            f"{what} of {count} for {size} slots: each batch is shared by all of them, so it needs "
            f"at least {size} rows. Use larger batches, or fewer slots"
        )
