"""Params of KerasEstimator and KerasModel.

Covers: the Params, their setters and getters, the columns that they name.
Does not: check columns against a DataFrame (tfos.estimators.columns).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from pyspark.ml.param import Param, Params, TypeConverters

from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan


def _param(name: str, doc: str, convert: Callable[[Any], Any]) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class ModelParams(Params):  # type: ignore[misc]  # pyspark is not checked
    """Params of both."""

    featuresCol = _param(
        "featuresCol", "column of the features, where it is one", TypeConverters.toString
    )
    featuresCols = _param(
        "featuresCols",
        "columns of the features: one per input of the model, or side by side",
        TypeConverters.toListString,
    )
    labelCol = _param("labelCol", "column of the labels, where it is one", TypeConverters.toString)
    labelCols = _param(
        "labelCols",
        "columns of the labels: one per output of the model, or side by side",
        TypeConverters.toListString,
    )
    predictionCol = _param(
        "predictionCol", "column of the output of a model with one", TypeConverters.toString
    )
    predictionCols = _param(
        "predictionCols",
        "columns of the outputs of a model with several, one per output in their order; not set: "
        "the outputs' own names",
        TypeConverters.toListString,
    )
    classCol = _param(
        "classCol",
        "column of the class, a double: the place of the largest of several numbers, or "
        "whether one number, a probability, is above 0.5; empty: none",
        TypeConverters.toString,
    )
    weightCol = _param(
        "weightCol", "column of the sample weights; empty: none", TypeConverters.toString
    )
    batchSize = _param("batchSize", "rows of one worker's step", TypeConverters.toInt)
    predictBatchSize = _param(
        "predictBatchSize", "rows that the model takes at once in transform", TypeConverters.toInt
    )
    verbose = _param("verbose", "whether progress is shown", TypeConverters.toBoolean)

    def setFeaturesCol(self, value: str) -> Self:
        """Set `featuresCol`, and return this object."""
        return self._set(featuresCol=value)  # type: ignore[no-any-return]

    def getFeaturesCol(self) -> str:
        """Return `featuresCol`."""
        found: str = self.getOrDefault(self.featuresCol)
        return found

    def setFeaturesCols(self, value: list[str]) -> Self:
        """Set `featuresCols`, and return this object."""
        return self._set(featuresCols=value)  # type: ignore[no-any-return]

    def getFeaturesCols(self) -> list[str]:
        """Return `featuresCols`."""
        found: list[str] = self.getOrDefault(self.featuresCols)
        return found

    def setLabelCol(self, value: str) -> Self:
        """Set `labelCol`, and return this object."""
        return self._set(labelCol=value)  # type: ignore[no-any-return]

    def getLabelCol(self) -> str:
        """Return `labelCol`."""
        found: str = self.getOrDefault(self.labelCol)
        return found

    def setLabelCols(self, value: list[str]) -> Self:
        """Set `labelCols`, and return this object."""
        return self._set(labelCols=value)  # type: ignore[no-any-return]

    def getLabelCols(self) -> list[str]:
        """Return `labelCols`."""
        found: list[str] = self.getOrDefault(self.labelCols)
        return found

    def setPredictionCol(self, value: str) -> Self:
        """Set `predictionCol`, and return this object."""
        return self._set(predictionCol=value)  # type: ignore[no-any-return]

    def getPredictionCol(self) -> str:
        """Return `predictionCol`."""
        found: str = self.getOrDefault(self.predictionCol)
        return found

    def setPredictionCols(self, value: list[str]) -> Self:
        """Set `predictionCols`, and return this object."""
        return self._set(predictionCols=value)  # type: ignore[no-any-return]

    def getPredictionCols(self) -> list[str]:
        """Return `predictionCols`."""
        found: list[str] = self.getOrDefault(self.predictionCols)
        return found

    def setClassCol(self, value: str) -> Self:
        """Set `classCol`, and return this object."""
        return self._set(classCol=value)  # type: ignore[no-any-return]

    def getClassCol(self) -> str:
        """Return `classCol`."""
        found: str = self.getOrDefault(self.classCol)
        return found

    def setWeightCol(self, value: str) -> Self:
        """Set `weightCol`, and return this object."""
        return self._set(weightCol=value)  # type: ignore[no-any-return]

    def getWeightCol(self) -> str:
        """Return `weightCol`."""
        found: str = self.getOrDefault(self.weightCol)
        return found

    def setBatchSize(self, value: int) -> Self:
        """Set `batchSize`, and return this object."""
        return self._set(batchSize=value)  # type: ignore[no-any-return]

    def getBatchSize(self) -> int:
        """Return `batchSize`."""
        found: int = self.getOrDefault(self.batchSize)
        return found

    def setPredictBatchSize(self, value: int) -> Self:
        """Set `predictBatchSize`, and return this object."""
        return self._set(predictBatchSize=value)  # type: ignore[no-any-return]

    def getPredictBatchSize(self) -> int:
        """Return `predictBatchSize`."""
        found: int = self.getOrDefault(self.predictBatchSize)
        return found

    def setVerbose(self, value: bool) -> Self:
        """Set `verbose`, and return this object."""
        return self._set(verbose=value)  # type: ignore[no-any-return]

    def getVerbose(self) -> bool:
        """Return `verbose`."""
        found: bool = self.getOrDefault(self.verbose)
        return found

    def column_plan(self) -> ColumnPlan:
        """Return the columns of features, labels and weights.

        Raises:
            SettingsError: one column and several are named for the same.
        """
        return ColumnPlan(
            features=self._either(self.featuresCol, self.featuresCols),
            labels=self._either(self.labelCol, self.labelCols),
            weight=self.getWeightCol() or None,
        )

    def result_columns(self, outputs: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the model's outputs fill, one per output.

        Args:
            outputs: of the model; empty: not known yet.
            given: columns of the DataFrame, which the results must not have.

        Raises:
            SettingsError: another number of columns than of outputs, a class of several outputs, or
                a name that the DataFrame has already.
        """
        named = self._either(self.predictionCol, self.predictionCols)
        class_column = self.getClassCol()
        is_named = self.isSet(self.predictionCols)
        if len(outputs) > 1 and not is_named:
            named = tuple(outputs)
        if outputs and len(named) != len(outputs):
            raise SettingsError(
                f"predictionCols={list(named)}: the model has the outputs {list(outputs)}; name "
                "one column per output, in this order"
            )
        if class_column and len(named) > 1:
            raise SettingsError(
                f"classCol={class_column!r}: the model has the outputs {list(outputs or named)}; a "
                "class is that of one output"
            )
        is_known = bool(outputs or is_named or class_column)
        _check_free([*named, *([class_column] if class_column else [])] if is_known else [], given)
        return named

    def _either(self, one: Param[str], several: Param[list[str]]) -> tuple[str, ...]:
        if not self.isSet(several):
            return (self.getOrDefault(one),)
        if self.isSet(one):
            raise SettingsError(
                f"{one.name}={self.getOrDefault(one)!r} and {several.name}="
                f"{self.getOrDefault(several)!r}; set one of them"
            )
        return tuple(self.getOrDefault(several))


def _check_free(names: Sequence[str], given: Sequence[str]) -> None:
    taken = {name.lower() for name in given}
    for name in names:
        if name.lower() in taken:
            raise SettingsError(
                f"the results have a column {name!r}, and so have the rows or another result: "
                f"{list(given)}; name it otherwise: predictionCol, predictionCols of several "
                "outputs, or classCol"
            )
        taken.add(name.lower())


class FitParams(ModelParams):
    """Params of KerasEstimator."""

    validationCol = _param(
        "validationCol",
        "column that is true where a row validates; empty: none",
        TypeConverters.toString,
    )
    validationSplit = _param(
        "validationSplit", "share of the rows that validate", TypeConverters.toFloat
    )
    epochs = _param("epochs", "passes over the rows", TypeConverters.toInt)
    learningRate = _param(
        "learningRate",
        "replaces that of the compiled optimizer; 0: does not",
        TypeConverters.toFloat,
    )
    seed = _param(
        "seed",
        "shuffles the rows, and is the seed of the workers' Keras; -1: rows as they come",
        TypeConverters.toInt,
    )
    clusterSize = _param(
        "clusterSize", "nodes, servers included; one task slot each", TypeConverters.toInt
    )
    numPS = _param(
        "numPS",
        "parameter servers among the nodes; -1: one beside several workers, none beside one node",
        TypeConverters.toInt,
    )
    consistency = _param(
        "consistency", "of ctx.distribute: async, sync, ssp or hybrid", TypeConverters.toString
    )
    stalenessBound = _param(
        "stalenessBound",
        "steps that a worker may be ahead of the slowest, of ssp; -1: another mode",
        TypeConverters.toInt,
    )
    checkpointDir = _param(
        "checkpointDir",
        "where the servers save while they train; empty: nowhere",
        TypeConverters.toString,
    )
    resume = _param(
        "resume",
        "whether a fit goes on from the newest checkpoint in checkpointDir",
        TypeConverters.toBoolean,
    )
    feedTimeout = _param(
        "feedTimeout", "seconds without any worker taking a row", TypeConverters.toFloat
    )
    exactlyOnce = _param(
        "exactlyOnce",
        "whether a task that Spark repeats skips the rows that it fed before, which is right only "
        "where a partition has the same rows in the same order again",
        TypeConverters.toBoolean,
    )

    def setValidationCol(self, value: str) -> Self:
        """Set `validationCol`, and return this object."""
        return self._set(validationCol=value)  # type: ignore[no-any-return]

    def getValidationCol(self) -> str:
        """Return `validationCol`."""
        found: str = self.getOrDefault(self.validationCol)
        return found

    def setValidationSplit(self, value: float) -> Self:
        """Set `validationSplit`, and return this object."""
        return self._set(validationSplit=value)  # type: ignore[no-any-return]

    def getValidationSplit(self) -> float:
        """Return `validationSplit`."""
        found: float = self.getOrDefault(self.validationSplit)
        return found

    def setEpochs(self, value: int) -> Self:
        """Set `epochs`, and return this object."""
        return self._set(epochs=value)  # type: ignore[no-any-return]

    def getEpochs(self) -> int:
        """Return `epochs`."""
        found: int = self.getOrDefault(self.epochs)
        return found

    def setLearningRate(self, value: float) -> Self:
        """Set `learningRate`, and return this object."""
        return self._set(learningRate=value)  # type: ignore[no-any-return]

    def getLearningRate(self) -> float:
        """Return `learningRate`."""
        found: float = self.getOrDefault(self.learningRate)
        return found

    def setSeed(self, value: int) -> Self:
        """Set `seed`, and return this object."""
        return self._set(seed=value)  # type: ignore[no-any-return]

    def getSeed(self) -> int:
        """Return `seed`."""
        found: int = self.getOrDefault(self.seed)
        return found

    def setClusterSize(self, value: int) -> Self:
        """Set `clusterSize`, and return this object."""
        return self._set(clusterSize=value)  # type: ignore[no-any-return]

    def getClusterSize(self) -> int:
        """Return `clusterSize`."""
        found: int = self.getOrDefault(self.clusterSize)
        return found

    def setNumPS(self, value: int) -> Self:
        """Set `numPS`, and return this object."""
        return self._set(numPS=value)  # type: ignore[no-any-return]

    def getNumPS(self) -> int:
        """Return `numPS`."""
        found: int = self.getOrDefault(self.numPS)
        return found

    def setConsistency(self, value: str) -> Self:
        """Set `consistency`, and return this object."""
        return self._set(consistency=value)  # type: ignore[no-any-return]

    def getConsistency(self) -> str:
        """Return `consistency`."""
        found: str = self.getOrDefault(self.consistency)
        return found

    def setStalenessBound(self, value: int) -> Self:
        """Set `stalenessBound`, and return this object."""
        return self._set(stalenessBound=value)  # type: ignore[no-any-return]

    def getStalenessBound(self) -> int:
        """Return `stalenessBound`."""
        found: int = self.getOrDefault(self.stalenessBound)
        return found

    def setCheckpointDir(self, value: str) -> Self:
        """Set `checkpointDir`, and return this object."""
        return self._set(checkpointDir=value)  # type: ignore[no-any-return]

    def getCheckpointDir(self) -> str:
        """Return `checkpointDir`."""
        found: str = self.getOrDefault(self.checkpointDir)
        return found

    def setResume(self, value: bool) -> Self:
        """Set `resume`, and return this object."""
        return self._set(resume=value)  # type: ignore[no-any-return]

    def getResume(self) -> bool:
        """Return `resume`."""
        found: bool = self.getOrDefault(self.resume)
        return found

    def setFeedTimeout(self, value: float) -> Self:
        """Set `feedTimeout`, and return this object."""
        return self._set(feedTimeout=value)  # type: ignore[no-any-return]

    def getFeedTimeout(self) -> float:
        """Return `feedTimeout`."""
        found: float = self.getOrDefault(self.feedTimeout)
        return found

    def setExactlyOnce(self, value: bool) -> Self:
        """Set `exactlyOnce`, and return this object."""
        return self._set(exactlyOnce=value)  # type: ignore[no-any-return]

    def getExactlyOnce(self) -> bool:
        """Return `exactlyOnce`."""
        found: bool = self.getOrDefault(self.exactlyOnce)
        return found

    def column_plan(self) -> ColumnPlan:
        """Return the columns of a fit.

        Raises:
            SettingsError: one column and several are named for the same.
        """
        return dataclasses.replace(
            super().column_plan(), validation=self.getValidationCol() or None
        )
