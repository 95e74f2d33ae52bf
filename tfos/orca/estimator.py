"""Estimator: Orca's way to fit, evaluate and predict with a Keras model on Spark.

Covers: data as a DataFrame, a path or a function of tf.data; `model_dir`; a second fit goes on.
Does not: train (tfos.estimators.training), predict (tfos.predict).
Runs in: the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never, TypeAlias

from feeding.columnar.batch import check_batch_size
from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.estimators import model_files
from tfos.estimators.columns import ColumnPlan, named
from tfos.estimators.recipe import ModelRecipe, check_file, described, model_of, recipe_of
from tfos.estimators.training import (
    LAST_SEED,
    FitResult,
    FitSettings,
    evaluate,
    evaluate_made,
    fit,
    fit_made,
)
from tfos.feed.dataframe import as_dataframe, check_classic
from tfos.feed.dataframe_inference import is_frame
from tfos.files.paths import output_directory
from tfos.orca.other_names import METHODS, refuse
from tfos.predict.column import BATCH_SIZE, PREDICTION, predicted, read_signature
from tfos.predict.fitting import in_order
from tfos.predict.predictor import OutputColumn, predictor_of
from tfos.predict.signature import ModelSignature, ModelSource
from tfos.spark.facts import active_context, active_session, read_facts

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    from pyspark.sql import DataFrame

    Creator: TypeAlias = Callable[[Mapping[str, Any], int], tf.data.Dataset]
    Data: TypeAlias = DataFrame | str | Creator


_WORDS = {
    "-1": "None",
    "batchSize": "batch_size",
    "checkpointDir": "model_dir",
    "clusterSize": "cluster_size",
    "config": "cluster_config",
    "exactlyOnce": "exactly_once",
    "featuresCols": "feature_cols",
    "labelCols": "label_cols",
    "numPS": "num_ps",
    "stalenessBound": "staleness_bound",
}
"""Orca's argument names, and its value for a number that is not given, by those of spark.ml."""
History: TypeAlias = dict[str, list[float]]
_ROWS = "a DataFrame or a path"
_FUNCTION = "a function of (config, batch_size)"
_NO_MODEL = (
    "this estimator has no model: call load(path), or pass from_keras(model=, a compiled Keras "
    "model) or from_keras(model_creator=, a function that returns one)"
)


class Estimator:
    """A Keras model that fits, evaluates and predicts on Spark; made by `from_keras`.

    Attributes:
        history: a value per epoch of all fits, of each the newest 10,000, by metric; NaN where a
            fit lacks the metric.

    Args:
        recipe: the model.
        config: argument of the user's functions.
        settings: settings of every fit.
        model_dir: where models and checkpoints are saved; None: nowhere.
    """

    def __init__(
        self,
        recipe: ModelRecipe,
        config: Mapping[str, Any],
        settings: FitSettings,
        model_dir: str | None,
    ) -> None:
        self.history: History = {}
        self._recipe = recipe
        self._config = dict(config)
        self._settings = settings
        self._model_dir = model_dir
        self._signature: ModelSignature | None = None
        """Signature of the trained model, once a task has read it."""
        self._servers: int | None = None
        """Number of the directory in model_dir with the servers' state for the next fit."""
        self._model: int | None = None
        """Number of the model in model_dir; None: the model is another one."""
        self._is_behind = False
        """Whether servers have saved a state that is in no model yet."""
        self._resumes_epochs = False
        """Whether the next fit resumes the interrupted one, without the epochs it had trained."""
        self._num_fits = 0
        """Fits before the next one, whose seed follows from it; of other programs, the models."""

    @classmethod
    def from_keras(  # noqa: PLR0913 - Orca's arguments, and those of the cluster
        cls,
        *,
        model: keras.Model | None = None,
        model_creator: Callable[[Mapping[str, Any]], keras.Model] | None = None,
        config: Mapping[str, Any] | None = None,
        model_dir: str | None = None,
        cluster_size: int = 1,
        num_ps: int | None = None,
        consistency: str = "async",
        staleness_bound: int | None = None,
        seed: int | None = 0,
        exactly_once: bool = False,
        verbose: bool = True,
        cluster_config: ClusterConfig | None = None,
        **orca: Never,
    ) -> Estimator:
        """Return an estimator of a compiled Keras model, or one without a model, for load().

        Args:
            model: compiled model, with its weights.
            model_creator: called with `config` in every worker; returns a compiled model.
            config: argument of `model_creator` and data functions.
            model_dir: path or URL (docs/guides/files.md): each fit leaves its model there, and the
                servers save there while they train; None: nothing is saved. It needs a
                SparkContext, whose default file system holds plain paths.
            cluster_size: nodes of each fit, servers included; one task slot each.
            num_ps: servers among them; None: one beside several workers.
            consistency: mode of ctx.distribute.
            staleness_bound: steps, for `consistency="ssp"`.
            seed: seed of a DataFrame's or path's shuffle, which differs by epoch and fit, and, plus
                the rank, of a worker's Keras. None: rows in order; a fit of a function draws one.
            exactly_once: whether a task that Spark repeats skips the rows that it fed before;
                correct only if a partition has the same rows in the same order again.
            verbose: show progress.
            cluster_config: further settings of clusters, but for checkpoints; None: the defaults.
            **orca: other arguments of Orca: all are refused, here and in the calls below.

        Raises:
            SettingsError: both model and model_creator, or invalid settings; or an argument of
                Orca, with what to do instead.
        """
        refuse("from_keras", orca)
        settings = FitSettings(
            cluster_size=cluster_size,
            num_ps=num_ps,
            consistency=consistency,
            staleness_bound=staleness_bound,
            seed=seed,
            exactly_once=exactly_once,
            verbose=verbose,
            config=cluster_config,
            words=_WORDS,
        )
        settings.check()
        if model_dir is not None:
            place = read_facts(active_context()).output_place
            model_dir = output_directory(model_dir, "models", place)
        given = _config_of(config)
        return cls(_recipe_of(model, model_creator, given), given, settings, model_dir)

    if not TYPE_CHECKING:  # mypy would accept any attribute name

        def __getattr__(self, name: str) -> Never:
            """Say what to call instead of a method that Orca has.

            Args:
                name: name of an attribute that does not exist.

            Raises:
                AttributeError: always.
            """
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{told}: {METHODS[name]}" if name in METHODS else told)

    def fit(  # noqa: PLR0913 - Orca's arguments
        self,
        data: Data,
        epochs: int = 1,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        validation_data: Data | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        class_weight: Mapping[int, float] | None = None,
        **orca: Never,
    ) -> dict[str, list[float]]:
        """Train from where the last fit ended; return this fit's metrics, a value per epoch.

        After a failed fit, the next one continues from what the servers of `model_dir` had saved,
        and trains all of its epochs. If the failed fit had fresh servers (as the first fit has, and
        the first after load()), the next one starts over, unless load_latest_checkpoint() comes
        first. After that call, a fit of a DataFrame or path trains the remaining epochs, and a fit
        of a function trains all of its epochs.

        Args:
            data: a DataFrame; a path of files in Spark's default format; or a function
                `creator(config, batch_size)`, called in every worker, that returns a batched
                tf.data.Dataset. Several workers take turns in its batches.
            epochs: passes over the data.
            batch_size: rows per step of all workers together, at least one each; a warning says if
                it is not a multiple of their number.
            feature_cols: columns of the features of a DataFrame or path.
            label_cols: columns of the labels of a DataFrame or path.
            validation_data: validates each epoch; of the same kind as data. Each worker validates
                all rows that a function returns.
            callbacks: passed to Keras' fit in every worker; Keras callbacks that write files only
                in the first one.
            class_weight: weight by class, as in Keras' fit.
            **orca: as in from_keras.

        Raises:
            SettingsError: there is no model; data, columns or settings are invalid; or, with
                servers and model_dir, a DataFrame or path is within foreachBatch; before any node
                starts. Or model_dir takes no model after the fit; the estimator then has the model.
            NotCompiled: load() has read a model that was never compiled; before any node starts.
        """
        refuse("fit", orca)
        self._check_has_model()
        number = 0 if self._model_dir is None else model_files.take_number(self._model_dir)
        settings = self._of_fit(number, epochs, batch_size, callbacks, class_weight)
        try:
            if callable(data):
                made = self._makers(data, validation_data, settings)
                found = fit_made(active_context(), made[0], self._recipe, settings, made[1])
            else:
                plan = _plan_of(feature_cols, label_cols)
                frames = _frames(data, validation_data)
                found = fit(frames[0], plan, self._recipe, settings, frames[1])
        except BaseException:
            self._look_behind()
            raise
        self._take(found, number, settings)
        return found.history

    def evaluate(
        self,
        data: Data,
        batch_size: int = 32,
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        **orca: Never,
    ) -> dict[str, float]:
        """Return the loss and the compiled metrics, as Keras' evaluate does.

        Args:
            data: as for `fit`.
            batch_size: rows per step.
            feature_cols: columns of the features of a DataFrame or path.
            label_cols: columns of the labels of a DataFrame or path.
            **orca: as in from_keras.

        Raises:
            SettingsError: there is no trained model yet, or data or columns are invalid.
            NotCompiled: load() has read a model that was never compiled.
        """
        refuse("evaluate", orca)
        recipe = self._trained()
        settings = dataclasses.replace(self._settings, batch_size=check_batch_size(batch_size))
        recipe.check_compiled(trains=False)
        if callable(data):
            make = self._maker(data, batch_size)
            return evaluate_made(active_context(), make, recipe, settings)
        plan = _plan_of(feature_cols, label_cols)
        frame = _frame(data)
        return evaluate(frame, plan, self._described(frame), settings)

    def predict(
        self,
        data: DataFrame | str,
        feature_cols: str | Sequence[str] | None = None,
        output_cols: str | Sequence[str] | None = None,
        batch_size: int | None = None,
        **orca: Never,
    ) -> DataFrame:
        """Return the DataFrame with the model's outputs as additional columns.

        Args:
            data: a DataFrame or a path.
            feature_cols: columns of the features.
            output_cols: a name per output; None: "prediction", or the outputs' own names.
            batch_size: rows that the model takes at once; None: 1024.
            **orca: as in from_keras.

        Raises:
            SettingsError: there is no trained model yet, columns do not fit it, or batch_size is
                below 1.
        """
        refuse("predict", orca)
        frame = _frame(data, _ROWS)
        columns = named("feature_cols", feature_cols)
        num_rows = check_batch_size(BATCH_SIZE if batch_size is None else batch_size)
        self._trained()
        signature = self._read(frame)
        outputs = list(signature.outputs)
        names = named("output_cols", output_cols) or (
            (PREDICTION,) if len(outputs) == 1 else tuple(outputs)
        )
        if len(names) != len(outputs):
            raise SettingsError(
                f"output_cols={list(names)}, but the model has the outputs {outputs}. Name one "
                "column for each, in this order"
            )
        filled = map(OutputColumn, outputs, in_order("output_cols", names, "output", outputs))
        return predicted(frame, predictor_of(signature, columns, filled, num_rows))

    def shutdown(self) -> None:
        """Do nothing: each call has ended its own cluster. Orca programs end with this call."""

    def get_model(self) -> keras.Model:
        """Return the compiled Keras model."""
        return model_of(self._trained().content)

    def save(self, path: str, **orca: Never) -> None:
        """Write the model as a `.keras` file; a warning says if the name ends otherwise.

        Args:
            path: path or URL on the driver's side.
            **orca: as in from_keras.
        """
        refuse("save", orca)
        model_files.write_model(path, self._trained().content)
        if not os.fspath(path).endswith(".keras"):
            warnings.warn(
                f"the model is at {path} as a .keras file. load() reads it, but "
                "keras.models.load_model only reads names that end in .keras. Rename it, or save "
                "under such a name",
                stacklevel=2,
            )

    def load(self, path: str, **orca: Never) -> None:
        """Take the model of a `.keras` file; the next fit starts from it.

        Args:
            path: path or URL on the driver's side.
            **orca: as in from_keras.

        Raises:
            SettingsError: there is no such file.
        """
        refuse("load", orca)
        content = model_files.read_model(path)
        check_file(content, path)
        self._begin_with(content)

    def _begin_with(self, content: bytes) -> None:
        # It may be another model: the previous signature no longer holds.
        self._recipe = ModelRecipe(content=content, has_trained=True)
        self._signature = None
        self._servers = self._model = None
        self._is_behind = self._resumes_epochs = False

    def load_latest_checkpoint(self) -> None:
        """Take the newest model of `model_dir`; the next fit continues from what its servers saved.

        After an interrupted fit only the servers have saved, and the next fit continues from
        there. For a DataFrame or path it skips the epochs that were trained: call it with that
        fit's data and epochs. For a function it trains all epochs: pass the remaining number. Until
        it has ended, there is no model to predict with.

        Raises:
            SettingsError: there is no model_dir, or nothing in it.
        """
        if self._model_dir is None:
            raise SettingsError(
                "load_latest_checkpoint() needs from_keras(model_dir=...), where fits save"
            )
        found = model_files.newest_state(self._model_dir)
        if found.servers is not None and not self._settings.servers:
            raise SettingsError(
                f"{self._model_dir} has the state of parameter servers; continue with "
                "from_keras(cluster_size=2 or more), or load() its newest model"
            )
        if found.model:
            file = model_files.fit_file(self._model_dir, found.model)
            self._begin_with(model_files.read_model(file))
        self._servers, self._model = found.servers, found.model or None
        self._num_fits = found.model
        self._is_behind = self._resumes_epochs = found.is_behind

    def _of_fit(
        self,
        number: int,
        epochs: int,
        batch_size: int,
        callbacks: Sequence[Any] | None,
        class_weight: Mapping[int, float] | None,
    ) -> FitSettings:
        check_batch_size(batch_size)
        settings, directory = self._settings, None
        workers = settings.cluster_size - settings.servers
        if self._model_dir is not None and settings.servers:
            directory = model_files.servers_dir(self._model_dir, self._servers or number)
        return dataclasses.replace(
            settings,
            epochs=epochs,
            batch_size=_of_each(batch_size, workers),
            seed=_of_next(settings.seed, self._num_fits, workers),
            callbacks=() if callbacks is None else callbacks,
            class_weight=class_weight,
            checkpoint_dir=directory,
            resume=directory is not None and self._servers is not None,
            resume_epochs=self._resumes_epochs,
            keeps_epochs=directory is not None,
        )

    def _makers(self, data: Creator, held: Any, settings: FitSettings) -> list[Any]:
        """Return what makes the data of a fit, and what makes those that validate, or None."""
        if held is not None and not callable(held):
            raise _unknown("validation_data", f"{_FUNCTION}, because data is one", held)
        if self._resumes_epochs:
            warnings.warn(
                f"this fit continues from {settings.checkpoint_dir} and would train all "
                f"epochs={settings.epochs}. For data from a function, the epochs that the "
                "interrupted fit trained are unknown. Pass the number that remains",
                stacklevel=3,
            )
        return [each and self._maker(each, settings.batch_size) for each in (data, held)]

    def _take(self, found: FitResult, number: int, settings: FitSettings) -> None:
        """A fit has ended: continue with its model, and write it."""
        self._recipe = dataclasses.replace(
            self._recipe, content=found.content, model_fn=None, has_trained=True
        )
        self._signature = None
        self.history = _joined(self.history, found.history)
        self._num_fits += 1
        if self._resumes_epochs and not found.history:
            warnings.warn(
                f"this fit has trained none of its epochs={settings.epochs}: the interrupted one, "
                f"whose servers saved in {settings.checkpoint_dir}, had trained as many, or a "
                "callback had stopped it. The estimator has its model now. To train other data or "
                "further epochs, call fit again",
                stacklevel=3,
            )
        self._is_behind = self._resumes_epochs = False
        if self._model_dir is not None:
            servers = (self._servers or number) if settings.checkpoint_dir else None
            self._servers = self._model = None  # in case the model is not written
            try:
                self._servers = model_files.write_fit(
                    self._model_dir, number, found.content, servers, found.updates
                )
            except OSError as error:
                raise SettingsError(
                    "the fit has ended and this estimator has its model, but model_dir="
                    f"{self._model_dir} took none: {error}. save(path) writes it elsewhere and "
                    "history has the metrics. The next fit starts with the model and fresh "
                    "servers"
                ) from error
            self._model = number

    def _look_behind(self) -> None:
        """A fit has failed: find whether its servers have saved after the last model."""
        if self._is_behind or self._model_dir is None:
            return
        if self._servers is None or self._model is None:
            return
        with contextlib.suppress(SettingsError, OSError):  # the fit's own error is the one to see
            found = model_files.state_of(self._model_dir, self._model)
            self._servers, self._is_behind = found.servers, found.is_behind

    def _read(self, frame: Any) -> ModelSignature:
        """Return the signature of the trained model, read once."""
        if self._signature is None:
            source = ModelSource(content=self._recipe.content)
            self._signature = read_signature(frame.sparkSession, source)
        return self._signature

    def _described(self, frame: Any) -> ModelRecipe:
        """Return the recipe of a trained model, with its signature."""
        if self._recipe.inputs:
            return self._recipe
        with contextlib.suppress(SettingsError):  # without fixed inputs nothing can be checked here
            return described(self._recipe, self._read(frame))
        return self._recipe

    def _maker(self, creator: Any, batch_size: int) -> Callable[[], Any]:
        return functools.partial(creator, self._config, batch_size)

    def _check_has_model(self) -> None:
        if self._recipe.content or self._recipe.model_fn is not None:
            return
        if self._is_behind:
            raise SettingsError(
                f"{self._model_dir} has the state of servers, but no fit there has left a model. "
                "Pass from_keras(model=… or model_creator=…) the model of the fit that was "
                "interrupted, then call load_latest_checkpoint() and fit()"
            )
        raise SettingsError(_NO_MODEL)

    def _trained(self) -> ModelRecipe:
        self._check_has_model()
        if self._is_behind:
            raise SettingsError(
                f"the newest state of {self._model_dir} is a checkpoint of servers, from a fit "
                "that did not end. Call fit(), which continues from there, or load() an older model"
            )
        if not self._recipe.content:
            raise SettingsError(
                "the model of model_creator exists only in workers. Call fit() or load() first"
            )
        return self._recipe


def _config_of(given: object) -> dict[str, Any]:
    """Return the `config` of from_keras; None: an empty one. Raises SettingsError for others."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SettingsError(
            "config must be a dict, the argument of model_creator and data functions, got "
            f"{type(given).__name__}. Pass settings of the cluster as cluster_config="
        )
    return dict(given)


def _recipe_of(model: Any, creator: Any, config: Mapping[str, Any]) -> ModelRecipe:
    """Return the recipe of from_keras; an empty one if load() will provide the model.

    Raises:
        SettingsError: both are given, or one is something else.
    """
    if model is None and creator is None:
        return ModelRecipe()
    if creator is not None and not callable(creator):
        raise SettingsError(f"model_creator must be a function of config, got {creator!r}")
    make = None if creator is None else functools.partial(creator, config)
    return recipe_of(model, make, maker="model_creator")


def _joined(first: History, second: History) -> History:
    """Return the columns of two fits in order, NaN where a fit lacks the metric."""
    lengths = [max(map(len, each.values()), default=0) for each in (first, second)]
    gaps = [[math.nan] * length for length in lengths]
    names = dict.fromkeys((*first, *second))
    return {name: first.get(name, gaps[0]) + second.get(name, gaps[1]) for name in names}


def _plan_of(
    features: str | Sequence[str] | None, labels: str | Sequence[str] | None
) -> ColumnPlan:
    """Return the columns of a call.

    Args:
        features: its feature_cols.
        labels: its label_cols.
    """
    return ColumnPlan(
        features=named("feature_cols", features), labels=named("label_cols", labels), words=_WORDS
    )


def _of_each(batch_size: int, workers: int) -> int:
    """Return the rows of one worker's step.

    Raises:
        SettingsError: there is not one for each worker.
    """
    rows = batch_size // workers
    if not rows:
        raise SettingsError(
            f"batch_size={batch_size} is for all {workers} workers together, and each needs at "
            f"least one row. Pass {workers} or more, or a smaller cluster_size"
        )
    if rows * workers != batch_size:
        warnings.warn(
            f"batch_size={batch_size} is for all {workers} workers together: each takes {rows} "
            f"rows, so a step has {rows * workers}. Pass a multiple of {workers} to use all",
            stacklevel=4,
        )
    return rows


def _of_next(seed: int | None, num_fits: int, workers: int) -> int | None:
    """Return the seed of a fit that follows others.

    Programs call fit once per epoch. With one seed, dropout would leave out the same numbers of a
    row each time, which the model learns by heart.

    Args:
        seed: seed of the first fit.
        num_fits: fits before this one.
        workers: workers of each fit; each adds its rank.
    """
    return None if seed is None else (seed + num_fits * workers) % (LAST_SEED + 2 - workers)


def _frame(
    data: Any, kinds: str = f"a DataFrame, a path or {_FUNCTION}", name: str = "data"
) -> Any:
    """Return data as a DataFrame.

    Args:
        data: the user's data.
        kinds: what the data may be, for the error.
        name: name of the argument.

    Raises:
        SettingsError: data is something else, or a DataFrame of Spark Connect.
    """
    if isinstance(data, str):
        return active_session().read.load(data)
    if is_frame(data):
        check_classic(data)  # before its session reads the model
        return data
    raise _unknown(name, kinds, data)


def _frames(data: Any, held: Any) -> list[Any]:
    """Return the data of a fit as a DataFrame, and those that validate, or None.

    Raises:
        SettingsError: data is something else.
    """
    found = [_frame(data), None]
    if held is not None:
        found[1] = _frame(held, f"{_ROWS}, because data is one", "validation_data")
    return found


def _unknown(name: str, kinds: str, data: Any) -> SettingsError:
    kind, call = type(data), as_dataframe(data)
    advice = f" of {kind.__module__}; use {call}" if call else ""
    return SettingsError(f"{name} must be {kinds}; got {kind.__name__}{advice}")
