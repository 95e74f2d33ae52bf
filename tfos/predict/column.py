"""predict_column: a saved model as a function of columns, `df.select("*", predict("features"))`.

Covers: the result's type, whole DataFrames with result columns.
Does not: read models in the driver (a Spark task reads names and types, so the driver needs no
TensorFlow); predict (tfos.predict.predictor).
Runs in: the driver; its functions in Spark's Python workers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from feeding.columnar.batch import check_batch_size
from tfos.console import missing_packages
from tfos.errors import ExportError, SettingsError, UnsupportedError, UnsupportedModel
from tfos.feed import dataframe_columns
from tfos.feed.dataframe import check_classic
from tfos.feed.dataframe_inference import (
    arrow_udf,
    result_columns,
    with_results,
)
from tfos.feed.task_process import partition_id
from tfos.files.paths import input_path
from tfos.node_memory import ADDRESS_SPACE_MIB
from tfos.predict.predictor import OutputColumn, Predictor, predictor_of
from tfos.predict.signature import (
    DEFAULT_SIGNATURE,
    DEFAULT_TAGS,
    ModelSignature,
    ModelSource,
    ModelTensors,
)
from tfos.spark.facts import active_session, read_facts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BATCH_SIZE = 1024
PREDICTION = "prediction"


class PredictColumn:
    """A saved model as a function of columns; made by `predict_column`.

    Attributes:
        signature: names, dtypes and shapes of the model's `inputs` and `outputs`.

    Args:
        signature: signature of the model.
        inputs: names of the inputs, in the order of the columns; None: as in `predict_column`.
        outputs: names of the outputs.
        batch_size: rows that the model takes at once.
    """

    def __init__(
        self,
        signature: ModelSignature,
        inputs: Sequence[str] | None,
        outputs: Sequence[str],
        batch_size: int,
    ) -> None:
        self.signature = signature
        self._inputs = None if inputs is None else tuple(inputs)
        self._outputs = tuple(outputs)
        self._batch_size = batch_size

    def __call__(self, *columns: str | Column) -> Column:
        """Return the model's outputs as a column: of the output's type, or a struct of several.

        Args:
            columns: names or columns, one per input: in the inputs' order, or with the names of all
                inputs. For a model with one input, several columns of numbers and arrays are joined
                side by side. An expression has no name here, even with an alias.

        Raises:
            SettingsError: the number of columns is wrong, or one has the name of another input; or
                inputs was None, the model does not record the order of several inputs, and the
                columns do not have their names.
        """
        from pyspark.sql import functions

        given = [functions.col(each) if isinstance(each, str) else each for each in columns]
        return self.udf(*columns)(*given).alias(PREDICTION)

    def udf(self, *names: str) -> Any:
        """Return the model as a function of Spark SQL.

        With `spark.udf.register("score", predict.udf("user", "item"))`, queries call
        `score(u, i)`.

        Args:
            names: names of its arguments, as those of columns above. Queries go by position.

        Raises:
            SettingsError: as above.
        """
        names = tuple(map(_name_of, names))
        outputs = (OutputColumn(name, name) for name in self._outputs)
        predictor = predictor_of(self.signature, names, outputs, self._batch_size, self._inputs)
        is_one = len(self._outputs) == 1
        schema = predictor.schema()
        kind = schema.rpartition("` ")[2] if is_one else f"struct<{schema.replace('` ', '`: ')}>"

        def predict(arrays: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            batches = (_as_batch(each, names) for each in arrays)
            for found in predictor.results(partition_id(), batches):
                yield found.column(0) if is_one else found.to_struct_array()

        made = _udf()(predict, returnType=kind)
        # Not deterministic: otherwise Spark may compute the same answers more than once.
        return made.asNondeterministic()

    def __repr__(self) -> str:
        inputs = ", ".join(self.signature.inputs if self._inputs is None else self._inputs)
        outputs = ", ".join(self._outputs)
        return f"predict_column({str(self.signature.source)!r}: {inputs} -> {outputs})"


def _as_batch(given: pa.Array | tuple[pa.Array, ...], names: Sequence[str]) -> pa.RecordBatch:
    """Return what Spark gives the function; a query of SQL may give it another number of columns.

    Raises:
        SettingsError: the text names the columns that it takes.
    """
    arrays = list(given) if isinstance(given, tuple) else [given]
    if len(arrays) != len(names):
        raise SettingsError(
            f"{len(arrays)} arguments are given, but the function takes {len(names)}: "
            f"{', '.join(names)}"
        )
    return pa.RecordBatch.from_arrays(arrays, [f"c{place}" for place in range(len(arrays))])


def predict_column(
    model_path: str,
    inputs: Sequence[str] | str | None = None,
    outputs: Sequence[str] | str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    signature: str = DEFAULT_SIGNATURE,
    tags: str = DEFAULT_TAGS,
) -> PredictColumn:
    """Return a saved model as a function of columns, for `df.select("*", predict("features"))`.

    It needs no cluster. Each Python worker of Spark reads the model once and calls it as one traced
    function, on batches of `batch_size` rows that cross those of Arrow. Columns are numbers, text,
    arrays and vectors; the result column is called `prediction`.

    Args:
        model_path: path or URL, the same for all executors, of a `.keras` file, a SavedModel or an
            export with tables beside the model; a plain path is on Spark's default file system.
        inputs: names of the model's inputs in the order of the columns; None: columns with the
            names of all inputs are matched by name, others by the model's own order (for a dict,
            its sorted keys). A SavedModel may not record the order.
        outputs: names of the outputs: one makes a column of its type, several make a struct; None:
            all.
        batch_size: rows that the model takes at once; only a partition's last batch is smaller.
        signature: name of a SavedModel's signature.
        tags: tags of a SavedModel, joined by commas.

    Raises:
        SettingsError: there is no such model or name; the export is damaged, is a delta or has no
            model; or there is no SparkSession.
        UnsupportedError: Spark is older than 4.1, or the session is of Spark Connect.
    """
    check_batch_size(batch_size)
    _udf()
    session = active_session()
    path = _whole_path(session, model_path)
    found = read_signature(session, ModelSource(path=path, tags=tags, name=signature))
    named = _listed(inputs, found.inputs)
    asked = _listed(outputs, found.outputs)
    found.check(named, asked)
    return PredictColumn(found, None if inputs is None else named, asked, batch_size)


def _whole_path(session: SparkSession, path: object) -> str:
    """Return where a path leads on every executor: where ctx.export(model, path) writes to."""
    if not isinstance(path, str | os.PathLike):
        raise SettingsError(
            f"the model must be the path or URL of a saved one, got {type(path).__qualname__}. "
            "Write it with ctx.export(model, path), or model.save('….keras'), to a path that every "
            "executor sees"
        )
    return input_path(os.fspath(path), read_facts(session.sparkContext).output_place)


def read_signature(session: SparkSession, source: ModelSource) -> ModelSignature:
    """Return a model's signature, read by a Spark task.

    A DataFrame's task reads it, because Spark has separate Python workers for RDDs: the worker
    that has loaded TensorFlow and the model then also predicts.

    Args:
        session: the session whose Python workers will predict.
        source: where the model is.

    Raises:
        SettingsError: there is no such model, or its files are damaged.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:  # to the end: Spark does not reuse a worker with unread input
            yield pa.record_batch({"found": pa.array([_read(source)], pa.binary())})

    (row,) = session.range(0, 1, 1, 1).mapInArrow(read, "found binary").collect()
    found = msgspec.msgpack.decode(row.found, type=ModelTensors | str)
    if isinstance(found, str):
        raise SettingsError(found)
    return ModelSignature.of(source, found)


def predicted(frame: DataFrame, predictor: Predictor) -> DataFrame:
    """Return a lazy DataFrame with the given columns and the output columns.

    Args:
        frame: any classic DataFrame.
        predictor: fills the output columns; its input columns are in the frame.

    Raises:
        SettingsError: a column is missing or there twice, has a type that the model would
            round, or has the name of an output.
    """
    check_classic(frame)
    positions = dataframe_columns.positions_of(frame.columns, predictor.columns)
    check_kinds(predictor, frame)
    results = result_columns(predictor.schema(), frame.columns)
    return with_results(frame, positions, results, predictor)


def check_kinds(predictor: Predictor, frame: DataFrame) -> None:
    """Refuse structs, floats that an Embedding would use as ids, and timestamps that are rounded.

    Args:
        predictor: its columns are in the frame, whose column names are unique.
        frame: a classic DataFrame.

    Raises:
        SettingsError: names the column, its type and the remedy.
    """
    kinds = {each.name: each.dataType for each in frame.schema.fields}
    for name, places in predictor.inputs:
        info = predictor.signature.inputs[name]
        columns = [predictor.columns[place] for place in places]
        for each in columns:
            dataframe_columns.check_plain(each, kinds[each])
        for leaf in dataframe_columns.leaves([(each, kinds[each]) for each in columns]):
            dataframe_columns.check_times(leaf, info.dtype)
            if info.is_id:
                dataframe_columns.check_ids(leaf, info.dtype)


def predicted_by(
    frame: Any,
    model_path: str,
    columns: Sequence[str] | None,
    output: Any,
    nulls: object,
    batch_size: int | None = None,
) -> DataFrame:
    """Return the DataFrame with a saved model's outputs; see TFCluster.inference.

    Args:
        frame: the rows.
        model_path: as in `predict_column`.
        columns: columns that fill the model's inputs, as in `predict_column`; None: those with the
            inputs' names, or the only one.
        output: name of the column, for a model with one output; None: "prediction". With several
            outputs, each column has its output's name.
        nulls: only "error".
        batch_size: rows that the model takes at once; None: BATCH_SIZE.

    Raises:
        SettingsError: frame is not a DataFrame, or there is no such model or column.
    """
    check_classic(frame)
    if nulls != "error" or not isinstance(output, str | None):
        raise SettingsError(
            f"nulls={nulls!r}, output={output!r} with model=: a model takes no missing values "
            "(fill them with df.na.fill()), and its outputs have types, so output= is a column's "
            "name"
        )
    num_rows = check_batch_size(BATCH_SIZE if batch_size is None else batch_size)
    path = _whole_path(frame.sparkSession, model_path)
    signature = read_signature(frame.sparkSession, ModelSource(path=path))
    names = list(signature.inputs)
    inputs = None
    if columns is None:
        only = frame.columns if len(frame.columns) == len(names) == 1 else names
        columns = names if set(names) <= set(frame.columns) else only
        if missing := sorted(set(columns) - set(frame.columns)):
            raise SettingsError(
                f"the model has the inputs {names}, but the DataFrame has no column "
                f"{missing[0]!r}. It has {frame.columns}; name the input columns with columns="
            )
        inputs = names
    asked = [columns] if isinstance(columns, str) else list(columns)
    outputs = list(signature.outputs)
    if len(outputs) > 1 and output is not None:
        raise SettingsError(
            f"output={output!r}, but the model {model_path} has the outputs {outputs}, which name "
            "their columns; leave out output="
        )
    filled = outputs if len(outputs) > 1 else [output or PREDICTION]
    answers = map(OutputColumn, outputs, filled)
    return predicted(frame, predictor_of(signature, asked, answers, num_rows, inputs))


def _read(source: ModelSource) -> bytes:
    """Return the tensors, or the reason why there are none: Spark would wrap the error."""
    from tfos.predict import loading

    found: ModelTensors | str
    try:
        model = loading.read_signature(source)
        found = ModelTensors(
            model.digest, dict(model.inputs), dict(model.outputs), model.is_ordered
        )
    except (SettingsError, UnsupportedModel, ExportError) as error:
        found = str(error)
    except ModuleNotFoundError as error:  # of TensorFlow, or of a layer's own module
        found = f"{error}{missing_packages.advice(f'ModuleNotFoundError: {error}')}"
    except (ImportError, MemoryError) as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            raise
        found = (
            f"{type(error).__name__}: {error}. The address space of Spark's Python workers is "
            f"limited to {limit >> 20} MiB (RLIMIT_AS), and a process with TensorFlow maps up to "
            f"{ADDRESS_SPACE_MIB} MiB before any model, more with a GPU. Unset "
            "spark.executor.pyspark.memory, or raise ulimit -v on the executors' hosts"
        )
    return msgspec.msgpack.encode(found)


def _listed(given: Sequence[str] | str | None, names: Any) -> list[str]:
    if given is None:
        return list(names)
    return [given] if isinstance(given, str) else list(given)


def _name_of(column: Any) -> str:
    name = column if isinstance(column, str) else str(column).removeprefix("Column<'")[:-2]
    # A name with a dot is a column only in backticks, which are not part of it.
    inside = name[1:-1].replace("``", "`")
    return inside if name == dataframe_columns.quoted(inside) else name


def _udf() -> Any:
    found = arrow_udf()
    if found is None:
        from pyspark import __version__

        raise UnsupportedError(
            f"predict_column() needs Spark 4.1, whose arrow_udf takes Arrow arrays; this is "
            f"{__version__}. cluster.inference(df, model=path) and TFModel.transform work here"
        )
    return found
