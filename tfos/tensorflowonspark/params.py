"""Params of the pipeline: a mixin for each, as spark.ml has them.

Covers: the Param, its conversion, its setter and getter; TFParams, which overlays arguments.
Does not: have defaults: the estimator and the model set theirs.
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from tfos.config import InputMode
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


def _param(name: str, doc: str, convert: Callable[[Any], Any]) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class TFParams(Params):  # type: ignore[misc]  # pyspark is not checked
    """Base of what has arguments and Params.

    Attributes:
        args: the user's arguments.
    """

    args: Any = None

    def merge_args_params(self) -> Namespace:
        """Return the arguments with the Params that have a value laid over them."""
        merged = Namespace(copy.copy(self.args) if self.args is not None else {})
        for param in self.params:
            if self.isDefined(param):
                setattr(merged, param.name, self.getOrDefault(param))
        return merged


class HasBatchSize(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `batch_size`: rows per batch."""

    batch_size = _param("batch_size", "rows per batch", TypeConverters.toInt)

    def setBatchSize(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(batch_size=value)

    def getBatchSize(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.batch_size)
        return found


class HasClusterSize(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `cluster_size`: nodes of the cluster, servers included."""

    cluster_size = _param(
        "cluster_size", "nodes of the cluster, servers included", TypeConverters.toInt
    )

    def setClusterSize(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(cluster_size=value)

    def getClusterSize(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.cluster_size)
        return found


class HasEpochs(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `epochs`: how often the rows are fed."""

    epochs = _param("epochs", "how often the rows are fed", TypeConverters.toInt)

    def setEpochs(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(epochs=value)

    def getEpochs(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.epochs)
        return found


class HasGraceSecs(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `grace_secs`: seconds between the end of the feed and the stop of the nodes."""

    grace_secs = _param(
        "grace_secs",
        "seconds between the end of the feed and the stop of the nodes",
        TypeConverters.toInt,
    )

    def setGraceSecs(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(grace_secs=value)

    def getGraceSecs(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.grace_secs)
        return found


class HasInputMapping(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `input_mapping`: column of the DataFrame to name of the input."""

    input_mapping = _param(
        "input_mapping", "column of the DataFrame to name of the input", _to_dict
    )

    def setInputMapping(self, value: dict[str, str]) -> Any:
        """Set it, and return this object."""
        return self._set(input_mapping=value)

    def getInputMapping(self) -> dict[str, str]:
        """Return it."""
        found: dict[str, str] = self.getOrDefault(self.input_mapping)
        return found


class HasInputMode(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `input_mode`: InputMode.SPARK, the only one."""

    input_mode = _param("input_mode", "InputMode.SPARK, the only one", _to_mode)

    def setInputMode(self, value: InputMode) -> Any:
        """Set it, and return this object."""
        return self._set(input_mode=value)

    def getInputMode(self) -> InputMode:
        """Return it."""
        found: InputMode = self.getOrDefault(self.input_mode)
        return found


class HasMasterNode(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `master_node`: role name of the chief."""

    master_node = _param("master_node", "role name of the chief", TypeConverters.toString)

    def setMasterNode(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(master_node=value)

    def getMasterNode(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.master_node)
        return found


class HasModelDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `model_dir`: directory of checkpoints, for train_fn."""

    model_dir = _param(
        "model_dir", "directory of checkpoints, for train_fn", TypeConverters.toString
    )

    def setModelDir(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(model_dir=value)

    def getModelDir(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.model_dir)
        return found


class HasOutputMapping(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `output_mapping`: name of the output to column of the result."""

    output_mapping = _param(
        "output_mapping", "name of the output to column of the result", _to_dict
    )

    def setOutputMapping(self, value: dict[str, str]) -> Any:
        """Set it, and return this object."""
        return self._set(output_mapping=value)

    def getOutputMapping(self) -> dict[str, str]:
        """Return it."""
        found: dict[str, str] = self.getOrDefault(self.output_mapping)
        return found


class HasProtocol(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `protocol`: grpc, the only one."""

    protocol = _param("protocol", "grpc, the only one", TypeConverters.toString)

    def setProtocol(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(protocol=value)

    def getProtocol(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.protocol)
        return found


class HasReaders(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `readers`: readers of files, for train_fn."""

    readers = _param("readers", "readers of files, for train_fn", TypeConverters.toInt)

    def setReaders(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(readers=value)

    def getReaders(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.readers)
        return found


class HasSteps(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `steps`: steps to train, for train_fn."""

    steps = _param("steps", "steps to train, for train_fn", TypeConverters.toInt)

    def setSteps(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(steps=value)

    def getSteps(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.steps)
        return found


class HasTensorboard(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tensorboard`: whether TensorBoard runs."""

    tensorboard = _param("tensorboard", "whether TensorBoard runs", TypeConverters.toBoolean)

    def setTensorboard(self, value: bool) -> Any:
        """Set it, and return this object."""
        return self._set(tensorboard=value)

    def getTensorboard(self) -> bool:
        """Return it."""
        found: bool = self.getOrDefault(self.tensorboard)
        return found


class HasTFRecordDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tfrecord_dir`: directory of TFRecord files, for train_fn."""

    tfrecord_dir = _param(
        "tfrecord_dir", "directory of TFRecord files, for train_fn", TypeConverters.toString
    )

    def setTFRecordDir(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(tfrecord_dir=value)

    def getTFRecordDir(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.tfrecord_dir)
        return found


class HasExportDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `export_dir`: directory of the SavedModel."""

    export_dir = _param("export_dir", "directory of the SavedModel", TypeConverters.toString)

    def setExportDir(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(export_dir=value)

    def getExportDir(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.export_dir)
        return found


class HasSignatureDefKey(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `signature_def_key`: signature of the SavedModel; serving_default."""

    signature_def_key = _param(
        "signature_def_key", "signature of the SavedModel; serving_default", TypeConverters.toString
    )

    def setSignatureDefKey(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(signature_def_key=value)

    def getSignatureDefKey(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.signature_def_key)
        return found


class HasTagSet(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tag_set`: tags of the SavedModel, joined by commas; serve."""

    tag_set = _param(
        "tag_set", "tags of the SavedModel, joined by commas; serve", TypeConverters.toString
    )

    def setTagSet(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(tag_set=value)

    def getTagSet(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.tag_set)
        return found


class HasFeedTimeout(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `feed_timeout`: seconds without any worker taking a row."""

    feed_timeout = _param(
        "feed_timeout", "seconds without any worker taking a row", TypeConverters.toFloat
    )

    def setFeedTimeout(self, value: float) -> Any:
        """Set it, and return this object."""
        return self._set(feed_timeout=value)

    def getFeedTimeout(self) -> float:
        """Return it."""
        found: float = self.getOrDefault(self.feed_timeout)
        return found


class HasReservationTimeout(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `reservation_timeout`: seconds until every node serves."""

    reservation_timeout = _param(
        "reservation_timeout", "seconds until every node serves", TypeConverters.toFloat
    )

    def setReservationTimeout(self, value: float) -> Any:
        """Set it, and return this object."""
        return self._set(reservation_timeout=value)

    def getReservationTimeout(self) -> float:
        """Return it."""
        found: float = self.getOrDefault(self.reservation_timeout)
        return found


class HasNumPS(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `num_ps`, parameter servers of the cluster, and `driver_ps_nodes`."""

    num_ps = _param("num_ps", "parameter servers among the nodes", TypeConverters.toInt)
    driver_ps_nodes = _param(
        "driver_ps_nodes",
        "whether parameter servers run beside the driver",
        TypeConverters.toBoolean,
    )

    def setNumPS(self, value: int) -> Any:
        """Set `num_ps`, and return this object."""
        return self._set(num_ps=value)

    def getNumPS(self) -> int:
        """Return `num_ps`."""
        found: int = self.getOrDefault(self.num_ps)
        return found

    def setDriverPSNodes(self, value: bool) -> Any:
        """Set `driver_ps_nodes`, and return this object."""
        return self._set(driver_ps_nodes=value)

    def getDriverPSNodes(self) -> bool:
        """Return `driver_ps_nodes`."""
        found: bool = self.getOrDefault(self.driver_ps_nodes)
        return found
