"""Params of the pipeline: a mixin for each, as spark.ml has them.

Covers: the Params, their conversion, the names of setters and getters; TFParams, which overlays
arguments.
Does not: have defaults: the estimator and the model set theirs.
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pyspark.ml.param import Params, TypeConverters

from tfos.config import InputMode
from tfos.spark.param_accessors import accessors, param
from tfos.tensorflowonspark.namespace import Namespace


def _to_dict(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a dict of names is needed, got {value!r} ({type(value).__name__})")
    return {str(name): str(each) for name, each in value.items()}


def _to_mode(value: Any) -> InputMode:
    try:
        return InputMode(value)
    except ValueError as error:
        raise TypeError(f"an InputMode is needed, got {value!r}") from error


class TFParams(Params):  # type: ignore[misc]  # pyspark is not checked
    """Base of classes with arguments and Params.

    Attributes:
        args: the user's arguments.
    """

    args: Any = None

    def merge_args_params(self) -> Namespace:
        """Return the arguments, overlaid with the Params that have a value."""
        merged = Namespace(copy.copy(self.args) if self.args is not None else {})
        for each in self.params:
            if self.isDefined(each):
                setattr(merged, each.name, self.getOrDefault(each))
        return merged


class HasBatchSize(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `batch_size`: rows per batch."""

    batch_size = param("batch_size", "rows per batch", TypeConverters.toInt)

    setBatchSize, getBatchSize = accessors("batch_size", int)


class HasClusterSize(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `cluster_size`: nodes of the cluster, servers included."""

    cluster_size = param(
        "cluster_size", "nodes of the cluster, servers included", TypeConverters.toInt
    )

    setClusterSize, getClusterSize = accessors("cluster_size", int)


class HasEpochs(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `epochs`: passes over the rows."""

    epochs = param("epochs", "how often the rows are fed", TypeConverters.toInt)

    setEpochs, getEpochs = accessors("epochs", int)


class HasGraceSecs(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `grace_secs`: seconds between the end of the feed and the stop of the nodes."""

    grace_secs = param(
        "grace_secs",
        "seconds between the end of the feed and the stop of the nodes",
        TypeConverters.toInt,
    )

    setGraceSecs, getGraceSecs = accessors("grace_secs", int)


class HasInputMapping(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `input_mapping`: column of the DataFrame to name of the input."""

    input_mapping = param("input_mapping", "column of the DataFrame to name of the input", _to_dict)

    setInputMapping, getInputMapping = accessors("input_mapping", dict[str, str])


class HasInputMode(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `input_mode`: InputMode.SPARK, the only mode."""

    input_mode = param("input_mode", "InputMode.SPARK, the only one", _to_mode)

    setInputMode, getInputMode = accessors("input_mode", InputMode)


class HasMasterNode(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `master_node`: role name of the chief."""

    master_node = param("master_node", "role name of the chief", TypeConverters.toString)

    setMasterNode, getMasterNode = accessors("master_node", str)


class HasModelDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `model_dir`: directory of checkpoints, for train_fn."""

    model_dir = param(
        "model_dir", "directory of checkpoints, for train_fn", TypeConverters.toString
    )

    setModelDir, getModelDir = accessors("model_dir", str)


class HasOutputMapping(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `output_mapping`: name of the output to column of the result."""

    output_mapping = param("output_mapping", "name of the output to column of the result", _to_dict)

    setOutputMapping, getOutputMapping = accessors("output_mapping", dict[str, str])


class HasProtocol(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `protocol`: grpc, the only protocol."""

    protocol = param("protocol", "grpc, the only one", TypeConverters.toString)

    setProtocol, getProtocol = accessors("protocol", str)


class HasReaders(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `readers`: readers of files, for train_fn."""

    readers = param("readers", "readers of files, for train_fn", TypeConverters.toInt)

    setReaders, getReaders = accessors("readers", int)


class HasSteps(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `steps`: steps to train, for train_fn."""

    steps = param("steps", "steps to train, for train_fn", TypeConverters.toInt)

    setSteps, getSteps = accessors("steps", int)


class HasTensorboard(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tensorboard`: whether TensorBoard runs."""

    tensorboard = param("tensorboard", "whether TensorBoard runs", TypeConverters.toBoolean)

    setTensorboard, getTensorboard = accessors("tensorboard", bool)


class HasTFRecordDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tfrecord_dir`: directory of TFRecord files, for train_fn."""

    tfrecord_dir = param(
        "tfrecord_dir", "directory of TFRecord files, for train_fn", TypeConverters.toString
    )

    setTFRecordDir, getTFRecordDir = accessors("tfrecord_dir", str, "TFRecordDir")


class HasExportDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `export_dir`: directory of the SavedModel."""

    export_dir = param("export_dir", "directory of the SavedModel", TypeConverters.toString)

    setExportDir, getExportDir = accessors("export_dir", str)


class HasSignatureDefKey(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `signature_def_key`: signature of the SavedModel; serving_default."""

    signature_def_key = param(
        "signature_def_key", "signature of the SavedModel; serving_default", TypeConverters.toString
    )

    setSignatureDefKey, getSignatureDefKey = accessors("signature_def_key", str)


class HasTagSet(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tag_set`: tags of the SavedModel, joined by commas; serve."""

    tag_set = param(
        "tag_set", "tags of the SavedModel, joined by commas; serve", TypeConverters.toString
    )

    setTagSet, getTagSet = accessors("tag_set", str)


class HasFeedTimeout(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `feed_timeout`: seconds in which no worker takes a row."""

    feed_timeout = param(
        "feed_timeout", "seconds without any worker taking a row", TypeConverters.toFloat
    )

    setFeedTimeout, getFeedTimeout = accessors("feed_timeout", float)


class HasReservationTimeout(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `reservation_timeout`: seconds until every node serves."""

    reservation_timeout = param(
        "reservation_timeout", "seconds until every node serves", TypeConverters.toFloat
    )

    setReservationTimeout, getReservationTimeout = accessors("reservation_timeout", float)


class HasNumPS(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `num_ps`, parameter servers of the cluster, and `driver_ps_nodes`."""

    num_ps = param("num_ps", "parameter servers among the nodes", TypeConverters.toInt)
    driver_ps_nodes = param(
        "driver_ps_nodes",
        "whether parameter servers run beside the driver",
        TypeConverters.toBoolean,
    )

    setNumPS, getNumPS = accessors("num_ps", int, "NumPS")
    setDriverPSNodes, getDriverPSNodes = accessors("driver_ps_nodes", bool, "DriverPSNodes")
