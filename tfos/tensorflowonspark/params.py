"""Params of the pipeline: a mixin for each, as spark.ml has them.

Covers: the Param, its conversion, its setter and getter; TFParams, which overlays arguments.
Does not: have defaults: the estimator and the model set theirs.
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
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

    batch_size = Param(
        Params._dummy(),
        "batch_size",
        "rows per batch",
        typeConverter=TypeConverters.toInt,
    )

    def setBatchSize(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(batch_size=value)

    def getBatchSize(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.batch_size)
        return found


class HasClusterSize(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `cluster_size`: nodes of the cluster, servers included."""

    cluster_size = Param(
        Params._dummy(),
        "cluster_size",
        "nodes of the cluster, servers included",
        typeConverter=TypeConverters.toInt,
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

    epochs = Param(
        Params._dummy(),
        "epochs",
        "how often the rows are fed",
        typeConverter=TypeConverters.toInt,
    )

    def setEpochs(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(epochs=value)

    def getEpochs(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.epochs)
        return found


class HasGraceSecs(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `grace_secs`: seconds between the end of the feed and the stop of the nodes."""

    grace_secs = Param(
        Params._dummy(),
        "grace_secs",
        "seconds between the end of the feed and the stop of the nodes",
        typeConverter=TypeConverters.toInt,
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

    input_mapping = Param(
        Params._dummy(),
        "input_mapping",
        "column of the DataFrame to name of the input",
        typeConverter=_to_dict,
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

    input_mode = Param(
        Params._dummy(),
        "input_mode",
        "InputMode.SPARK, the only one",
        typeConverter=_to_mode,
    )

    def setInputMode(self, value: InputMode) -> Any:
        """Set it, and return this object."""
        return self._set(input_mode=value)

    def getInputMode(self) -> InputMode:
        """Return it."""
        found: InputMode = self.getOrDefault(self.input_mode)
        return found


class HasMasterNode(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `master_node`: role name of the chief."""

    master_node = Param(
        Params._dummy(),
        "master_node",
        "role name of the chief",
        typeConverter=TypeConverters.toString,
    )

    def setMasterNode(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(master_node=value)

    def getMasterNode(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.master_node)
        return found


class HasModelDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `model_dir`: directory of checkpoints, for train_fn."""

    model_dir = Param(
        Params._dummy(),
        "model_dir",
        "directory of checkpoints, for train_fn",
        typeConverter=TypeConverters.toString,
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

    output_mapping = Param(
        Params._dummy(),
        "output_mapping",
        "name of the output to column of the result",
        typeConverter=_to_dict,
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

    protocol = Param(
        Params._dummy(),
        "protocol",
        "grpc, the only one",
        typeConverter=TypeConverters.toString,
    )

    def setProtocol(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(protocol=value)

    def getProtocol(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.protocol)
        return found


class HasReaders(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `readers`: readers of files, for train_fn."""

    readers = Param(
        Params._dummy(),
        "readers",
        "readers of files, for train_fn",
        typeConverter=TypeConverters.toInt,
    )

    def setReaders(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(readers=value)

    def getReaders(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.readers)
        return found


class HasSteps(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `steps`: steps to train, for train_fn."""

    steps = Param(
        Params._dummy(),
        "steps",
        "steps to train, for train_fn",
        typeConverter=TypeConverters.toInt,
    )

    def setSteps(self, value: int) -> Any:
        """Set it, and return this object."""
        return self._set(steps=value)

    def getSteps(self) -> int:
        """Return it."""
        found: int = self.getOrDefault(self.steps)
        return found


class HasTensorboard(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tensorboard`: whether TensorBoard runs."""

    tensorboard = Param(
        Params._dummy(),
        "tensorboard",
        "whether TensorBoard runs",
        typeConverter=TypeConverters.toBoolean,
    )

    def setTensorboard(self, value: bool) -> Any:
        """Set it, and return this object."""
        return self._set(tensorboard=value)

    def getTensorboard(self) -> bool:
        """Return it."""
        found: bool = self.getOrDefault(self.tensorboard)
        return found


class HasTFRecordDir(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `tfrecord_dir`: directory of TFRecord files, for train_fn."""

    tfrecord_dir = Param(
        Params._dummy(),
        "tfrecord_dir",
        "directory of TFRecord files, for train_fn",
        typeConverter=TypeConverters.toString,
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

    export_dir = Param(
        Params._dummy(),
        "export_dir",
        "directory of the SavedModel",
        typeConverter=TypeConverters.toString,
    )

    def setExportDir(self, value: str) -> Any:
        """Set it, and return this object."""
        return self._set(export_dir=value)

    def getExportDir(self) -> str:
        """Return it."""
        found: str = self.getOrDefault(self.export_dir)
        return found


class HasSignatureDefKey(Params):  # type: ignore[misc]  # pyspark is not checked
    """Has `signature_def_key`: signature of the SavedModel; serving_default."""

    signature_def_key = Param(
        Params._dummy(),
        "signature_def_key",
        "signature of the SavedModel; serving_default",
        typeConverter=TypeConverters.toString,
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

    tag_set = Param(
        Params._dummy(),
        "tag_set",
        "tags of the SavedModel, joined by commas; serve",
        typeConverter=TypeConverters.toString,
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

    feed_timeout = Param(
        Params._dummy(),
        "feed_timeout",
        "seconds without any worker taking a row",
        typeConverter=TypeConverters.toFloat,
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

    reservation_timeout = Param(
        Params._dummy(),
        "reservation_timeout",
        "seconds until every node serves",
        typeConverter=TypeConverters.toFloat,
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

    num_ps = Param(
        Params._dummy(),
        "num_ps",
        "parameter servers among the nodes",
        typeConverter=TypeConverters.toInt,
    )
    driver_ps_nodes = Param(
        Params._dummy(),
        "driver_ps_nodes",
        "whether parameter servers run beside the driver",
        typeConverter=TypeConverters.toBoolean,
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
