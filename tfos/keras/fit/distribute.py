"""Distribution: `ctx.distribute(model)` puts an ordinary Keras model's parameters on the servers.

Covers: the checks, and the methods of the one model object that are replaced: its train function,
`fit`, `evaluate`, `predict`, `train_on_batch`, `test_on_batch`, `predict_on_batch`, `save`,
`save_weights`, `export`, `__reduce__` (copies and pickles), `set_weights`, `load_weights`,
`get_metrics_result`, `summary`; what its optimizer saves and loads.
Does not: subclass Keras' classes, or touch other models; patch Keras' own methods, for models with
tables that train without a cluster (tfos.keras.fit.local); run a fit (tfos.keras.fit.fit_call).
Threads: use the model from one thread.

    fit ─► make_train_function ─► [batch ─► compiled gradients ─► push_pull ─► compiled assign] ...
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfos.errors import NotCompiled, SettingsError, UnsupportedModel
from tfos.keras.data import tensors
from tfos.keras.data.label_shapes import is_of_keras
from tfos.keras.fit.fit_call import SPLITS_AN_EPOCH, check_rows, distributed_fit
from tfos.keras.fit.metric_states import are_built
from tfos.keras.fit.table_summary import with_tables
from tfos.keras.keras_loops import refusing_no_rows
from tfos.keras.protocols import WorkerContext
from tfos.keras.step import optimizers
from tfos.keras.step.settings import Settings
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)


def distribute(model: keras.Model, ctx: WorkerContext, **options: Any) -> keras.Model:
    """Move a compiled model's parameters to the servers; see NodeContext.distribute.

    Args:
        model: a compiled Keras model.
        ctx: the node's context.
        **options: the fields of `Settings`.
    """
    settings = Settings(**options)
    check_model(model)
    if settings.staleness_aware:
        optimizers.check_staleness_aware(model.optimizer)
    if settings.has_barrier and settings.reduction == "mean" and ctx.num_workers > 1:
        _warn_of_sums(model, ctx.num_workers)
    trainer = PSTrainer(model, ctx, settings)
    if tensors.is_built(model):
        trainer.attach(seeds=ctx.is_chief)
    _install(model, trainer)
    return model


def check_model(model: Any) -> None:
    """Refuse a model that cannot be distributed.

    Raises:
        NotCompiled: the model is not compiled.
        UnsupportedOptimizer, UnsupportedModel: the text names the obstacle.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModel(
            f"ctx.distribute takes a Keras 3 model, got {type(model).__module__}."
            f"{type(model).__qualname__}{keras_2_advice(model)}"
        )
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedModel(
            f"Keras runs on the backend {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow "
            "before the first import of keras"
        )
    if (trainer := model.__dict__.get("_tfos_trainer")) is not None and trainer.is_local:
        raise UnsupportedModel(
            f"this model was trained in this process ({trainer.steps} steps), and its parameters "
            "are on a server here. Rebuild and compile it, then call ctx.distribute(model)"
        )
    if trainer is not None:
        raise UnsupportedModel(
            "this model is already distributed; call ctx.distribute(model) once, after compile()"
        )
    if not model.compiled or model.optimizer is None:
        raise NotCompiled(
            "ctx.distribute(model) needs an optimizer, but the model has none; call "
            'model.compile(optimizer="adam", loss=...) before it'
        )
    if model._distribute_strategy is not None:
        raise UnsupportedModel(
            f"the model was created under {type(model._distribute_strategy).__name__}, but "
            "ctx.distribute runs one replica per worker; create it outside of strategy.scope()"
        )
    made_by = getattr(model.make_train_function, "__func__", None)  # an object may have its own
    if made_by is not keras.Model.make_train_function:
        raise UnsupportedModel(
            f"{type(model).__name__} has its own make_train_function, which would not be called: "
            "the steps here are those of ctx.distribute. Put what it does into train_step, or "
            "into a callback"
        )
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise UnsupportedModel(
            f"the model has further optimizers ({', '.join(others)}), but the parameter servers "
            "run only the rule of model.optimizer. Train all variables with it, in one call of "
            "train_step: self.optimizer.apply(gradients_1 + gradients_2, variables_1 + "
            "variables_2), with the gradients of a persistent tf.GradientTape"
        )
    optimizers.check(model.optimizer)


def summed_losses(model: Any, *, is_sure: bool) -> str:
    """Name the compiled losses that sum over the rows of a batch, for a message; empty: none.

    With such a loss, the mean of the workers' gradients is a fraction of the gradient of all their
    rows. A function that returns one number may sum or average, which is unknown here.

    Args:
        model: the compiled model.
        is_sure: whether to name only losses that Keras itself sums and trains with. A step or a
            loss of the user may take the mean itself.
    """
    losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    sums = [each for each in losses if getattr(each, "reduction", "") in ("sum", "none", None)]
    if is_sure:
        sums = [each for each in sums if _is_trained_by_keras(model) and is_of_keras(each)]
    return ", ".join(f"{type(each).__name__}(reduction={each.reduction!r})" for each in sums)


def _is_trained_by_keras(model: Any) -> bool:
    """Return whether the compiled loss's gradient is what trains, and its size counts."""
    steps = ("train_step", "compute_loss", "_compute_loss")
    scaled = (keras.optimizers.SGD, keras.optimizers.Ftrl)  # others divide by the gradients' size
    return isinstance(optimizers.unwrap(model.optimizer), scaled) and all(
        name not in vars(model) and getattr(type(model), name) is getattr(keras.Model, name)
        for name in steps
    )


def _warn_of_sums(model: Any, num_workers: int) -> None:
    if names := summed_losses(model, is_sure=False):
        logger.warning(
            "%s sums over a batch, unless your own step or loss takes the mean, but the workers' "
            "gradients are averaged. So a step has 1/%d of the gradient of all rows, while "
            "regularizers count in full. Pass reduction='sum' to "
            "ctx.distribute(consistency='sync'), which sums both, or compile the loss with "
            "reduction='sum_over_batch_size'",
            names,
            num_workers,
        )


def keras_2_advice(model: Any) -> str:
    """Return advice for a model of Keras 2; empty: it is another object.

    Args:
        model: an object that is not a model of Keras 3.
    """
    if not any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__):
        return ""
    return ". tf.keras is Keras 2 here; set TF_USE_LEGACY_KERAS=0 at the driver, or import keras"


def _install(model: Any, trainer: PSTrainer) -> None:
    """Replace methods of this one object. Its class, and with it saving, does not change."""

    def make_train_function(force: bool = False) -> Any:
        trainer.check_unchanged()
        if model.train_function is None or force:
            model.train_function = functools.partial(_train, model, trainer)
        return model.train_function

    model.train_function = None
    _save_as_new(trainer.optimizer)
    _keep_count(trainer.optimizer)
    overrides: dict[str, Any] = {
        "make_train_function": make_train_function,
        "fit": distributed_fit(model, trainer),
    }
    pulling = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
    for name in (*pulling, "save", "save_weights", "export", "__reduce__"):
        is_checked = not name.endswith("_on_batch")  # comparing all values costs too much there
        overrides[name] = _pulling(
            getattr(model, name), trainer, is_checked=is_checked, takes_rows=name in pulling
        )
    overrides["predict"] = refusing_no_rows(overrides["predict"])
    overrides["get_metrics_result"] = _of_batches(model)
    for name in ("save", "__reduce__"):  # copies and pickles are files in memory
        overrides[name] = _with_slots(overrides[name], model)
    overrides["summary"] = with_tables(model.summary, trainer)
    overrides["train_on_batch"] = _apart_from_fit(model.train_on_batch, trainer)
    for name in ("set_weights", "load_weights"):
        overrides[name] = _pushing(getattr(model, name), trainer)
    # Not setattr: Keras would look for layers and variables in each value.
    model.__dict__.update(overrides, _tfos_trainer=trainer)


def _train(model: Any, trainer: PSTrainer, iterator: Iterator[Any]) -> Any:
    """Train `steps_per_execution` batches, or as many as the epoch still has."""
    import tensorflow as tf

    if trainer.awaits_callbacks:
        raise UnsupportedModel(
            f"{type(model).__name__} has its own fit, which trains without the callbacks that it "
            "was given, but they make the workers agree at the ends of epochs. Pass them on: "
            "super().fit(..., callbacks=callbacks)"
        )
    trainer.check_given_values()
    batches = trainer.batches(iterator)
    logs, trained = None, 0
    while trained < model.steps_per_execution:
        try:
            with trainer.times.on("feed"):
                batch = batches.take()
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        logs = trainer.train(batch, batches)
        trained += 1
    if not trained:
        raise StopIteration
    return logs


def _of_batches(model: Any) -> Callable[[], dict[str, Any]]:
    """Return the model's own get_metrics_result, which also works after no batch at all."""
    original = model.get_metrics_result

    @functools.wraps(original)
    def get_metrics_result() -> dict[str, Any]:
        if not are_built(model):  # Keras raises for an epoch before the first batch
            return {}
        found: dict[str, Any] = original()
        return found

    return get_metrics_result


def _pulling(
    original: Callable[..., Any], trainer: PSTrainer, *, is_checked: bool, takes_rows: bool
) -> Callable[..., Any]:
    bound = inspect.signature(original).bind

    @functools.wraps(original)
    def pulling(*args: Any, **kwargs: Any) -> Any:
        given = bound(*args, **kwargs).arguments
        if "_use_cached_eval_dataset" in kwargs:  # Keras' own call at the end of an epoch
            trainer.attach_without_batch()
            if trainer.begin_validation is not None:
                trainer.begin_validation()
        elif is_checked:
            check_rows(original.__name__, given)
        first = kwargs.get("x", args[0] if args else None)  # a class may pass on all of them
        rows = given.get("x", first) if takes_rows else None
        trainer.pull_newest(is_checked=is_checked, x=rows)
        return original(*args, **kwargs)

    return pulling


def _apart_from_fit(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def training(*args: Any, **kwargs: Any) -> Any:
        if not trainer.fits:
            trainer.catch_up()
        with trainer.apart_from_fit():  # a callback may call it
            return original(*args, **kwargs)

    return training


def _pushing(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def pushing(*args: Any, **kwargs: Any) -> Any:
        trainer.attach_if_filled()
        if trainer.has_trained_rows:
            raise SettingsError(
                f"{original.__name__} after a training step {SPLITS_AN_EPOCH}. Set initial values "
                "before the first step"
            )
        result = original(*args, **kwargs)
        if trainer.was_trained_before:
            trainer.keep_trained(original.__name__)
        else:
            trainer.assign()
        return result

    return pushing


def _save_as_new(optimizer: Any) -> None:
    """Make files say that the optimizer has made no update: only its slots on the servers have.

    Otherwise Keras would go on with the large steps that suit old slots, but the file's are zeros.
    """
    inner = optimizers.unwrap(optimizer)

    def save_own_variables(store: Any) -> None:
        for number, variable in enumerate(inner.variables):
            value = variable.numpy()
            store[str(number)] = value * 0 if variable is inner._iterations else value
        if isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            logger.info(
                "the file's optimizer has made 0 updates and lacks the servers' slots; a training "
                "that goes on with it restarts its learning rate schedule"
            )

    inner.__dict__["save_own_variables"] = save_own_variables  # as the model's methods


def _keep_count(optimizer: Any) -> None:
    """Keep files from changing the optimizer's count, which counts the servers' updates."""
    inner = optimizers.unwrap(optimizer)

    def keeping(load: Callable[[Any], None]) -> Callable[[Any], None]:
        def load_own_variables(store: Any) -> None:
            count = inner._iterations.numpy()
            load(store)
            inner._iterations.assign(count)

        return load_own_variables

    for each in {optimizer, inner}:  # a LossScaleOptimizer loads the inner one's variables, too
        each.__dict__["load_own_variables"] = keeping(each.load_own_variables)


def _with_slots(save: Callable[..., Any], model: Any) -> Callable[..., Any]:
    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        path = str(next(iter(args), kwargs.get("filepath", "")))
        if path.endswith((".h5", ".hdf5")):  # Keras does not call save_own_variables for these
            return save(*args, **{**kwargs, "include_optimizer": False})
        optimizers.give_slots(model)  # so that the file loads without a warning
        return save(*args, **kwargs)

    return saving
