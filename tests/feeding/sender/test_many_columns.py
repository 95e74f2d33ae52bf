"""Rows of as many columns as a schema may have reach a worker, and results come back."""

from __future__ import annotations

import functools
import itertools

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from feeding.arrow.packer import ArrowPacker
from feeding.columnar.schema import MAX_COLUMNS, most_bytes
from feeding.config import FeedConfig
from tests.support.feed import answer_all, feed_task, inference_task, read_epochs, workers

pytestmark = pytest.mark.socket


def names_of(num_columns):
    return tuple(f"feature_{column:04}" for column in range(num_columns))  # 12 characters


@pytest.mark.slow
@pytest.mark.parametrize(("num_columns", "transport"), [(1000, "tcp"), (MAX_COLUMNS, "unix")])
def test_a_frame_of_many_columns_is_fed(num_columns, transport):
    names = names_of(num_columns)
    batch = pa.record_batch({name: np.arange(3.0) for name in names})
    with workers(1, transport=transport) as some:
        packer = functools.partial(ArrowPacker, names=names)
        reading = read_epochs(some[0], batch_size=3)
        list(feed_task(some, packer=packer)(0, iter([batch])))
        some[0].channel.flush("input", 0)
        some[0].channel.finish("input")
        ((found,),) = reading.result()
    assert found.schema.names == names
    assert all(column.tolist() == [0.0, 1.0, 2.0] for column in found.arrays)


def test_a_schema_takes_no_more_bytes_than_the_driver_reckons():
    inner = pa.struct([("a", pa.list_(pa.list_(pa.float64()))), ("bü", pa.list_(pa.string()))])
    rows = [{"a": [[0.0] * 300] * 2, "bü": ["x"]}]
    batch = pa.record_batch({"s": pa.array([{"inner": rows[0]}], pa.struct([("inner", inner)]))})
    (chunk,) = ArrowPacker(FeedConfig()).chunks(iter([batch]))
    schema = chunk.meta.schema
    assert len(schema.columns) == 2
    assert len(msgspec.msgpack.encode(schema)) <= most_bytes(schema.names)


@pytest.mark.slow
def test_results_of_many_columns_come_back():
    row = dict(zip(names_of(MAX_COLUMNS), itertools.count(), strict=False))
    with workers(1) as some:
        answering = answer_all(some[0], lambda rows: [row] * len(rows))
        assert list(inference_task(some)(0, iter([1.0, 2.0]))) == [row, row]
        some[0].channel.finish("input")
        answering.result()
