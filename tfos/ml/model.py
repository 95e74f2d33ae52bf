"""KerasModel: a trained Keras model that fills columns of DataFrames; what KerasEstimator returns.

Covers: the transformer of spark.ml: Params, transform, evaluate, copy, persistence.
Does not: predict (tfos.predict), write (tfos.ml.persistence).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from feeding.columnar.batch import check_batch_size
from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.estimators.recipe import ModelRecipe, described, model_of
from tfos.estimators.training import FitSettings, evaluate
from tfos.feed.dataframe import check_classic, check_fed
from tfos.ml.params import DEFAULTS, KerasParams
from tfos.ml.persistence import ModelFileReader, ModelFileWriter
from tfos.predict.column import predicted, read_signature
from tfos.predict.predictor import OutputColumn, form_of, predictor_of
from tfos.predict.signature import ModelSignature, ModelSource

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession


class KerasModel(
    Model,  # type: ignore[misc]  # pyspark is not checked
    KerasParams,
    MLWritable,  # type: ignore[misc]  # pyspark is not checked
    MLReadable[Any],  # type: ignore[misc]  # pyspark is not checked
):
    """A trained Keras model as a transformer.

    Attributes:
        content: bytes of its `.keras` file.
        history: a value per epoch of its fit, the newest 10,000, by metric.
        config: that of its estimator, for `evaluate`; it is not saved, and may be set.

    Args:
        content: bytes of a `.keras` file.
        custom_objects: classes and functions of yours that the file names.
        history: metrics of its fit, a value per epoch.
    """

    def __init__(
        self,
        content: bytes,
        custom_objects: Mapping[str, Any] | None = None,
        history: Mapping[str, list[float]] | None = None,
    ) -> None:
        super().__init__()
        self.content = content
        self.custom_objects = dict(custom_objects or {})
        self.history = {name: list(values) for name, values in (history or {}).items()}
        self.config: ClusterConfig | None = None
        self._signature: ModelSignature | None = None
        self._setDefault(**DEFAULTS)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_classic(dataset)
        columns = self.column_plan().features
        num_rows = check_batch_size(self.getPredictBatchSize(), "predictBatchSize")
        signature = self._read(dataset.sparkSession)
        outputs = self._outputs(signature, dataset.columns)
        return predicted(dataset, predictor_of(signature, columns, outputs, num_rows))

    def evaluate(self, dataset: DataFrame) -> dict[str, float]:
        """Return the loss and the compiled metrics on a DataFrame, as Keras' evaluate does.

        Args:
            dataset: has the columns of features and labels, and of weights if `weightCol` is set.

        Raises:
            SettingsError: invalid columns or types, or an empty DataFrame.
            NotCompiled: the file has a model that was never compiled; before any node starts.
        """
        check_fed(dataset)
        recipe = ModelRecipe(content=self.content, custom_objects=self.custom_objects)
        recipe.check_compiled(trains=False)
        with contextlib.suppress(SettingsError):  # without fixed inputs nothing can be checked here
            recipe = described(recipe, self._read(dataset.sparkSession))
        settings = FitSettings(
            batch_size=self.getBatchSize(), verbose=self.getVerbose(), config=self.config
        )
        return evaluate(dataset, self.column_plan(), recipe, settings)

    def keras_model(self) -> keras.Model:
        """Return the compiled Keras model."""
        return model_of(self.content, self.custom_objects)

    def write(self) -> MLWriter:
        """Return the writer of spark.ml: `model.keras` beside the metadata."""
        return ModelFileWriter(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader of spark.ml."""
        return ModelFileReader(cls)

    def _read(self, session: SparkSession) -> ModelSignature:
        if self._signature is None:
            source = ModelSource(content=self.content, custom_objects=self.custom_objects)
            self._signature = read_signature(session, source)
        return self._signature

    def _outputs(self, signature: ModelSignature, given: list[str]) -> tuple[OutputColumn, ...]:
        """Return the output columns; one number per row is a double, as Spark's evaluators expect.

        With predictionCols an int64 becomes a bigint, which holds all of them.
        """
        names = list(signature.outputs)
        columns = self.result_columns(names, given)
        if len(names) > 1:
            return tuple(map(OutputColumn, names, columns))
        info = signature.outputs[names[0]]
        form = form_of(info)
        if form == "number" and info.dtype == "int64" and self.isSet(self.predictionCols):
            form = "value"
        found = (OutputColumn(names[0], columns[0], form),)
        if not self.getClassCol():
            return found
        return (*found, OutputColumn(names[0], self.getClassCol(), "class"))
