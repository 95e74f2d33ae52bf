"""DataFrame inference: `cluster.inference(df)` adds main_fun's results as further columns.

Covers: names and types of the result columns, the lazy DataFrame.
Does not: carry rows (feeding.sender.arrow_inference does, in Spark's tasks).
Runs in: the driver; the returned function in Spark's tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from feeding.sender.arrow_inference import ArrowInferenceTask
from feeding.sender.task import InferenceTask
from tfos.errors import SettingsError
from tfos.feed.dataframe import check_classic, fed_columns, with_plain_names
from tfos.feed.request import FeedRequest
from tfos.feed.task_process import lasting_imports, partition_id

_DEFAULT = ("prediction", "array<float>")
_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}
_TEXTS = ("string", "binary")


def result_columns(output: Any, given: Sequence[str]) -> Any:
    """Return the result columns as a StructType.

    Args:
        output: a column's name, whose type is then array<float> (None: "prediction"); or names and
            types as Spark writes them, "digit int, scores array<float>", or as a StructType.
        given: names of the DataFrame's own columns, which do not change.

    Raises:
        SettingsError: an unknown type, or a name that the DataFrame already has.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    output = _DEFAULT[0] if output is None else output
    if isinstance(output, str):
        text = output.strip()
        text = f"`{text}` {_DEFAULT[1]}" if text.isidentifier() else text
        try:
            columns = StructType.fromDDL(text)
        except PySparkException as error:
            reason = str(error).strip().splitlines()[0]
            raise SettingsError(
                f"output={output!r} names no columns ({reason}); write a name, or names and types: "
                "'digit int, scores array<float>'"
            ) from None
    elif isinstance(output, StructType):
        columns = output
    else:
        raise SettingsError(
            f"output must be a string or a StructType, got {type(output).__qualname__}"
        )
    taken = {name.lower() for name in given}
    for field in columns.fields:
        if field.name.lower() in taken:
            raise SettingsError(
                f"output= has a column {field.name!r}, but the DataFrame has one already: "
                f"{list(given)}; choose another name"
            )
        taken.add(field.name.lower())
    if not columns.fields:
        raise SettingsError("output= names no column")
    return columns


def arrow_fields(columns: Any) -> tuple[pa.Field, ...]:
    """Return the result columns of a StructType as Arrow's.

    Raises:
        SettingsError: a type that results cannot have.
    """
    return tuple(pa.field(field.name, _arrow_type(field, field.dataType)) for field in columns)


def _arrow_type(field: Any, kind: Any, *, inside: bool = False) -> pa.DataType:
    name = kind.simpleString()
    if name in _PLAIN and not (inside and name in _TEXTS):
        return _PLAIN[name]
    if hasattr(kind, "elementType"):
        return pa.list_(_arrow_type(field, kind.elementType, inside=True))
    raise SettingsError(
        f"output= column {field.name!r} is {field.dataType.simpleString()}; results can be "
        f"{', '.join(_PLAIN)}, or arrays of numbers and booleans, however nested"
    )


def is_frame(data: Any) -> bool:
    """Whether the data is a DataFrame, not an RDD."""
    return hasattr(data, "mapInArrow") and hasattr(data, "schema")


def answered(request: FeedRequest, task: InferenceTask) -> Any:
    """Return the lazy DataFrame of the given one's columns and the result columns.

    Args:
        request: the call's arguments.
        task: runs in Spark's tasks.

    Raises:
        SettingsError: columns=, nulls= or output= does not fit the DataFrame, or it is one of
            Connect.
    """
    frame = request.data
    check_classic(frame)
    results = result_columns(request.output, frame.columns)
    fields = arrow_fields(results)
    asked = request.columns
    columns = [asked] if isinstance(asked, str) else asked
    positions, packer = fed_columns(frame, columns, request.nulls)
    arrow_task = ArrowInferenceTask(task=task, fields=fields, packer=packer)
    return with_results(frame, positions, results, arrow_task)


class ResultTask(Protocol):
    """Answers the rows of a partition."""

    def results(
        self, partition: int, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the result columns, one row per row, in order, in any batches."""

    def beside(
        self,
        partition: int,
        batches: Iterator[pa.RecordBatch],
        names: Sequence[str],
        places: Sequence[int],
    ) -> Iterator[pa.RecordBatch]:
        """Yield each batch under other names with its result columns appended."""


def with_results(frame: Any, positions: Sequence[int], results: Any, task: ResultTask) -> Any:
    """Return the lazy DataFrame of the given one's columns and the result columns.

    Args:
        frame: a classic DataFrame.
        positions: positions of the columns that the task is given.
        results: the result columns as a StructType.
        task: runs in Spark's tasks.
    """
    beside = _by_map if arrow_udf() is None else _by_udf
    return beside(frame, positions, results, task)


def _by_udf(frame: Any, positions: Sequence[int], results: Any, task: ResultTask) -> Any:
    """Spark keeps the rows: only the fed columns go to its Python process, only results return."""
    from pyspark.sql.functions import col, spark_partition_id

    plain = with_plain_names(frame)
    if '"udt"' in frame.schema.json():
        # Spark 4.3 fails where a UDF is given a file's column batches with vectors. A filter that
        # it cannot leave out makes rows of them.
        plain = plain.where(spark_partition_id() >= 0)
    sent = [plain.columns[position] for position in positions]

    def answer(arrays: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        columns = ([each] if len(sent) == 1 else list(each) for each in arrays)
        batches = (pa.RecordBatch.from_arrays(each, sent) for each in columns)
        with lasting_imports():
            for found in task.results(partition_id(), batches):
                yield found.to_struct_array()

    # Not deterministic: otherwise Spark may compute the same results more than once.
    answers = arrow_udf()(answer, returnType=results).asNondeterministic()(*sent)
    name = _free_name(plain.columns)
    given = [col(old).alias(new) for old, new in zip(plain.columns, frame.columns, strict=True)]
    beside = [col(name)[field.name].alias(field.name) for field in results.fields]
    return plain.select("*", answers.alias(name)).select(*given, *beside)


def _by_map(frame: Any, positions: Sequence[int], results: Any, task: ResultTask) -> Any:
    """Send all columns through Spark's Python process, as Spark 4.0 needs."""
    from pyspark.sql.types import StructType

    names = tuple(frame.columns)

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with lasting_imports():
            yield from task.beside(partition_id(), batches, names, positions)

    schema = StructType([*frame.schema.fields, *results.fields])
    return with_plain_names(frame).mapInArrow(answer, schema)


def arrow_udf() -> Any:
    """Return pyspark's arrow_udf, which exists since Spark 4.1, or None."""
    from pyspark.sql import functions

    return getattr(functions, "arrow_udf", None)


def _free_name(taken: Sequence[str]) -> str:
    name, lower = "answers", {each.lower() for each in taken}
    while name in lower:
        name += "_"
    return name
