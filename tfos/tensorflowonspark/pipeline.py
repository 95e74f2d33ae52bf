"""pipeline: TFEstimator and TFModel of spark.ml, over a cluster and a SavedModel.

Covers: fit, transform, Params, copy, persistence; Namespace and helpers of old programs.
Does not: train (tfos.cluster) or predict (tfos.predict).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from pyspark.ml import Estimator, Model
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from feeding.columnar.batch import check_batch_size
from tfos.cluster import TFCluster
from tfos.config import InputMode
from tfos.errors import SettingsError, UnsupportedError
from tfos.estimators.functions import function_of, reference_to
from tfos.feed import dataframe_columns
from tfos.feed.dataframe import chosen, with_plain_names
from tfos.feed.task_process import partition_id
from tfos.predict.column import check_kinds, read_signature
from tfos.predict.predictor import OutputColumn, predictor_of
from tfos.predict.signature import DEFAULT_SIGNATURE, DEFAULT_TAGS, ModelSource
from tfos.tensorflowonspark import TFParallel, util
from tfos.tensorflowonspark.namespace import Namespace
from tfos.tensorflowonspark.params import (
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasExportDir,
    HasFeedTimeout,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasReservationTimeout,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
    TFParams,
)

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasEpochs",
    "HasExportDir",
    "HasFeedTimeout",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProtocol",
    "HasReaders",
    "HasReservationTimeout",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
    "Namespace",
    "TFEstimator",
    "TFModel",
    "TFParams",
    "get_meta_graph_def",
    "single_node_env",
    "yield_batch",
]


class _Stored(TFParams, MLWritable, MLReadable[Any]):  # type: ignore[misc]  # pyspark is not checked
    """Saves and loads, together with the arguments and the functions by name."""

    functions: tuple[str, ...] = ()
    """Attributes that are functions."""

    def write(self) -> MLWriter:
        """Return the writer of spark.ml."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader of spark.ml."""
        return _Reader(cls)


class TFEstimator(
    Estimator[Any],  # type: ignore[misc]  # pyspark is not checked
    _Stored,
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasExportDir,
    HasFeedTimeout,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasProtocol,
    HasReaders,
    HasReservationTimeout,
    HasSteps,
    HasTensorboard,
    HasTFRecordDir,
):
    """Trains `train_fn(args, ctx)` on a cluster, fed from a DataFrame.

    Args:
        train_fn: main_fun of the cluster; its `args` are tf_args overlaid with the Params, or
            the list that tf_args is, which also becomes sys.argv.
        tf_args: a dict, a Namespace, an argparse.Namespace or a list of a command line's words.
        export_fn: called as `export_fn(args)` on one executor after the training; None: train_fn
            exports.
    """

    functions = ("train_fn", "export_fn")

    def __init__(
        self,
        train_fn: Callable[[Any, Any], Any],
        tf_args: Any,
        export_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.train_fn = train_fn
        self.export_fn = export_fn
        self.args = Namespace({} if tf_args is None else tf_args)
        self._setDefault(
            input_mapping={},
            cluster_size=1,
            num_ps=0,
            driver_ps_nodes=False,
            input_mode=InputMode.SPARK,
            master_node="chief",
            protocol="grpc",
            tensorboard=False,
            model_dir=None,
            export_dir=None,
            tfrecord_dir=None,
            batch_size=100,
            epochs=1,
            readers=1,
            steps=1000,
            grace_secs=30,
            feed_timeout=600.0,
            reservation_timeout=600.0,
        )

    def _fit(self, dataset: Any) -> TFModel:
        columns = _mapped_columns(self.getInputMapping(), dataset)
        self._refuse_other_ways()
        args = self.args.argv or self.merge_args_params()
        sc = dataset.sparkSession.sparkContext
        cluster = TFCluster.run(
            sc,
            self.train_fn,
            args,
            self.getClusterSize(),
            self.getNumPS(),
            tensorboard=self.getTensorboard(),
            input_mode=InputMode.SPARK,
            driver_ps_nodes=self.getDriverPSNodes(),
            master_node=self.getMasterNode(),
            reservation_timeout=self.getReservationTimeout(),
        )
        with cluster:
            cluster.train(
                chosen(dataset, columns),
                num_epochs=self.getEpochs(),
                feed_timeout=self.getFeedTimeout(),
            )
            cluster.shutdown(grace_secs=self.getGraceSecs())
        if self.export_fn is not None:
            TFParallel.run(sc, functools.partial(_export, self.export_fn), args, 1)
        return self._copyValues(TFModel(self.args))  # type: ignore[no-any-return]

    def _refuse_other_ways(self) -> None:
        if self.getInputMode() != InputMode.SPARK:
            raise UnsupportedError(
                "setInputMode(InputMode.TENSORFLOW): fit feeds the DataFrame. For files write "
                "dfutil.saveAsTFRecords(df, path), then TFCluster.run(sc, train_fn, args, ...)"
            )
        if self.getProtocol() != "grpc":
            raise UnsupportedError(
                f"setProtocol({self.getProtocol()!r}): TensorFlow 2 has no RDMA transport; leave "
                "it at 'grpc'"
            )


class TFModel(
    Model,  # type: ignore[misc]  # pyspark is not checked
    _Stored,
    HasBatchSize,
    HasExportDir,
    HasInputMapping,
    HasModelDir,
    HasOutputMapping,
    HasSignatureDefKey,
    HasTagSet,
):
    """Fills columns with the outputs of a SavedModel's signature; input columns are dropped.

    Numbers become double and bigint, like Python's numbers in rows.

    Args:
        tf_args: arguments, kept for programs that read them.
    """

    def __init__(self, tf_args: Any) -> None:
        super().__init__()
        self.args = Namespace({} if tf_args is None else tf_args)
        self._setDefault(
            input_mapping={},
            output_mapping={},
            batch_size=100,
            model_dir=None,
            export_dir=None,
            signature_def_key=None,
            tag_set=None,
        )

    def _transform(self, dataset: Any) -> Any:
        mapping = self.getInputMapping()
        columns = _mapped_columns(mapping, dataset)
        outputs = tuple(sorted(self.getOutputMapping().items()))
        if not outputs:
            raise SettingsError(
                "output_mapping is empty; setOutputMapping({'name of the output': 'column'})"
            )
        inputs = [mapping[name].removesuffix(":0") for name in columns]
        plain = tuple(
            OutputColumn(name.removesuffix(":0"), column, "python") for name, column in outputs
        )
        num_rows = check_batch_size(self.getBatchSize())
        signature = read_signature(dataset.sparkSession, self._source())
        signature.check(inputs, [each.output for each in plain])
        predictor = predictor_of(signature, columns, plain, num_rows, inputs)

        def predict(batches: Iterator[Any]) -> Iterator[Any]:
            return predictor.results(partition_id(), batches)

        given = chosen(dataset, columns)
        check_kinds(predictor, given)
        return with_plain_names(given).mapInArrow(predict, predictor.schema())

    def _source(self) -> ModelSource:
        path = self.getExportDir() or self.getModelDir()
        if not path:
            raise SettingsError("export_dir is not set; setExportDir(the SavedModel's directory)")
        return ModelSource(
            path=path,
            tags=self.getTagSet() or DEFAULT_TAGS,
            name=self.getSignatureDefKey() or DEFAULT_SIGNATURE,
        )


def single_node_env(args: Any) -> None:
    """Prepare this process for TensorFlow alone; a list of arguments becomes sys.argv.

    Args:
        args: a program's arguments; `num_gpus` in them is the number of GPUs, 1 without it.
    """
    argv = args if isinstance(args, list) else getattr(args, "argv", None)
    if argv:
        sys.argv = list(argv)
    names = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    util.single_node_env(int(names.get("num_gpus", 1)))


def yield_batch(
    iterable: Iterable[Any], batch_size: int, num_tensors: int = 1
) -> Iterator[list[list[Any]]]:
    """Yield batches of rows as one list of values for each tensor.

    Args:
        iterable: rows, each with a value per tensor.
        batch_size: rows per batch; the last one may be smaller.
        num_tensors: values of a row.
    """
    tensors: list[list[Any]] = [[] for _ in range(num_tensors)]
    for row in iterable:
        values = row if num_tensors > 1 or isinstance(row, tuple | list) else [row]
        for place in range(num_tensors):
            tensors[place].append(values[place])
        if len(tensors[0]) >= batch_size:
            yield tensors
            tensors = [[] for _ in range(num_tensors)]
    if tensors[0]:
        yield tensors


def get_meta_graph_def(saved_model_dir: str, tag_set: str) -> NoReturn:
    """Refuse, since it is a graph of TensorFlow 1.

    Args:
        saved_model_dir: directory of the SavedModel.
        tag_set: its tags.

    Raises:
        UnsupportedError: always; names what to write.
    """
    del tag_set
    raise UnsupportedError(
        "get_meta_graph_def() reads a graph of TensorFlow 1. Write "
        f"tf.saved_model.load({saved_model_dir!r}).signatures"
    )


def _export(export_fn: Callable[[Any], Any], args: Any, ctx: Any) -> None:
    """Run export_fn(args) as a main_fun."""
    del ctx
    export_fn(args)


class _Writer(DefaultParamsWriter):  # type: ignore[misc]  # pyspark is not checked
    """Writes Params, arguments and names of functions.

    Args:
        instance: the estimator or model.

    Raises:
        SettingsError: a part of it cannot be saved; before overwrite() deletes an older one. A
            Pipeline's overwrite() deletes first.
    """

    def __init__(self, instance: Any) -> None:
        super().__init__(instance)
        names = {each: reference_to(each, getattr(instance, each)) for each in instance.functions}
        try:
            _check_keys(vars(instance.args))
            args = json.loads(json.dumps(vars(instance.args)))
        except TypeError as error:
            raise SettingsError(
                f"arguments that are no JSON cannot be saved ({error}); pass plain numbers, text, "
                "lists and dicts in tf_args"
            ) from error
        self._extra = {"args": args, "functions": names}

    def saveImpl(self, path: str) -> None:
        """Write them as JSON."""
        self.saveMetadata(self.instance, path, self.sc, extraMetadata=self._extra)


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON would turn into texts: loaded, they would not be found.

    Raises:
        TypeError: a key is not a str.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is {type(key).__name__}, not str")
            _check_keys(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_keys(each)


class _Reader(DefaultParamsReader):  # type: ignore[misc]  # pyspark is not checked
    def load(self, path: str) -> Any:
        """Return the saved object."""
        metadata = self.loadMetadata(path, self.sc)
        made: Any = self.cls.__new__(self.cls)
        functions = {name: function_of(each) for name, each in metadata["functions"].items()}
        if functions:
            made.__init__(functions["train_fn"], metadata["args"], functions["export_fn"])
        else:
            made.__init__(metadata["args"])
        made._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(made, metadata)
        return made


def _mapped_columns(mapping: dict[str, str], dataset: Any) -> list[str]:
    """Return the mapped columns in the order of their names.

    Raises:
        SettingsError: no column is mapped, or the DataFrame lacks one or has it twice.
    """
    missing = sorted(set(mapping) - set(dataset.columns))
    if missing or not mapping:
        raise SettingsError(
            f"input_mapping names the columns {sorted(mapping)}, the DataFrame has "
            f"{dataset.columns}; setInputMapping({{'column': 'input'}}) with columns that exist"
        )
    dataframe_columns.positions_of(dataset.columns, sorted(mapping))
    return sorted(mapping)
