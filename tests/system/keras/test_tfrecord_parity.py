"""TFRecord and tf.Example against TensorFlow: its files are read here, ours there, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from feeding.columnar.batch import BatchColumn, Ragged
from feeding.formats.tfrecord.example import ExampleDecoder, Feature
from feeding.formats.tfrecord.framing import RecordReader, RecordWriter
from feeding.formats.tfrecord.from_arrow import ExampleEncoder
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.infer import infer_features
from feeding.reading.bad_records import BadData

pytestmark = pytest.mark.tf
FEATURES = {
    "floats": Feature("float32", (3, 4)),
    "ints": Feature("int64", (2,)),
    "one": Feature("int64"),
    "text": Feature("bytes"),
    "any_ints": Feature("int64", None),
    "any_texts": Feature("bytes", None),
}


def rows() -> list[dict[str, Any]]:
    dice = np.random.default_rng(3)
    return [
        {
            "floats": dice.normal(size=(3, 4)).astype(np.float32),
            "ints": dice.integers(-(2**63), 2**63 - 1, 2),
            "one": np.int64(number),
            "text": f"row {number} \u20ac".encode(),
            "any_ints": dice.integers(0, 300, number % 4),
            "any_texts": [b"ab" * count for count in range(number % 3)],
        }
        for number in range(200)
    ]


def by_tensorflow(row: dict[str, Any]) -> bytes:
    def feature(value: Any) -> tf.train.Feature:
        array = np.ravel(value)
        if isinstance(value, np.ndarray | np.generic) and array.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=array))
        if isinstance(value, np.ndarray | np.generic):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=array))
        texts = [value] if isinstance(value, bytes) else value
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=texts))

    features = {name: feature(value) for name, value in row.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(
        deterministic=True
    )


def read(path: Path) -> tuple[list[bytes], list[dict[str, BatchColumn]]]:
    decoder = ExampleDecoder(FEATURES)
    records, columns = [], []
    with path.open("rb") as file:
        for block in RecordReader(file, path.name).blocks():
            records += list(block.records())
            columns.append(decoder.decode(block, path.name, BadData()))
    return records, columns


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_what_tensorflow_writes_is_read_and_decoded_as_it_does(tmp_path: Path, compression: str):
    path = tmp_path / "part-0"
    records = [by_tensorflow(row) for row in rows()]
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression)) as writer:
        for record in records:
            writer.write(record)
    found, (columns,) = read(path)
    assert found == records
    spec = {
        name: tf.io.RaggedFeature(dtype(feature))
        if feature.shape is None
        else tf.io.FixedLenFeature(feature.shape, dtype(feature))
        for name, feature in FEATURES.items()
    }
    for name, expected in tf.io.parse_example(records, spec).items():
        column = columns[name]
        if isinstance(column, Ragged):
            np.testing.assert_array_equal(column.values, expected.values)
            np.testing.assert_array_equal(column.offsets, expected.row_splits)
        else:
            np.testing.assert_array_equal(column, expected)


def dtype(feature: Feature) -> tf.DType:
    return tf.string if feature.dtype == "bytes" else tf.as_dtype(feature.dtype)


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_what_is_written_here_is_read_by_tensorflow(tmp_path: Path, compression: str):
    path = tmp_path / "part-0"
    records = [encode_example(row) for row in rows()]
    with path.open("wb") as file:
        writer = RecordWriter(file, gzip=bool(compression))
        for record in records:
            writer.write(record)
        writer.close()
    assert [item.numpy() for item in tf.data.TFRecordDataset(str(path), compression)] == records
    for row, record in zip(rows(), records, strict=True):
        ours = tf.train.Example.FromString(record)
        theirs = tf.train.Example.FromString(by_tensorflow(row))
        for name, value in theirs.features.feature.items():
            if value.WhichOneof("kind") and ours.features.feature[name] != value:
                assert not row[name], name  # an empty list has no kind here
    assert infer_features(records).keys() == FEATURES.keys()


def test_columns_are_written_as_tensorflow_writes_their_rows_to_the_byte(tmp_path: Path):
    table = pa.table(
        {
            "floats": pa.array(
                [list(row["floats"].ravel()) for row in rows()], pa.list_(pa.float32())
            ),
            "any_ints": pa.array([list(row["any_ints"]) for row in rows()], pa.list_(pa.int64())),
            "any_texts": pa.array([row["any_texts"] for row in rows()], pa.list_(pa.binary())),
            "one": pa.array([row["one"] if row["one"] % 3 else None for row in rows()], pa.int64()),
            "\u20ac" * 60: pa.array([row["text"] for row in rows()], pa.binary()),
        }
    )
    (batch,) = table.to_batches()
    (tmp_path / "part-0").write_bytes(ExampleEncoder(batch.schema).encode(batch).data)

    expected = []
    for row in batch.to_pylist():
        row["floats"] = np.array(row["floats"], np.float32)
        row["any_ints"] = np.array(row["any_ints"], np.int64)
        row["one"] = row["one"] if row["one"] is None else np.int64(row["one"])
        expected.append(by_tensorflow({k: v for k, v in row.items() if v is not None}))
    found = tf.data.TFRecordDataset(str(tmp_path / "part-0"))
    assert [item.numpy() for item in found] == expected


def test_tensorflowonsparks_functions_take_tensorflows_objects():
    from tfos import dfutil

    (first, *_) = rows()
    example = tf.train.Example.FromString(by_tensorflow(first))
    assert dfutil.infer_schema(example, ["text"]) == dfutil.infer_schema(
        by_tensorflow(first), ["text"]
    )
    (row,) = dfutil.fromTFExample([example], ["text"])
    assert (row.one, bytes(row.text)) == (first["one"], first["text"])
    np.testing.assert_array_equal(row.floats, first["floats"].ravel())
