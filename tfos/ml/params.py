"""Params of KerasEstimator and KerasModel.

Covers: the Params, their setters and getters, the columns that they name.
Does not: check columns against a DataFrame (tfos.estimators.columns).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan
from tfos.predict.column import BATCH_SIZE
from tfos.predict.fitting import in_order
from tfos.spark.param_accessors import accessors, getter, param, setter

DEFAULTS: dict[str, Any] = {
    "featuresCol": "features",
    "featuresCols": None,
    "labelCol": "label",
    "labelCols": None,
    "predictionCol": "prediction",
    "predictionCols": None,
    "classCol": "",
    "weightCol": "",
    "validationCol": "",
    "validationSplit": 0.0,
    "batchSize": 32,
    "predictBatchSize": BATCH_SIZE,
    "epochs": 1,
    "learningRate": 0.0,
    "seed": 0,
    "clusterSize": 1,
    "numPS": -1,
    "consistency": "async",
    "stalenessBound": -1,
    "checkpointDir": "",
    "resume": False,
    "feedTimeout": 600.0,
    "exactlyOnce": False,
    "verbose": True,
}
"""The Params with their defaults."""


class KerasParams(Params):  # type: ignore[misc]  # pyspark is not checked
    """Params of KerasEstimator, and of KerasModel as its fit had them."""

    featuresCol = param(
        "featuresCol", "column of the features, if there is one", TypeConverters.toString
    )
    featuresCols = param(
        "featuresCols",
        "columns of the features: one per input of the model, or side by side",
        TypeConverters.toListString,
    )
    labelCol = param("labelCol", "column of the labels, if there is one", TypeConverters.toString)
    labelCols = param(
        "labelCols",
        "columns of the labels: one per output of the model, or side by side",
        TypeConverters.toListString,
    )
    predictionCol = param(
        "predictionCol", "output column of a model with one output", TypeConverters.toString
    )
    predictionCols = param(
        "predictionCols",
        "output columns of a model with several outputs, one per output; not set: the outputs' own "
        "names",
        TypeConverters.toListString,
    )
    classCol = param(
        "classCol",
        "column of the class, a double: the position of the largest of several numbers, or "
        "whether a single number, a probability, is above 0.5; empty: none",
        TypeConverters.toString,
    )
    weightCol = param(
        "weightCol", "column of the sample weights; empty: none", TypeConverters.toString
    )
    batchSize = param("batchSize", "rows of one worker's step", TypeConverters.toInt)
    predictBatchSize = param(
        "predictBatchSize", "rows that the model takes at once in transform", TypeConverters.toInt
    )
    verbose = param("verbose", "whether progress is shown", TypeConverters.toBoolean)
    validationCol = param(
        "validationCol",
        "column that is true where a row validates; empty: none",
        TypeConverters.toString,
    )
    validationSplit = param(
        "validationSplit", "share of the rows that validate", TypeConverters.toFloat
    )
    epochs = param("epochs", "passes over the rows", TypeConverters.toInt)
    learningRate = param(
        "learningRate",
        "replaces the compiled optimizer's rate; 0: keeps it",
        TypeConverters.toFloat,
    )
    seed = param(
        "seed",
        "seed of the shuffle and of the workers' Keras; -1: rows as they come",
        TypeConverters.toInt,
    )
    clusterSize = param(
        "clusterSize", "nodes, servers included; one task slot each", TypeConverters.toInt
    )
    numPS = param(
        "numPS",
        "parameter servers among the nodes; -1: one beside several workers, none beside one node",
        TypeConverters.toInt,
    )
    consistency = param(
        "consistency", "mode of ctx.distribute: async, sync, ssp or hybrid", TypeConverters.toString
    )
    stalenessBound = param(
        "stalenessBound",
        "steps that a worker may be ahead of the slowest, for ssp; -1: not set",
        TypeConverters.toInt,
    )
    checkpointDir = param(
        "checkpointDir",
        "where the servers save while they train; empty: they do not save",
        TypeConverters.toString,
    )
    resume = param(
        "resume",
        "whether a fit continues from the newest checkpoint in checkpointDir, of another program, "
        "without the epochs that an interrupted fit had trained",
        TypeConverters.toBoolean,
    )
    feedTimeout = param(
        "feedTimeout", "seconds in which no worker takes a row", TypeConverters.toFloat
    )
    exactlyOnce = param(
        "exactlyOnce",
        "whether a task that Spark repeats skips the rows that it fed before; correct only "
        "if a partition has the same rows in the same order again",
        TypeConverters.toBoolean,
    )

    setFeaturesCol, getFeaturesCol = accessors("featuresCol", str)
    setFeaturesCols, getFeaturesCols = accessors("featuresCols", list[str])
    setLabelCol, getLabelCol = accessors("labelCol", str)
    setLabelCols, getLabelCols = accessors("labelCols", list[str])
    setPredictionCol, getPredictionCol = accessors("predictionCol", str)
    setPredictionCols, getPredictionCols = accessors("predictionCols", list[str])
    setClassCol, getClassCol = accessors("classCol", str)
    setWeightCol, getWeightCol = accessors("weightCol", str)
    setBatchSize, getBatchSize = accessors("batchSize", int)
    setPredictBatchSize, getPredictBatchSize = accessors("predictBatchSize", int)
    setVerbose, getVerbose = accessors("verbose", bool)
    getValidationCol = getter("validationCol", str)
    getValidationSplit = getter("validationSplit", float)
    getEpochs = getter("epochs", int)
    getLearningRate = getter("learningRate", float)
    getSeed = getter("seed", int)
    getClusterSize = getter("clusterSize", int)
    getNumPS = getter("numPS", int)
    getConsistency = getter("consistency", str)
    getStalenessBound = getter("stalenessBound", int)
    getCheckpointDir = getter("checkpointDir", str)
    getResume = getter("resume", bool)
    getFeedTimeout = getter("feedTimeout", float)
    getExactlyOnce = getter("exactlyOnce", bool)

    def column_plan(self) -> ColumnPlan:
        """Return the columns of features, labels and weights.

        Raises:
            SettingsError: both the Param for one column and the one for several are set.
        """
        several = {"features": self.featuresCols, "labels": self.labelCols}
        one = {"features": self.featuresCol, "labels": self.labelCol}
        return ColumnPlan(
            features=self._either(self.featuresCol, self.featuresCols),
            labels=self._either(self.labelCol, self.labelCols),
            weight=self.getWeightCol() or None,
            words={role: one[role].name for role in one if not self.isSet(several[role])},
        )

    def result_columns(self, outputs: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the model's outputs fill, one per output, in the outputs' order.

        Args:
            outputs: names of the model's outputs; empty: not known yet.
            given: columns of the DataFrame, which the results must not have.

        Raises:
            SettingsError: the number of columns differs from that of outputs, a column has the name
                of another output, several outputs would have a class, or the DataFrame has
                the name already.
        """
        named = self._either(self.predictionCol, self.predictionCols)
        class_column = self.getClassCol()
        is_named = self.isSet(self.predictionCols)
        if len(outputs) > 1 and not is_named:
            named = tuple(outputs)
        if outputs and len(named) != len(outputs):
            raise SettingsError(
                f"predictionCols={list(named)}, but the model has the outputs {list(outputs)}. "
                "Name one column per output, in this order"
            )
        named = in_order("predictionCols", named, "output", outputs)
        if class_column and len(named) > 1:
            raise SettingsError(
                f"classCol={class_column!r}, but the model has the outputs "
                f"{list(outputs or named)}. Only a model with one output has a class"
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
                f"{list(given)}. Choose another name with predictionCol, predictionCols (several "
                "outputs) or classCol"
            )
        taken.add(name.lower())


class FitParams(KerasParams):
    """Setters of what only a fit reads; on a KerasModel they would have no effect."""

    setValidationCol = setter("validationCol", str)
    setValidationSplit = setter("validationSplit", float)
    setEpochs = setter("epochs", int)
    setLearningRate = setter("learningRate", float)
    setSeed = setter("seed", int)
    setClusterSize = setter("clusterSize", int)
    setNumPS = setter("numPS", int)
    setConsistency = setter("consistency", str)
    setStalenessBound = setter("stalenessBound", int)
    setCheckpointDir = setter("checkpointDir", str)
    setResume = setter("resume", bool)
    setFeedTimeout = setter("feedTimeout", float)
    setExactlyOnce = setter("exactlyOnce", bool)
