"""Distribution: `ctx.distribute(model)` puts an ordinary Keras model's parameters on the servers.

Covers: the checks, and the methods of the one model object that are replaced: its train function,
`fit`, `evaluate`, `predict`, `train_on_batch`, `test_on_batch`, `predict_on_batch`, `save`,
`save_weights`, `export`, `set_weights`, `load_weights`, `summary`.
Does not: subclass or patch Keras; other models are untouched.
Threads: use the model from one thread.

    fit ─► make_train_function ─► [batch ─► compiled gradients ─► push_pull ─► compiled assign] ...
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras

from ps.compression.format import Compression
from ps.manifest.manifest import Consistency
from tfos.errors import FeedEndedWarning, NotCompiled, SettingsError, UnsupportedModel
from tfos.fit_place import FitPlace, fed_epochs
from tfos.keras.data import tensors
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.fit import validation
from tfos.keras.fit.epoch_agreement import (
    AfterCallbacks,
    BeforeCallbacks,
    FeedEnded,
    JoinAtFirstBatch,
    rendezvous_prefix,
)
from tfos.keras.fit.epoch_report import EpochReporter
from tfos.keras.fit.learning_rate import KeptRate
from tfos.keras.fit.metric_states import are_built
from tfos.keras.fit.progress import EpochProgressBar, ProgressReport
from tfos.keras.fit.table_summary import with_tables
from tfos.keras.keras_loops import refusing_no_rows
from tfos.keras.protocols import WorkerContext
from tfos.keras.step import optimizers
from tfos.keras.step.settings import Settings
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)


def distribute(  # noqa: PLR0913 - options of one user's call, by keyword
    model: keras.Model,
    ctx: WorkerContext,
    *,
    consistency: Consistency = "async",
    reduction: Literal["mean", "sum"] = "mean",
    staleness_bound: int | None = None,
    staleness_aware: bool | None = None,
    on_nonfinite: Literal["error", "skip"] = "error",
    pipeline: int | None = None,
    compression: Compression = "none",
) -> keras.Model:
    """Move a compiled model's parameters to the servers; `fit` then trains together.

    Call it on every worker, with the same model. A built model is bound at once, with the chief's
    weights; one without input shape at its first batch. Later `set_weights` and `load_weights` take
    effect on the chief.

    Args:
        model: a compiled Keras model (Sequential, functional, subclassed, own `train_step`).
        ctx: the node's context.
        consistency: "async" applies each gradient when it arrives; "ssp" too, and lets no worker
            get more than `staleness_bound` steps ahead of the slowest; "sync" reduces one gradient
            per worker, in rank order, and applies it once; "hybrid" does so with dense parameters,
            and applies gradients of tables' rows when they arrive.
        reduction: sync only: "mean" weighted by the rows of the batches, or "sum".
        staleness_bound: ssp, and needed there: in steps. 0: no worker is ahead of another.
            Larger: less waiting for slow workers, older gradients. hybrid: batches of rows that a
            worker has under way, from 1, the default.
        staleness_aware: divide the learning rate of a gradient by 1 + the updates by others that
            its worker had not seen. None: yes, except in sync and hybrid, where none is, and for
            Adagrad and Ftrl. False ruins a training of several workers with rules like Adam.
        on_nonfinite: a NaN or infinite gradient: "error" raises before anything is sent, "skip"
            skips the step and counts it.
        pipeline: async only: steps, 64 at most, that `fit` computes while a push is in flight. With
            k, a step's parameters lack this worker's last k updates. For long round trips. None: 1
            for models with tables and Adagrad or Ftrl, else 0.
        compression: of pushed float32 gradients: "bf16" and "fp16" take half the bytes, "int8" a
            quarter; the next gradient carries the rounding error. For slow networks.

    Raises:
        NotCompiled: compile first.
        UnsupportedOptimizer: the servers have no rule for it; the text lists those they have.
        UnsupportedModel: the text names the obstacle.
    """
    settings = Settings(
        consistency=consistency,
        reduction=reduction,
        staleness_bound=staleness_bound,
        staleness_aware=staleness_aware,
        on_nonfinite=on_nonfinite,
        pipeline=pipeline,
        compression=compression,
    )
    check_model(model)
    trainer = PSTrainer(model, ctx, settings)
    if tensors.is_built(model):
        trainer.attach(seeds=ctx.is_chief)
    _install(model, trainer)
    return model


def check_model(model: Any) -> None:
    """Refuse a model that cannot be distributed.

    Raises:
        NotCompiled: compile first.
        UnsupportedOptimizer, UnsupportedModel: the text names the obstacle.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModel(
            f"ctx.distribute takes a Keras 3 model, got {type(model).__module__}."
            f"{type(model).__qualname__}{_keras_2_advice(model)}"
        )
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedModel(
            f"Keras runs on the backend {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow "
            "before the first import of keras"
        )
    if (trainer := model.__dict__.get("_tfos_trainer")) is not None and trainer.is_local:
        raise UnsupportedModel(
            f"this model was trained in this process ({trainer.steps} steps), and its parameters "
            "are on a server here; build and compile it anew, then call ctx.distribute(model)"
        )
    if trainer is not None:
        raise UnsupportedModel(
            "this model is distributed already; call ctx.distribute(model) once, after compile()"
        )
    if not model.compiled or model.optimizer is None:
        raise NotCompiled(
            "ctx.distribute(model) needs the optimizer, and the model has none: call "
            'model.compile(optimizer="adam", loss=...) before it'
        )
    if model._distribute_strategy is not None:
        raise UnsupportedModel(
            f"the model was created under {type(model._distribute_strategy).__name__}; "
            "ctx.distribute runs one replica per worker, so create it outside of strategy.scope()"
        )
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise UnsupportedModel(
            f"the model has further optimizers ({', '.join(others)}); the parameter servers run "
            "the rule of model.optimizer only: train all variables with it"
        )
    optimizers.check(model.optimizer)


def _keras_2_advice(model: Any) -> str:
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
    overrides: dict[str, Any] = {
        "make_train_function": make_train_function,
        "fit": _fit(model, trainer, KeptRate(trainer)),
    }
    pulling = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
    for name in (*pulling, "save", "save_weights", "export", "__reduce__"):
        overrides[name] = _pulling(getattr(model, name), trainer)
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


def _fit(model: Any, trainer: PSTrainer, kept_rate: KeptRate) -> Callable[..., Any]:
    original = model.fit
    signature = inspect.signature(original)
    fits = iter(range(1 << 62))

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        dataset = arguments.get("x")
        _check_arguments(arguments)
        _check_callbacks(arguments, trainer)
        validation.check(arguments)
        number = next(fits)
        if _is_over(begins := _place(trainer.ctx, dataset), number):
            return _left_out(model, number)
        place = _joined(trainer.ctx, begins, arguments, number)
        kept_rate.begin(number)
        name = rendezvous_prefix(number)
        passes = validation.ValidationPasses(trainer, arguments, name)
        trainer.begin_validation = passes.begin
        before = BeforeCallbacks(trainer, dataset, passes, number, place)
        report = EpochReporter(trainer, before, dataset, arguments, number)
        joining = [] if place is None else [JoinAtFirstBatch(trainer)]
        after = [*joining, report, AfterCallbacks(trainer, name, kept_rate)]
        _follow_positions(trainer, dataset, arguments)
        progress = ProgressReport(trainer.ctx)
        callbacks = _callback_list(model, arguments, before, progress, after)
        arguments["callbacks"] = callbacks
        try:
            with trainer.pipelining():
                return original(*bound.args, **bound.kwargs)
        except FeedEnded:
            _warn_of_end(arguments["epochs"], before.epochs_run)
            if before.epochs_run:
                trainer.pull()  # a callback may have swapped weights and averages
                # As Keras does when it leaves its loop of epochs:
                model.optimizer.finalize_variable_values(model.trainable_weights)
            callbacks.on_train_end(before.last_logs)
            return model.history
        finally:
            trainer.is_between_epochs = False
            trainer.positions.forget()
            trainer.begin_validation = None
            report.close()

    return fit


def _follow_positions(trainer: PSTrainer, dataset: Any, arguments: dict[str, Any]) -> None:
    if isinstance(dataset, BatchDataset):
        trainer.positions.follow(dataset)
        _check_first_epoch(dataset, arguments)


def _warn_of_end(epochs: int, num_run: int) -> None:
    if not isinstance(epochs, AllEpochs):
        warnings.warn(
            f"the feed ended after {num_run} epochs, fit(epochs={epochs}) asked for more; feed as "
            "many epochs as are fitted: cluster.train(rdd, num_epochs=n), or "
            "fit(epochs=ctx.all_epochs)",
            FeedEndedWarning,
            stacklevel=3,
        )


def _place(ctx: WorkerContext, dataset: Any) -> FitPlace | None:
    """Return where the others train, or where the run that this one resumes was with this feed.

    The chief's record of this run is there only after an epoch that all workers have begun.
    """
    feed = dataset.feed if isinstance(dataset, BatchDataset) else ""
    if not feed or not ctx.resumes_epochs or ctx.fit_place is not None:
        return ctx.fit_place
    found = fed_epochs(ctx.ps_client().metadata()).get(feed)
    return None if found is None else found.fit


def _is_over(place: FitPlace | None, number: int) -> bool:
    return place is not None and number < place.number


def _joined(
    ctx: WorkerContext, place: FitPlace | None, arguments: dict[str, Any], number: int
) -> FitPlace | None:
    """Begin in that epoch; return where this worker joins others, None: all begin together."""
    if place is None or number > place.number or place.epoch < 0:
        return None
    arguments["initial_epoch"] = place.epoch
    return ctx.fit_place


def _left_out(model: Any, number: int) -> Any:
    """Return an empty history of a fit that was over before this worker was started again."""
    logger.warning(
        "fit number %d of this model was trained before this worker, or the run that it resumes, "
        "was started again; it is left out here",
        number + 1,
    )
    model.history = keras.callbacks.History()
    model.history.set_model(model)
    model.history.on_train_begin()
    return model.history


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments that Keras would silently ignore with a feed."""
    if not isinstance(arguments.get("x"), BatchDataset):
        return
    for name in ("y", "sample_weight", "batch_size"):
        if arguments.get(name) is not None:
            raise SettingsError(
                f"fit(ctx.dataset(...), {name}=...): the rows of a feed contain their targets "
                "and weights, (x, y, weight), and ctx.dataset(batch_size) sets the size; drop "
                f"{name}, or compute it in map_fn"
            )


def _check_callbacks(arguments: dict[str, Any], trainer: PSTrainer) -> None:
    """Refuse a callback that would bring back the dense weights and leave the rows as they are."""
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    for callback in _as_list(given):
        restores = isinstance(callback, keras.callbacks.EarlyStopping)
        if restores and callback.restore_best_weights and trainer.has_tables:
            raise SettingsError(
                "EarlyStopping(restore_best_weights=True) would bring back the dense weights of "
                "the best epoch with the rows of the last one; drop restore_best_weights and keep "
                "the best epoch with both: keras.callbacks.ModelCheckpoint('best.keras', "
                "save_best_only=True), or on a cluster Checkpoints(…, keep_best='val_loss')"
            )


def _check_first_epoch(dataset: BatchDataset, arguments: dict[str, Any]) -> None:
    """Warn if `fit` would train more epochs than an uninterrupted run."""
    first, initial = dataset.first_epoch, arguments["initial_epoch"]
    if initial < first:
        logger.warning(
            "the rows resume in epoch %d, fit(initial_epoch=%d, epochs=%d) trains %d epochs from "
            "there; pass initial_epoch=rows.first_epoch to end where a run without a stop ends",
            first,
            initial,
            arguments["epochs"],
            arguments["epochs"] - initial,
        )


def _callback_list(
    model: Any,
    arguments: dict[str, Any],
    before: BeforeCallbacks,
    progress: ProgressReport,
    after: list[Any],
) -> Any:
    """Return the user's callbacks between those of tfos, as a list that this module can end."""
    given = arguments.get("callbacks")
    ready = given if isinstance(given, keras.callbacks.CallbackList) else None
    own = _as_list(given) if ready is None else list(ready.callbacks)
    reports = [] if any(isinstance(each, ProgressReport) for each in own) else [progress]
    callbacks = [before, *reports, *own, *after]
    if ready is not None:
        for callback in callbacks:
            if callback not in own:
                callback.set_model(model)
                callback.set_params(ready.params)
        ready.callbacks = callbacks
        return ready
    if not isinstance(arguments.get("x"), BatchDataset):
        return callbacks
    verbose, steps = arguments.get("verbose", "auto"), arguments.get("steps_per_epoch")
    if verbose != 0 and steps is None:
        callbacks.append(EpochProgressBar())
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=arguments["epochs"],
        steps=steps,
        model=model,
    )


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _of_batches(model: Any) -> Callable[[], dict[str, Any]]:
    """Return the model's own get_metrics_result, which also answers after no batch at all."""
    original = model.get_metrics_result

    @functools.wraps(original)
    def get_metrics_result() -> dict[str, Any]:
        if not are_built(model):  # Keras raises for an epoch before the first batch
            return {}
        found: dict[str, Any] = original()
        return found

    return get_metrics_result


def _pulling(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def pulling(*args: Any, **kwargs: Any) -> Any:
        if "_use_cached_eval_dataset" in kwargs:  # Keras' own call at the end of an epoch
            trainer.attach_without_batch()
            if trainer.begin_validation is not None:
                trainer.begin_validation()
        if not (trainer.is_between_epochs or trainer.fits_elsewhere):
            trainer.pull()
        with trainer.typed_errors():
            return original(*args, **kwargs)

    return pulling


def _apart_from_fit(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def training(*args: Any, **kwargs: Any) -> Any:
        with trainer.apart_from_fit():  # a callback may call it
            return original(*args, **kwargs)

    return training


def _pushing(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    @functools.wraps(original)
    def pushing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        trainer.assign()
        return result

    return pushing


def _with_slots(save: Callable[..., Any], model: Any) -> Callable[..., Any]:
    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        optimizers.give_slots(model)  # so that the file loads without complaint
        return save(*args, **kwargs)

    return saving
