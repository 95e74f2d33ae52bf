"""Column types: which of Spark's types a record can hold, and their Arrow types.

Covers: checking a schema, its data columns apart from its partition columns, types for a survey.
Does not: look at files (tfos.datasource.inference) or values (feeding.formats.tfrecord.to_arrow).
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import types

from feeding.errors import FeedSettingsError
from feeding.reading.partition_paths import WRITABLE_KINDS
from tfos.datasource.options import RecordType

if TYPE_CHECKING:
    import pyarrow as pa

    from feeding.formats.tfrecord.infer import FeatureSurvey

_VALUES = (
    types.BooleanType,
    types.ByteType,
    types.ShortType,
    types.IntegerType,
    types.LongType,
    types.FloatType,
    types.DoubleType,
    types.StringType,
    types.BinaryType,
)
_ADVICE: tuple[tuple[type[types.DataType], str], ...] = (
    (types.DecimalType, "cast it to double, which rounds, or to string"),
    (types.DateType, "cast it to string, or to a number with unix_date"),
    (types.TimestampType, "cast it to string, or to a number with unix_micros"),
    (types.TimestampNTZType, "cast it to string"),
    (
        types.UserDefinedType,
        "vector_to_array of pyspark.ml.functions converts a vector to an array",
    ),
    (types.StructType, "select its fields as separate columns"),
    (types.MapType, "select its values as separate columns"),
    (types.ArrayType, "flatten it; a record holds arrays, not arrays of arrays"),
)
RECORD_SCHEMA = types.StructType([types.StructField("byteArray", types.BinaryType())])
"""Schema of raw records."""


def check_schema(schema: types.StructType, record_type: RecordType) -> None:
    """Refuse columns that a record cannot hold.

    Args:
        schema: the DataFrame's schema, without partition columns.
        record_type: what a record holds.

    Raises:
        FeedSettingsError: a record cannot hold a column; the text has its type and what to do.
    """
    names = schema.fieldNames()
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise FeedSettingsError(f"columns {twice} are duplicates; every feature needs its own name")
    if record_type == "ByteArray":
        kinds = [field.dataType for field in schema.fields]
        if kinds != [types.BinaryType()]:
            raise FeedSettingsError(
                "recordType ByteArray is one column of binary, got "
                f"{schema.simpleString()}; partition columns do not count"
            )
        return
    for field in schema.fields:
        whole = field.dataType
        kind = whole.elementType if isinstance(whole, types.ArrayType) else whole
        if not isinstance(kind, _VALUES):
            advice = next((text for base, text in _ADVICE if isinstance(kind, base)), "drop it")
            raise FeedSettingsError(
                f"no Example holds column {field.name!r} of type {whole.simpleString()}; {advice}"
            )


def check_partition_columns(schema: types.StructType, names: Iterable[str]) -> None:
    """Refuse columns that cannot become directories.

    Args:
        schema: the DataFrame's.
        names: the partition columns.

    Raises:
        FeedSettingsError: there is no such column, or its values cannot name a directory.
    """
    for name in names:
        if name not in schema.fieldNames():
            raise FeedSettingsError(
                f"partitionBy names {name!r}; the columns are {', '.join(schema.names)}"
            )
        if name.startswith("."):
            raise FeedSettingsError(
                f"partitionBy names {name!r}; readers skip directories that begin with a dot, "
                "rename it"
            )
        kind = schema[name].dataType.simpleString()
        if kind not in WRITABLE_KINDS:
            raise FeedSettingsError(
                f"partitionBy names {name!r}, which is {kind}; it must be one of "
                f"{', '.join(sorted(WRITABLE_KINDS))}; cast it to string"
            )


def without(schema: types.StructType, names: Iterable[str]) -> types.StructType:
    """Return the columns of the records, without those of the directories' names.

    Args:
        schema: the DataFrame's.
        names: the partition columns.
    """
    apart = set(names)
    kept = types.StructType([field for field in schema.fields if field.name not in apart])
    if not kept.fields:
        raise FeedSettingsError("every column is a partition column; a record needs at least one")
    return kept


def spark_schema(
    found: Mapping[str, FeatureSurvey], binary_features: Iterable[str]
) -> types.StructType:
    """Return the columns for a survey: one value is a scalar, any other number an array.

    Args:
        found: what the sampled records hold, by feature.
        binary_features: features that become BinaryType instead of StringType.
    """
    binary = set(binary_features)
    fields = []
    for name, seen in found.items():
        value: types.DataType = types.LongType()
        if seen.kind == "float32":
            value = types.FloatType()
        elif seen.kind == "bytes":
            is_text = seen.is_text and name not in binary
            value = types.StringType() if is_text else types.BinaryType()
        is_scalar = seen.least == seen.most == 1
        fields.append(types.StructField(name, value if is_scalar else types.ArrayType(value)))
    return types.StructType(fields)


def arrow_schema(schema: types.StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of a reader's batches."""
    from pyspark.sql.pandas.types import to_arrow_schema

    made: Any = to_arrow_schema(schema)
    return made
