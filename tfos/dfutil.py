"""TensorFlowOnSpark's functions between DataFrames and TFRecord files, under their names.

Covers: saveAsTFRecords, loadTFRecords, isLoadedDF, and the conversions of rows and records.
Does not: have options; Spark's format "tfrecord" does (docs/guides/datasource.md).
Runs in: the driver; in tasks `fromTFExample` and the function that `toTFExample` returns. Imports
pyspark only inside functions, TensorFlow never: its Example objects are accepted, but not needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from feeding.errors import DataError, FeedSettingsError, RowError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, Row, StructType

loadedDF: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""DataFrames that loadTFRecords has returned in this program, with their directories."""

_FLOATS = ("float", "double")
_INTS = ("boolean", "tinyint", "smallint", "int", "bigint", "long")
_BYTES = ("string", "binary")


def saveAsTFRecords(df: Any, output_dir: str) -> None:
    """Write a DataFrame as TFRecord files of tf.Example.

    Args:
        df: columns of numbers, booleans, text, bytes, and arrays of these; nulls are omitted.
        output_dir: a path on any supported file system; without a scheme it is on `fs.defaultFS`.

    Raises:
        AnalysisException: Spark's, with the reason in its text: the directory is not empty, or a
            column has a type that a record cannot hold.
    """
    from tfos.datasource import register_data_sources

    session = df.sparkSession
    register_data_sources(session)
    path = _complete(session, output_dir)
    df.write.format("tfrecord").mode("append").option("ifExists", "error").save(path)


def loadTFRecords(sc: Any, input_dir: str, binary_features: Sequence[str] = ()) -> Any:
    """Return the records of TFRecord files as a DataFrame, columns in the order of their names.

    A sample of several files determines the schema: int64 lists are bigint, float lists double.
    Bytes lists are string, or binary if they are named or the sample is not UTF-8. A feature is an
    array unless every record of the sample has exactly one value. A missing feature is null.

    Args:
        sc: SparkContext or SparkSession.
        input_dir: file, directory or pattern.
        binary_features: names of bytes features that are binary in any case; or one name.

    Raises:
        DataError: no schema can be inferred.
        FileNotFoundError: there is no file.
    """
    from pyspark.sql import SparkSession

    from tfos.datasource import register_data_sources
    from tfos.datasource.inference import infer_schema as infer
    from tfos.datasource.listing import list_files
    from tfos.datasource.options import TFRecordOptions

    session = sc if hasattr(sc, "createDataFrame") else SparkSession(sc)
    register_data_sources(session)
    path = _complete(session, input_dir)
    options = TFRecordOptions(paths=(path,), binary_features=_names(binary_features))
    schema = _with_doubles(infer(list_files(options), options))
    df = session.read.format("tfrecord").schema(schema).load(path)
    loadedDF[df] = path
    return df


def isLoadedDF(df: Any) -> bool:
    """Whether loadTFRecords has returned this very DataFrame; derived ones do not count."""
    return df in loadedDF


def toTFExample(
    dtypes: Sequence[tuple[str, str]],
) -> Callable[[Iterable[Any]], Iterator[tuple[bytearray, None]]]:
    """Return a function for `rdd.mapPartitions` that converts rows to pairs of a record and None.

    Args:
        dtypes: `df.dtypes`: names and types of the columns.

    Raises:
        FeedSettingsError: a column has a type that a record cannot hold.
        RowError: an array holds a null; raised in a task.
    """
    kinds = {name: _kind_of(name, dtype) for name, dtype in dtypes}

    def encode(rows: Iterable[Any]) -> Iterator[tuple[bytearray, None]]:
        from feeding.formats.tfrecord.from_rows import encode_example

        for row in rows:
            features = {name: _of_kind(name, kind, row[name]) for name, kind in kinds.items()}
            yield bytearray(encode_example(features)), None

    return encode


def fromTFExample(
    iter: Iterable[Any],  # noqa: A002 - its name there
    binary_features: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield a Row for each record: a single value as a scalar, several as a list, none as None.

    Args:
        iter: serialized records, pairs that begin with one, or tf.train.Example objects.
        binary_features: names of bytes features that become bytearrays, or one name; others become
            text.

    Raises:
        DataError: a record is not a tf.Example, or text is not UTF-8.
    """
    from pyspark.sql import Row

    from feeding.formats.tfrecord.infer import decode_example

    binary = _names(binary_features)
    for item in iter:
        values = decode_example(_serialized(item))
        # Not by keywords: a feature may be called "cls".
        yield Row(*values)(*(_value(name, each, binary) for name, each in values.items()))


def infer_schema(example: Any, binary_features: Sequence[str] = ()) -> StructType:
    """Return the schema of one record, columns in the order of their names.

    Args:
        example: a serialized record, a pair that begins with one, or a tf.train.Example.
        binary_features: names of bytes features that are binary, or one name; others are string.

    Raises:
        DataError: the record is not a tf.Example.
    """
    from pyspark.sql import types

    from feeding.formats.tfrecord.infer import decode_example, survey

    record = _serialized(example)
    found = survey([record])
    kinds = {"float32": types.DoubleType(), "int64": types.LongType(), "bytes": types.StringType()}
    schema, binary = types.StructType(), _names(binary_features)
    for name in decode_example(record):
        kind: DataType = kinds[found[name].kind] if name in found else types.StringType()
        if name in binary:
            kind = types.BinaryType()
        is_array = name in found and found[name].most != 1
        schema.add(name, types.ArrayType(kind) if is_array else kind)
    return schema


def _names(given: Sequence[str]) -> frozenset[str]:
    """Return the given names; a str is one name."""
    return frozenset((given,) if isinstance(given, str) else given)


def _complete(session: Any, path: str) -> str:
    """Return the complete URL of a path, resolved as Spark does."""
    from tfos.datasource.listing import path_on
    from tfos.spark.facts import classic_context

    hadoop = classic_context(session)._jsc.hadoopConfiguration()
    return path_on(path, hadoop.get("fs.defaultFS") or "file:///")


def _with_doubles(schema: StructType) -> StructType:
    from pyspark.sql import types

    doubles = {
        types.FloatType(): types.DoubleType(),
        types.ArrayType(types.FloatType()): types.ArrayType(types.DoubleType()),
    }
    fields = [(field.name, doubles.get(field.dataType, field.dataType)) for field in schema.fields]
    return types.StructType([types.StructField(name, kind) for name, kind in fields])


def _kind_of(name: str, dtype: str) -> str:
    value = dtype.removeprefix("array<").removesuffix(">") if dtype.startswith("array<") else dtype
    if value in _FLOATS:
        return "float32"
    if value in _INTS:
        return "int64"
    if value in _BYTES:
        return ""
    raise FeedSettingsError(
        f"column {name!r} is {dtype}; a tf.Example holds numbers, booleans, text, bytes, and "
        "arrays of these"
    )


def _of_kind(name: str, kind: str, value: Any) -> Any:
    """Return a value of a row as an array of this dtype; text and bytes unchanged."""
    if isinstance(value, list | tuple) and None in value:
        raise RowError(
            f"column {name!r} has a null inside an array, which a tf.Example cannot hold; fill or "
            "filter it"
        )
    if not kind or value is None:
        return value
    import numpy as np

    return np.asarray(value, kind)


def _serialized(item: Any) -> bytes:
    if isinstance(item, tuple):
        item = item[0]
    if hasattr(item, "SerializeToString"):
        item = item.SerializeToString()
    if not isinstance(item, bytes | bytearray | memoryview):
        raise DataError(
            f"a record must be bytes, a pair that begins with bytes, or a tf.train.Example, got a "
            f"{type(item).__name__}"
        )
    return bytes(item)


def _value(name: str, values: list[Any], binary_features: frozenset[str]) -> Any:
    if values and isinstance(values[0], bytes):
        values = [_text(name, value, binary_features) for value in values]
    if len(values) > 1:
        return values
    return values[0] if values else None


def _text(name: str, value: bytes, binary_features: frozenset[str]) -> str | bytearray:
    if name in binary_features:
        return bytearray(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"feature {name!r} holds bytes that are not UTF-8; name it in binary_features"
        ) from None
