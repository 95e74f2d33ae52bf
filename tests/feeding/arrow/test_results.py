"""Chunks of results as Arrow arrays: every kind of result that fits, and what does not."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.arrow.results import arrays_of
from feeding.config import FeedConfig
from feeding.encode.arrays import ArrayPacker, columns_of
from feeding.errors import ResultTypeError
from feeding.sender.arrow_inference import UnansweredBatches
from tests.support.packed import packed

LIST = pa.list_(pa.float32())


def arrays(results, **fields):
    """Pack results as `batch_results` does and read them as these columns."""
    packer = ArrayPacker(FeedConfig())
    columns = columns_of(results)
    (chunk,) = [packed(packer, results)] if columns is None else packer.pack_columns(columns)
    return arrays_of(chunk, [pa.field(name, kind) for name, kind in fields.items()])


FITTING = [
    ([1, 2, 300], pa.int16()),
    ([1, 2, 300], pa.float64()),
    ([-1, 2, 3], pa.int8()),
    ([0.5, 1.5], pa.float32()),
    ([-(2**24), 2**24, 2**25 + 4], pa.float32()),
    ([-(2**53), 2**53], pa.float64()),
    ([math.inf, -math.inf, 0.5], pa.float32()),
    ([True, False, True], pa.bool_()),
    (["a", "", "ü"], pa.string()),
    ([b"a", b"", b"\xff"], pa.binary()),
    ([[1.0, 2.0], [3.0, 4.0]], LIST),
    ([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int64())),
    ([[1.0], [], [2.0, 3.0]], LIST),
    ([[], []], LIST),
    ([[True, False], [False, False]], pa.list_(pa.bool_())),
    ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float64()))),
]


@pytest.mark.parametrize(("values", "kind"), FITTING, ids=str)
def test_results_that_fit_keep_their_values(values, kind):
    (array,) = arrays(values, p=kind)
    array.validate(full=True)
    assert array.type == kind
    assert array.to_pylist() == values


@settings(max_examples=50)
@given(
    st.integers(1, 20),
    st.integers(0, 5),
    st.sampled_from(["uint8", "int16", "int64", "float16", "float32", "float64"]),
    st.sampled_from([pa.float32(), pa.float64()]),
)
def test_arrays_become_lists_of_their_rows(num_rows, width, dtype, kind):
    given_rows = np.arange(num_rows * width).reshape(num_rows, width).astype(dtype)
    (array,) = arrays(given_rows, p=pa.list_(kind))
    array.validate(full=True)
    assert array.to_pylist() == given_rows.astype(float).tolist()


MISFITS = [
    ([1.0, 2.0], pa.int32(), r"column 'p' are float64, expected int32"),
    ([1.0, 2.0], LIST, r"are float64, expected array<float>: .* output='p TYPE'"),
    ([[1.0], [2.0]], pa.float32(), r"are float64\[1\], expected float"),
    ([[1.0], [2.0, 3.0]], pa.float32(), r"are float64\[\?\], expected float"),
    ([True], pa.int32(), "are bool, expected int32"),
    ([1], pa.bool_(), "are int64, expected bool"),
    (["a"], pa.binary(), "are str, expected binary"),
    ([b"a"], pa.string(), "are bytes, expected string"),
    (["a"], LIST, "are str, expected array<float>"),
    ([1, 200], pa.int8(), "column 'p' go from 1 to 200, expected int8"),
    ([2**40], pa.int32(), "go from 1099511627776 to 1099511627776, expected int32"),
    ([[2**25, 2**24 + 1]], LIST, r"16777217, expected array<float>.* output='p array<double>'"),
    ([-(2**53) - 1], pa.float64(), r"-9007199254740993, expected double.* output='p bigint'"),
    ([1e300], pa.float32(), r"1e\+300, expected float, .* output='p double'"),
    ([[[1.0]], [[2.0]]], LIST, r"are float64\[1, 1\], expected array<float>"),
    ([(1, 2), (3, 4)], LIST, r"hold \(0: int64, 1: int64\), expected p array<float>"),
    ([{"q": 1}, {"q": 2}], pa.int32(), r"hold \(q: int64\), expected p int32"),
]


@pytest.mark.parametrize(("values", "kind", "text"), MISFITS, ids=str)
def test_results_that_do_not_fit_are_named(values, kind, text):
    with pytest.raises(ResultTypeError, match=text):
        arrays(values, p=kind)


def test_several_columns_go_by_name_or_by_place():
    by_name = [{"score": [0.5, 0.5], "digit": 3}, {"score": [1.0, 0.0], "digit": 0}]
    digits, scores = arrays(by_name, digit=pa.int32(), score=LIST)
    assert digits.to_pylist() == [3, 0]
    assert scores.to_pylist() == [[0.5, 0.5], [1.0, 0.0]]
    by_place = [(3, [0.5, 0.5]), (0, [1.0, 0.0])]
    assert arrays(by_place, digit=pa.int32(), score=LIST) == [digits, scores]
    whole = {"score": np.array([[0.5, 0.5], [1.0, 0.0]]), "digit": np.array([3, 0])}
    assert arrays(whole, digit=pa.int32(), score=LIST) == [digits, scores]


def test_float32_vectors_are_not_copied():
    scores = np.arange(20, dtype=np.float32).reshape(2, 10)
    packer = ArrayPacker(FeedConfig())
    columns = columns_of(scores)
    assert columns is not None
    (chunk,) = packer.pack_columns(columns)
    (array,) = arrays_of(chunk, [pa.field("p", LIST)])
    assert array.values.buffers()[1].address == chunk.columns[0].values.ctypes.data


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=6), st.lists(st.integers(1, 20), max_size=60))
def test_every_batch_leaves_with_the_results_of_its_own_rows(sizes, answers):
    total, start, batches = sum(sizes), 0, []
    for size in sizes:
        batches.append(pa.RecordBatch.from_pydict({"x": list(range(start, start + size))}))
        start += size
    waiting = UnansweredBatches(iter(batches), ["a.b"])
    for batch in waiting:
        assert batch.num_rows
    assert waiting.num_bytes == sum(batch.nbytes for batch in batches)
    left: list[pa.RecordBatch] = []
    at = 0
    for size in [*answers, total]:
        stop = min(total, at + size)
        results = pa.RecordBatch.from_pydict({"y": [10 * x for x in range(at, stop)]})
        left += waiting.answered(results)
        at = stop
    assert waiting.num_bytes == 0
    assert [batch.num_rows for batch in left] == [size for size in sizes if size]
    rows = [row for batch in left for row in batch.to_pylist()]
    assert rows == [{"a.b": x, "y": 10 * x} for x in range(total)]
