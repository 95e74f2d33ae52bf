"""The `fit` of a distributed model: Keras' own, between what all workers agree on.

Covers: its arguments; where it begins after a restart; the callbacks around the user's; a feed that
ends before the last epoch.
Does not: train a batch (tfos.keras.step.trainer), agree (tfos.keras.fit.epoch_agreement).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfos.errors import FeedEndedWarning, SettingsError, UnsupportedModel
from tfos.fit_place import FitPlace, fed_epochs
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.running_fit import KERAS_FIT
from tfos.keras.embedding.layer import refuse_tables
from tfos.keras.fit import validation
from tfos.keras.fit.callbacks import listed
from tfos.keras.fit.epoch_agreement import AfterCallbacks, BeforeCallbacks, FitEnded
from tfos.keras.fit.epoch_report import EpochReporter, count_left_out
from tfos.keras.fit.learning_rate import KeptRate
from tfos.keras.fit.progress import EpochProgressBar, ProgressReport
from tfos.keras.protocols import WorkerContext
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)

SPLITS_AN_EPOCH = (
    "would bring back the dense weights of an earlier epoch with the rows of the last one; keep "
    "the best epoch with both: keras.callbacks.ModelCheckpoint('best.keras', save_best_only=True), "
    "or on a cluster Checkpoints(…, keep_best='val_loss')"
)
"""Effect of setting only the dense weights of a model with tables."""


class FitArguments:
    """The arguments of one call of a class's `fit`, which may have its own parameters.

    Args:
        original: the bound method.
        args: arguments of the call.
        kwargs: keyword arguments of the call.

    Attributes:
        by_name: value of each by Keras' name, with the defaults of `original`, then Keras'.

    Raises:
        UnsupportedModel: `original` takes no callbacks, or its data under a name other than x.
    """

    def __init__(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._original = original
        kerass = list(inspect.signature(KERAS_FIT).parameters.values())[1:]  # without self
        signature = inspect.signature(original)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        unnamed = [
            name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_ONLY
        ]
        self._args = (*args, *(bound.arguments[name] for name in unnamed[len(args) :]))
        self._kwargs = kwargs
        kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
        self._more = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
        rest = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        given = dict(bound.arguments)
        of_rest, more = given.pop(rest, ()), given.pop(self._more, {})
        num_own = len(self._args) - len(of_rest)
        in_rest = [parameter.name for parameter in kerass[num_own:]][: len(of_rest)]
        given |= dict(zip(in_rest, of_rest, strict=False)) | more
        self._by_place = [*list(signature.parameters)[:num_own], *in_rest]
        """Names of the arguments that go by position: the caller's, and what has no name."""
        self._names = {*signature.parameters, *in_rest}
        self.by_name: dict[str, Any] = {each.name: each.default for each in kerass} | given
        self._before = dict(self.by_name)
        self._check(given)

    def _check(self, given: dict[str, Any]) -> None:
        if "callbacks" not in given and not self._more:
            raise UnsupportedModel(
                f"{self._name} has no parameter callbacks, but those of tfos must reach Keras' "
                "fit: they make the workers agree at the ends of epochs. Give it callbacks=None, "
                "or **kwargs, and pass them on to super().fit"
            )
        for name, value in given.items():
            if name != "x" and isinstance(value, BatchDataset) and name != "validation_data":
                raise UnsupportedModel(
                    f"{self._name} takes the rows of a feed or of files as {name!r}; name that "
                    "parameter x, as Keras does, so that tfos can follow their epochs"
                )

    def check_can_join(self) -> None:
        """Refuse a `fit` that could not begin in the epoch of the others after a restart.

        Raises:
            UnsupportedModel: the text says which parameter it lacks.
        """
        if "initial_epoch" not in self._names and not self._more:
            raise UnsupportedModel(
                f"{self._name} has no parameter initial_epoch, which a restarted worker needs to "
                "join the epoch of the others; give it **kwargs, and pass them on to super().fit"
            )

    @property
    def _name(self) -> str:
        return getattr(self._original, "__qualname__", "fit")

    def call(self) -> Any:
        """Call the `fit` as the caller has, with the current values of `by_name`.

        What the caller has not given goes by name: a program that has replaced Keras' fit may add
        callbacks to those by name.

        Returns:
            Its result.
        """
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, value in self.by_name.items():
            if value is self._before[name]:
                continue
            if name in self._by_place:
                args[self._by_place.index(name)] = value
            elif name in self._names or self._more:
                kwargs[name] = value
            else:
                raise UnsupportedModel(
                    f"{self._name} has no parameter {name}, which tfos sets to {value!r}; give it "
                    "**kwargs, and pass them on to super().fit"
                )
        return self._original(*args, **kwargs)


def distributed_fit(model: Any, trainer: PSTrainer) -> Callable[..., Any]:
    """Return the `fit` that replaces the model's own.

    Args:
        model: the distributed model.
        trainer: trainer of the model.
    """
    kept_rate = KeptRate(trainer)
    original = model.fit
    fits = itertools.count()

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        given = FitArguments(original, args, kwargs)
        arguments = given.by_name
        dataset = arguments.get("x")
        check_rows("fit", arguments)
        _check_steps(arguments, trainer)
        _check_callbacks(arguments, trainer)
        if trainer.ctx.num_workers > 1:
            given.check_can_join()
        trainer.begin_fit()
        number = next(fits)  # counts fits that begin: a refused one may be called again
        begins = _place(trainer.ctx, dataset)
        if begins is not None and number < begins.number:  # it was over
            trainer.pull()
            count_left_out()
            return _left_out(model, number)
        place = _joined(trainer.ctx, begins, arguments, number)
        kept_rate.begin(number)
        passes = validation.ValidationPasses(trainer, arguments, number)
        trainer.begin_validation = passes.begin
        check = functools.partial(_check_steps, trainer=trainer)
        before = BeforeCallbacks(trainer, arguments, passes, number, place, check)
        report = EpochReporter(trainer, before, arguments, number)
        before.last = [report, AfterCallbacks(trainer, kept_rate, before)]
        _follow_positions(trainer, dataset, arguments, joins=place is not None)
        own = listed(arguments.get("callbacks"))
        given_on = _callbacks(model, arguments, before, ProgressReport(trainer.ctx))
        arguments["callbacks"] = before.given_on = given_on
        try:
            return _call(trainer, given, before, joins=place is not None)
        finally:
            trainer.end_fit()
            report.close()
            if isinstance(given_on, keras.callbacks.CallbackList):
                given_on.callbacks = own  # the next fit may be given it, too
            if isinstance(dataset, BatchDataset):
                dataset.leave_loop()  # Keras does not call anything if it aborts a loop

    return fit


def _call(trainer: PSTrainer, given: FitArguments, before: BeforeCallbacks, *, joins: bool) -> Any:
    try:
        with trainer.pipelining():
            result = given.call()
        _tell_of_end(before)
        return result
    except FitEnded:
        _tell_of_end(before)
        _tell_of_code(before, joins=joins)
        return before.end_early()
    except BaseException:
        trainer.has_left_fit = True
        raise


def _follow_positions(
    trainer: PSTrainer, dataset: Any, arguments: dict[str, Any], *, joins: bool
) -> None:
    if isinstance(dataset, BatchDataset):
        trainer.positions.follow(dataset)
        if not joins:  # a worker that joins has the others' epoch and their files' epoch
            _check_first_epoch(dataset, arguments)


def _tell_of_end(before: BeforeCallbacks) -> None:
    """Warn of epochs that were asked for and not fed."""
    if before.fed_of_asked is None:
        return
    fed, asked = before.fed_of_asked
    if isinstance(asked, AllEpochs):  # the intended way to end with the feed
        return
    not_fed = (
        f"the feed ended after {fed} epochs, but fit(epochs={asked}) asked for more. Feed "
        "as many epochs as fit trains, cluster.train(rdd, num_epochs=n), or use "
        "fit(epochs=ctx.all_epochs)"
    )
    warnings.warn(not_fed, FeedEndedWarning, stacklevel=4)


def _tell_of_code(before: BeforeCallbacks, *, joins: bool) -> None:
    """Warn of code that does not run: in a loop that is not Keras', or before its first epoch."""
    end = "the others' fit has stopped" if before.is_stopped else "the feed ended"
    own = inspect.unwrap(type(before.model).fit)
    if own is inspect.unwrap(keras.Model.fit):
        return
    left_out = (
        f"{end} inside {own.__qualname__}, so its code after the epochs does not run, and fit "
        "returns model.history. Move that code after the call of fit, or into on_train_end of "
        "a callback"
    )
    if joins and not before.epochs_run:
        left_out += (
            ". This worker was restarted after the last epoch. The other workers do run that "
            "code, and wait for this one if it trains or meets them"
        )
    elif isinstance(before.epochs, AllEpochs):
        logger.info(left_out)
        return
    warnings.warn(left_out, FeedEndedWarning, stacklevel=4)


def _place(ctx: WorkerContext, dataset: Any) -> FitPlace | None:
    """Return where the others train, or where the resumed run stopped with this feed.

    The chief's record of this run exists only after an epoch that all workers have begun.
    """
    feed = dataset.feed if isinstance(dataset, BatchDataset) else ""
    if not feed or not ctx.resumes_epochs or ctx.fit_place is not None:
        return ctx.fit_place
    found = fed_epochs(ctx.ps_client().metadata()).get(feed)
    return None if found is None else found.fit


def _joined(
    ctx: WorkerContext, place: FitPlace | None, arguments: dict[str, Any], number: int
) -> FitPlace | None:
    """Begin in that epoch; return where this worker joins others; None: all begin together."""
    if place is None or number > place.number or place.epoch < 0:
        return None
    arguments["initial_epoch"] = place.epoch
    return ctx.fit_place


def _left_out(model: Any, number: int) -> Any:
    """Return an empty history of a fit that was over before this worker restarted."""
    logger.warning(
        "fit number %d of this model is skipped: it was trained before this worker, or the run "
        "that it resumes, was restarted",
        number + 1,
    )
    model.history = keras.callbacks.History()
    model.history.set_model(model)
    model.history.on_train_begin()
    return model.history


def check_rows(call: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that Keras would silently ignore beside a dataset of ctx.

    Args:
        call: name of the method.
        arguments: arguments of the call, by name.

    Raises:
        SettingsError: the text names one.
    """
    validated = arguments.get("validation_data")
    several = tuple(validated) if isinstance(validated, list | tuple) else ()
    if several and isinstance(several[0], BatchDataset):
        raise SettingsError(
            f"{call}(validation_data=(dataset, ...)) has {len(several)} values; pass a dataset of "
            "ctx alone, validation_data=dataset. Its rows contain their targets and weights, as "
            "for dataset(n, label_cols=, weight_col=)"
        )
    of_x, of_validation = ("y", "sample_weight", "batch_size"), ("validation_batch_size",)
    for value, names in ((arguments.get("x"), of_x), (validated, of_validation)):
        given = [name for name in names if arguments.get(name) is not None]
        if given and isinstance(value, BatchDataset):
            raise SettingsError(
                f"{call}(dataset, {given[0]}=...): the rows of a dataset of ctx contain their "
                f"targets and weights, (x, y, weight), and its batches have {value.batch_size} "
                f"rows. Drop {given[0]}; dataset(n, label_cols=, weight_col=, map_fn=) sets them"
            )


def _check_steps(arguments: dict[str, Any], trainer: PSTrainer) -> None:
    """Refuse epochs that a worker could begin without rows while the others wait for its push.

    It also refuses epochs whose rows could not be validated.
    """
    validation.check(arguments)
    dataset, steps = arguments.get("x"), arguments.get("steps_per_epoch")
    if steps is None or not isinstance(dataset, BatchDataset) or not dataset.feed:
        return
    ctx, consistency = trainer.ctx, trainer.settings.consistency
    if trainer.waits and ctx.num_workers > 1:
        raise SettingsError(
            f"fit(ctx.dataset(...), steps_per_epoch={steps}): workers get different numbers of "
            f"batches of a fed epoch. With consistency={consistency!r} the {ctx.num_workers} "
            "workers wait for each other's pushes, so one without rows would block them forever. "
            "Leave steps_per_epoch out: an epoch of fit is then a fed epoch. Feed fewer rows for "
            "shorter epochs"
        )
    if ctx.is_chief:
        logger.warning(
            "fit(steps_per_epoch=%s): the epochs of fit are not the fed epochs; leave it out to "
            "train one fed epoch in each",
            steps,
        )


def _check_callbacks(arguments: dict[str, Any], trainer: PSTrainer) -> None:
    """Refuse a callback that would set back one worker alone, or dense weights without the rows."""
    for callback in listed(arguments.get("callbacks")):
        if isinstance(callback, keras.callbacks.BackupAndRestore) and trainer.ctx.num_workers > 1:
            raise SettingsError(
                f"BackupAndRestore on {trainer.ctx.num_workers} workers: each would go on from its "
                "own file, in its own epoch, and wait for the others. Instead use "
                "ClusterConfig(checkpoints=Checkpoints(directory=..., every_s=60, resume=True)), "
                "which saves the servers' parameters and goes on with them"
            )
        if trainer.has_tables:
            _check_with_tables(callback, trainer.model)


def _check_with_tables(callback: Any, model: Any) -> None:
    """Refuse a callback that would bring back, save or draw dense weights without the rows."""
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        raise SettingsError(
            f"EarlyStopping(restore_best_weights=True) {SPLITS_AN_EPOCH}; drop restore_best_weights"
        )
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise SettingsError(
            "BackupAndRestore would save the rows of the model's tables, but no later fit could "
            "restore them: its tables are there before the callback begins. On a cluster use "
            "ClusterConfig(checkpoints=Checkpoints(directory=..., every_s=60, resume=True)). In "
            "one process use ModelCheckpoint('last.keras'), and go on with "
            "tfos.keras.load_model('last.keras') and fit(initial_epoch=...)"
        )
    draws = isinstance(callback, keras.callbacks.TensorBoard) and callback.histogram_freq
    if draws and callback.write_images:
        raise SettingsError(
            "TensorBoard(write_images=True): the weight of a tfos.keras.Embedding has 0 rows, and "
            "TensorFlow ends the process where it draws it; drop write_images"
        )
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if saves and not callback.save_weights_only and callback.filepath.endswith(".h5"):
        refuse_tables(model, callback.filepath)


def _check_first_epoch(dataset: BatchDataset, arguments: dict[str, Any]) -> None:
    """Warn if `fit` would train more epochs than an uninterrupted run."""
    first, initial = dataset.first_epoch, arguments["initial_epoch"]
    if initial < first and arguments["epochs"] is not None:
        logger.warning(
            "the rows resume in epoch %d, but fit(initial_epoch=%d, epochs=%d) trains %d epochs "
            "from there; pass initial_epoch=rows.first_epoch to end like an uninterrupted run",
            first,
            initial,
            arguments["epochs"],
            arguments["epochs"] - initial,
        )


def _callbacks(
    model: Any, arguments: dict[str, Any], before: BeforeCallbacks, progress: ProgressReport
) -> Any:
    """Return the user's callbacks between those of tfos; a fit of the class may add its own."""
    given = arguments.get("callbacks")
    ready = given if isinstance(given, keras.callbacks.CallbackList) else None
    own = listed(given)
    reports = [] if any(isinstance(each, ProgressReport) for each in own) else [progress]
    callbacks = [before, *reports, *own, *before.last]
    if ready is not None:
        for callback in callbacks:
            if callback not in own:
                callback.set_model(model)
                callback.set_params(ready.params)
        ready.callbacks = callbacks
        return ready
    if isinstance(arguments.get("x"), BatchDataset) and arguments.get("steps_per_epoch") is None:
        callbacks.append(EpochProgressBar())  # as silent as Keras' fit was asked to be
    return callbacks
