"""KerasEstimator: fits a Keras model on a DataFrame with workers and parameter servers.

Covers: the estimator of spark.ml: Params, fit, copy, persistence.
Does not: check, train (tfos.estimators.training) or write (tfos.ml.persistence).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from feeding.columnar.batch import check_batch_size
from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.recipe import recipe_of
from tfos.estimators.training import FitSettings, fit
from tfos.feed.dataframe import check_fed
from tfos.ml.model import KerasModel
from tfos.ml.params import DEFAULTS, FitParams
from tfos.ml.persistence import EstimatorReader, EstimatorWriter

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


class KerasEstimator(
    Estimator[KerasModel],  # type: ignore[misc]  # pyspark is not checked
    FitParams,
    MLWritable,  # type: ignore[misc]  # pyspark is not checked
    MLReadable[Any],  # type: ignore[misc]  # pyspark is not checked
):
    """Fits a compiled Keras model on the columns of a DataFrame.

    Args:
        model: compiled, with its weights, from which each fit begins.
        model_fn: makes the compiled model in each worker, instead of `model`.
        custom_objects: classes and functions of yours that the saved model names.
        callbacks: passed to Keras' fit in every worker; or a function that makes them there. Those
            of Keras that write files run in the first worker alone.
        class_weight: weight by class, as in Keras' fit.
        config: further settings of each fit's cluster, but for checkpoints; None: the defaults.
        featuresCol: column of the features; default "features".
        featuresCols: several columns of features: one per input of the model, or side by side.
        labelCol: column of the labels; default "label".
        labelCols: several columns of labels: one per output of the model, or side by side.
        predictionCol: column that the model fills; default "prediction".
        predictionCols: for a model with several outputs, a column per output; default: the outputs'
            own names.
        classCol: column of the class, a double: the position of the largest of several numbers, or
            whether a single number, a probability, is above 0.5; "": no such column.
        weightCol: column of the sample weights.
        validationCol: column that is true where a row validates.
        validationSplit: share of the rows that validate.
        batchSize: rows of one worker's step; default 32.
        predictBatchSize: rows that the trained model takes at once in transform; default 1024.
        epochs: passes over the rows; default 1.
        learningRate: replaces that of the compiled optimizer.
        seed: seed of the shuffle and of the workers' Keras; default 0. -1: rows as they come.
        clusterSize: nodes, servers included; one task slot each; default 1.
        numPS: parameter servers among them; -1: one beside several workers.
        consistency: mode of ctx.distribute; default "async".
        stalenessBound: steps that a worker may be ahead of the slowest, for ssp.
        checkpointDir: where the servers save while they train.
        resume: continue from the newest checkpoint there, of a fit of another program or of a
            failed fit, without the epochs that it had trained. Within a program, a second fit
            cannot be told from a tuner's next fold.
        feedTimeout: seconds in which no worker takes a row; default 600.
        exactlyOnce: whether a task that Spark repeats skips the rows that it fed before; default
            False. Correct only if Spark computes a partition with the same rows in the same order.
        verbose: show progress.

    Raises:
        SettingsError: neither or both of model and model_fn are given, or a model that is not
            compiled.
    """

    def __init__(  # noqa: PLR0913 - Params of spark.ml, by keyword
        self,
        model: keras.Model | None = None,
        *,
        model_fn: Callable[[], keras.Model] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        callbacks: Sequence[keras.callbacks.Callback]
        | Callable[[], Sequence[keras.callbacks.Callback]]
        | None = None,
        class_weight: Mapping[int, float] | None = None,
        config: ClusterConfig | None = None,
        featuresCol: str | None = None,
        featuresCols: Sequence[str] | None = None,
        labelCol: str | None = None,
        labelCols: Sequence[str] | None = None,
        predictionCol: str | None = None,
        predictionCols: Sequence[str] | None = None,
        classCol: str | None = None,
        weightCol: str | None = None,
        validationCol: str | None = None,
        validationSplit: float | None = None,
        batchSize: int | None = None,
        predictBatchSize: int | None = None,
        epochs: int | None = None,
        learningRate: float | None = None,
        seed: int | None = None,
        clusterSize: int | None = None,
        numPS: int | None = None,
        consistency: str | None = None,
        stalenessBound: int | None = None,
        checkpointDir: str | None = None,
        resume: bool | None = None,
        feedTimeout: float | None = None,
        exactlyOnce: bool | None = None,
        verbose: bool | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in DEFAULTS}
        super().__init__()
        self.recipe = recipe_of(model, model_fn, custom_objects)
        self.callbacks = () if callbacks is None else callbacks
        self.class_weight = class_weight
        self.config = config
        self._setDefault(**DEFAULTS)
        self._set(**{name: value for name, value in given.items() if value is not None})

    def _fit(self, dataset: DataFrame) -> KerasModel:
        check_fed(dataset)
        plan, settings = self.column_plan(), self._settings()
        self._check_results(plan.labels, dataset.columns)
        check_batch_size(self.getPredictBatchSize(), "predictBatchSize")
        with _alone_in(self.getCheckpointDir()):
            found = fit(dataset, plan, self.recipe, settings)
        model = KerasModel(found.content, self.recipe.custom_objects, found.history)
        model.config = self.config
        model._resetUid(self.uid)  # as in spark.ml: transform(df, params) takes our Params, too
        return self._copyValues(model)  # type: ignore[no-any-return]

    def column_plan(self) -> ColumnPlan:
        """Return the columns of a fit.

        Raises:
            SettingsError: both the Param for one column and the one for several are set.
        """
        return dataclasses.replace(
            super().column_plan(), validation=self.getValidationCol() or None
        )

    def _check_results(self, labels: Sequence[str], given: Sequence[str]) -> None:
        """Refuse result columns that the rows already have; outputs may be named like labels."""
        outputs = self.recipe.outputs
        if len(outputs) < 2 or self.isSet(self.predictionCols):
            self.result_columns(outputs, given)
            return
        self.result_columns(outputs, [name for name in given if name not in labels])
        taken = {name.lower() for name in labels}
        if same := [name for name in outputs if name.lower() in taken]:
            warnings.warn(
                f"outputs {same} are named like label columns, so the fitted model transforms only "
                "rows without these columns. CrossValidator and TrainValidationSplit transform "
                "rows with labels, and would fail after the training. Set predictionCols "
                "for them",
                stacklevel=4,
            )

    def _settings(self) -> FitSettings:
        return FitSettings(
            batch_size=self.getBatchSize(),
            epochs=self.getEpochs(),
            cluster_size=self.getClusterSize(),
            num_ps=_given(self.getNumPS()),
            consistency=self.getConsistency(),
            staleness_bound=_given(self.getStalenessBound()),
            seed=_given(self.getSeed()),
            validation_split=self.getValidationSplit(),
            learning_rate=self.getLearningRate() or None,
            callbacks=self.callbacks,
            class_weight=self.class_weight,
            checkpoint_dir=self.getCheckpointDir() or None,
            resume=self.getResume(),
            feed_timeout_s=self.getFeedTimeout(),
            exactly_once=self.getExactlyOnce(),
            verbose=self.getVerbose(),
            config=self.config,
        )

    def write(self) -> MLWriter:
        """Return the writer of spark.ml: the model as a file, functions by name."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader of spark.ml."""
        return EstimatorReader(cls)


def _given(value: int) -> int | None:
    """Return the number of a Param; None: it is -1, which means not set."""
    return None if value == -1 else value


_directories: dict[str, str] = {}
"""State of the fit of each checkpointDir. A tuner gives all its fits the same directory."""
_lock = threading.Lock()


@contextlib.contextmanager
def _alone_in(directory: str) -> Iterator[None]:
    """Hold a directory of checkpoints for one fit; after a failure another fit continues there.

    Args:
        directory: directory of the checkpoints; empty: none.

    Raises:
        SettingsError: another fit there trains, waits for slots, or has ended.
    """
    if not directory:
        yield
        return
    with _lock:
        if directory in _directories:
            raise SettingsError(
                f"checkpointDir={directory!r}: a fit of this program {_directories[directory]} "
                "there, and this fit would continue from its weights, as a tuner's next fold "
                "would. Name another directory. A tuner needs none: the fits of all folds would "
                "share it. To continue there with resume=True, or to reuse the emptied directory, "
                "run the fit in another program (in a notebook, restart its kernel). To continue "
                "here from the weights alone, with a fresh optimizer, fit "
                "KerasEstimator(fitted.keras_model()) with another directory"
            )
        _directories[directory] = "trains"
    try:
        yield
    except BaseException:
        del _directories[directory]
        raise
    _directories[directory] = "has ended"
