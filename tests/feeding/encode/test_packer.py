"""Rows survive packing, encoding, decoding and rebuilding."""

import collections
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from feeding.columnar import chunk as chunks
from feeding.columnar.chunk import Chunk
from feeding.columnar.rows import rows_of
from feeding.columnar.schema import DTYPES, FeedRow, row_class
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import RowError
from tests.support.packed import packed

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DTYPE = st.sampled_from(sorted(DTYPES)).map(np.dtype)


def through_wire(chunk: Chunk) -> Chunk:
    """Encode to bytes and decode again, as a worker would."""
    import msgspec

    payload = bytearray().join(chunk.encode())
    meta = msgspec.msgpack.decode(msgspec.msgpack.encode(chunk.meta), type=chunks.ChunkMeta)
    assert chunks.payload_bytes(meta) == len(payload)
    return chunks.decode(meta, memoryview(payload))


def round_trip(rows, **settings):
    settings.setdefault("chunk_rows", 3)
    out: list = []
    packed = list(Packer(FeedConfig(**settings), partition=2).chunks(iter(rows)))
    assert [c.meta.last_in_partition for c in packed] == [False] * (len(packed) - 1) + [
        True
    ] * bool(packed)
    for chunk in packed:
        assert chunk.meta.first_row == len(out)
        out += rows_of(through_wire(chunk))
    return out


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and not isinstance(b, FeedRow):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and (type(a) is type(b) or isinstance(b, FeedRow))


def vectors(numbers):
    return st.integers(0, 6).flatmap(
        lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), max_size=8)
    )


def column(values, min_size=1):
    return st.lists(values, min_size=min_size, max_size=8)


HOMOGENEOUS = st.one_of(
    column(INT64),
    column(FLOAT),
    column(st.booleans()),
    column(TEXT),
    column(st.binary(max_size=20)),
    vectors(INT64),
    vectors(st.integers(0, 255)),
    vectors(st.integers(-300, 70_000)),
    vectors(FLOAT),
    vectors(st.booleans()),
    column(st.lists(st.integers(0, 255), max_size=5)),
    column(st.lists(FLOAT, min_size=1, max_size=5)),
    DTYPE.flatmap(
        lambda d: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).flatmap(
            lambda s: column(
                hnp.arrays(d, s, elements={"allow_nan": False} if d.kind == "f" else None)
            )
        )
    ),
)


@hypothesis.given(HOMOGENEOUS)
def test_rows_of_one_value_come_back_equal(rows):
    assert same(round_trip(rows), rows)


@hypothesis.given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=4, max_size=4), INT64, TEXT, FLOAT),
        max_size=9,
    ),
    st.sampled_from(["tuple", "list", "dict", "row", "nested"]),
)
def test_groups_come_back_equal(rows, shape):
    makers: dict = {
        "tuple": lambda r: r,
        "list": list,
        "dict": lambda r: dict(zip("abcd", r, strict=True)),
        "row": row_class(("a", "b", "c", "d")),
        "nested": lambda r: ({"x": r[0], "y": (r[1], r[2])}, r[3]),
    }
    given = [makers[shape](row) for row in rows]
    assert same(round_trip(given), given)


def test_small_ints_travel_as_one_byte_and_come_back_as_ints():
    chunk = packed(Packer(FeedConfig()), [[0, 255, 7]] * 5)
    assert chunk.meta.stored == ("uint8",)
    assert chunk.meta.schema.columns[0].dtype == "int64"
    assert rows_of(chunk)[0] == [0, 255, 7]


@pytest.mark.parametrize(
    ("row", "stored"),
    [([-1, 3], "int16"), ([70_000, 3], "int32"), ([2**40, 3], "int64"), ([0.5, 3], "float64")],
)
def test_ints_travel_as_narrow_as_they_fit(row, stored):
    chunk = packed(Packer(FeedConfig()), [row])
    assert chunk.meta.stored == (stored,)
    assert rows_of(through_wire(chunk)) == [row]


def test_a_float_after_ints_makes_the_column_float():
    assert round_trip([[1, 2], [3, 4], [5, 0.5]], chunk_rows=2) == [[1, 2], [3, 4], [5.0, 0.5]]
    assert round_trip([1, 2, 0.5]) == [1.0, 2.0, 0.5]


def test_numpys_bools_among_ints_are_ints():
    chunk = packed(Packer(FeedConfig()), [[2**60 + 1, 2], [np.bool_(True), 3]])
    assert chunk.meta.schema.columns[0].dtype == "int64"
    assert rows_of(chunk) == [[2**60 + 1, 2], [1, 3]]
    assert round_trip([[1, 0.5], [np.bool_(True), 3]]) == [[1.0, 0.5], [1.0, 3.0]]


@pytest.mark.parametrize("nest", [lambda row: row, lambda row: [row, row]])
def test_numpys_unsigned_ints_beside_other_ints_stay_ints(nest):
    """Their common dtype in numpy is float64, which has one number for both of these."""
    for other in (5, np.int64(5)):
        small = packed(Packer(FeedConfig()), [nest([np.uint64(7), other])])
        assert small.meta.schema.columns[0].dtype == "int64"
        rows = [nest([np.uint64(2**53 + 1), other]), nest([np.uint64(2**53), other])]
        chunk = packed(Packer(FeedConfig()), rows)
        assert chunk.meta.schema.columns[0].dtype == "int64"
        assert rows_of(chunk) == rows
        with pytest.raises(RowError, match=r"row 1, column 'value': value 0 .*does not fit int64"):
            packed(Packer(FeedConfig()), [nest([1, other]), nest([np.uint64(2**63), other])])
    unsigned = [nest([np.uint64(2**63 - 1), np.uint64(1)])]
    assert packed(Packer(FeedConfig()), unsigned).meta.schema.columns[0].dtype == "uint64"
    floats = [nest([np.uint64(2**53), 0.5])]
    assert packed(Packer(FeedConfig()), floats).meta.schema.columns[0].dtype == "float64"
    for odd in (np.array(0.5), np.array(2**63, np.uint64)):
        with pytest.raises(RowError, match=r"row 1, .*\(ndarray\); a vector holds numbers only"):
            packed(Packer(FeedConfig()), [nest([1, 2]), nest([3, odd])])


def test_nested_lists_are_a_tensor_and_uneven_ones_are_columns():
    chunk = packed(Packer(FeedConfig()), [[[1, 2], [3, 4], [5, 6]]])
    assert chunk.meta.schema.columns[0].shape == (3, 2)
    assert round_trip([[[1, 2, 3], [4]], [[5, 6, 7], [8]]]) == [[[1, 2, 3], [4]], [[5, 6, 7], [8]]]


def test_short_tuples_are_columns_and_long_ones_vectors():
    pack = partial(packed, Packer(FeedConfig()))
    assert pack([(1.0, 2.0, 3.0)]).meta.schema.names == ("0", "1", "2")
    assert pack([(1.0, 2.0, 3.0, 4.0)]).meta.schema.names == ("value",)
    assert pack([(1, 2.0, 3.0, 4.0)]).meta.schema.names == ("0", "1", "2", "3")


def test_a_named_row_is_read_by_name_and_by_position_and_pickles():
    import pickle

    Point = collections.namedtuple("Point", "x label")
    (row,) = round_trip([Point(1.5, "a")])
    assert (row.x, row["label"], row[0]) == (1.5, "a", 1.5)
    assert row == (1.5, "a")
    assert row.asDict() == {"x": 1.5, "label": "a"}
    assert repr(row) == "Row(x=1.5, label='a')"
    assert pickle.loads(pickle.dumps(row)).label == "a"
    with pytest.raises(AttributeError, match="the row has"):
        getattr(row, "missing")  # noqa: B009 - a field, not an attribute


def test_a_row_is_asked_for_fields_and_becomes_dicts_as_in_pyspark():
    Point = collections.namedtuple("Point", "x label")
    Pair = collections.namedtuple("Pair", "first other")
    (row,) = round_trip([Pair(Point(1.5, "a"), {"b": [Point(2.5, "first")]})])
    assert "first" in row
    assert "first" not in row.other["b"][0]  # a value
    assert row.asDict() == {"first": row[0], "other": row[1]}
    point = {"x": 2.5, "label": "first"}
    found = row.asDict(recursive=True)
    assert found == {"first": {"x": 1.5, "label": "a"}, "other": {"b": [point]}}
    assert type(found["first"]) is type(found["other"]["b"][0]) is dict


def test_vectors_of_spark_ml_are_read_through_toarray():
    class DenseVector:
        def toArray(self):
            return np.array([1.0, 2.0])

    assert round_trip([(DenseVector(), 1)])[0][0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("lengths", [(3, 3), (3, 2)])
def test_rows_in_both_byte_orders_are_one_column(lengths):
    first, second = (np.arange(length) for length in lengths)
    found = round_trip([first.astype(">i4"), second.astype("<i4")])
    assert [(row.dtype, row.tolist()) for row in found] == [
        (np.dtype("i4"), first.tolist()),
        (np.dtype("i4"), second.tolist()),
    ]


def test_empty_rows_and_no_rows():
    assert round_trip([]) == []
    assert round_trip([(), ()]) == [(), ()]
    assert round_trip([[], []]) == [[], []]
    assert round_trip([{}, {}]) == [{}, {}]


def test_nan_and_infinity_survive():
    (row,) = round_trip([[math.nan, math.inf, -math.inf]])
    assert math.isnan(row[0])
    assert row[1:] == [math.inf, -math.inf]


def test_scalars_of_numpy_and_long_tuples_come_back_as_such():
    for given in ([np.float32(1.5)], [np.int16(-3)], [np.bool_(True)], [(1, 2, 3, 4)] * 2):
        found = round_trip(given)
        assert (list(map(type, found)), found) == (list(map(type, given)), given)


def test_a_float_beside_an_int_of_more_than_64_bits_makes_it_a_float():
    for given in ([[1.5, 2**70]], [[np.float64(1.5), 2**70]], [[[1.5, 2**70]]]):
        (found,) = round_trip(given)
        assert np.ravel(found).tolist() == [1.5, 2.0**70]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([1, None], "partition 2, row 1, column 'value'|row 1: None"),
        ([(1, 2), (3, None)], r"row 1, column '1': None; .*fill or drop"),
        ([[1, 2], [3, None]], r"row 1, column 'value': value 1 is None"),
        ([[1.0, 2.0], [3.0, "x"]], r"row 1, column 'value': value 1 is 'x' \(str\)"),
        ([1, "x"], r"row 1: 'x' \(str\), but earlier rows have 1 \(int\)"),
        ([True, 1], r"row 1: 1 \(int\), but earlier rows have True \(bool\)"),
        ([(1, 2), (1, 2, 3)], "row 1: 3 values, but earlier rows have 2"),
        ([{"a": 1}, {"b": 1}], r"row 1: keys \['b'\], but earlier rows have \['a'\]"),
        ([{1: 2}], r"row 0: key 1 \(int\); keys must be str"),
        ([2**63], "9223372036854775808 does not fit int64"),
        ([[1, 2**63]], r"value 1 \(9223372036854775808\) does not fit int64"),
        ([[1, 2], [np.bool_(True), 2**63]], r"row 1.*value 1 \(9223372036854775808\) does not fit"),
        ([[[1], [2]], [[3], [2**63]]], r"row 1.*: value 1 \(9223372036854775808\) does not fit"),
        ([[[-1, 2**63]]], r"value 1 \(9223372036854775808\) does not fit int64"),
        ([[[1, 2], [3, -(2**64)]]], r"value 3 \(-18446744073709551616\) does not fit int64"),
        ([[np.int64(1)], [10**30]], r"row 1, .*value 0 \(10+\) does not fit int64"),
        ([1e300, 10**400], r"row 1, .*: 10+ does not fit float64"),
        ([[1e300], [10**400]], r"row 1, .*value 0 \(10+\) does not fit float64"),
        ([[np.float64(1)], [10**400]], r"row 1, .*value 0 \(10+\) does not fit float64"),
        ([[[1e300]], [[10**400]]], r"row 1, .*value 0 \(10+\) does not fit float64"),
        ([[[1, 2]], [[3, None]]], r"row 1, column 'value': value 1 is None"),
        ([[[1, 2]], [["a", "b"]]], r"row 1, column 'value': value 0 is 'a' \(str\)"),
        (
            [row_class(("x",))((1,)), row_class(("y",))((1,))],
            r"row 1: fields \['y'\], but earlier rows have \['x'\]",
        ),
        ([[[1, 2], [3, 4]], [[1, 2], [3]]], "row 1, column 'value': nested lists of differing"),
        ([np.zeros(2), np.zeros(2, np.float32)], "array of float32, but earlier rows have float64"),
        ([np.zeros((2, 2)), np.zeros((2, 3))], r"shape \(2, 3\), but earlier rows have \(2, 2\)"),
        ([np.array(["x"])], "array of <U1"),
        ([np.float32(1), np.float64(1)], "float64 scalar, but earlier rows have float32"),
        ([[[1, 2], [3, 4]], [[1, 2]]], r"shape \(1, 2\), but earlier rows have \(2, 2\)"),
        ([object()], "<object object"),
        (
            [["a", "b"], ["c"]],
            r"1 values, but earlier rows have 2; .*'\\n'\.join\(texts\), .*tf\.strings\.split",
        ),
        ([[True, False], [True, 3]], r"3 \(int\), but earlier rows hold only bool"),
        ([{"a": {"b": {"c": [None]}}}], r"column 'a\.b\.c\.0': None"),
        (["\ud800"], "not UTF-8"),
        ([{"x" * 300: 1}], "column name of 300 characters"),
        ([{"a.b": 1, "a": {"b": 2}}], "two columns have the same name"),
        ([{f"{'n' * 200}{i}": i for i in range(2000)}], "2000 columns takes"),
        ([1j], "1j"),
        ([np.ma.array([1, 2], mask=[False, True])], r"\(MaskedArray\); .*filled\(\) values"),
        ([{"x": 1.5}, {"x": np.ma.masked}], r"row 1, column 'x': .*\(MaskedConstant\); .*filled"),
        ([[1, 2], [np.ma.masked, 2]], r"row 1, column 'value': value 0 is .*MaskedConstant"),
    ],
)
def test_a_row_that_does_not_fit_is_named(rows, text):
    with pytest.raises(RowError, match=text):
        round_trip(rows)


def test_the_row_number_counts_from_the_partition_start():
    rows = [[1, 2]] * 10 + [[1, None]]
    with pytest.raises(RowError, match="partition 2, row 10"):
        round_trip(rows)


@pytest.mark.parametrize(
    ("inside_of", "text"),
    [
        (lambda value: {"a": value}, "values nest deeper than 8"),
        (lambda value: [value], "impossible shape"),
    ],
)
def test_nesting_has_a_limit(inside_of, text):
    deep = 1
    for _ in range(8):
        deep = inside_of(deep)
    assert round_trip([deep]) == [deep]
    with pytest.raises(RowError, match=text):
        round_trip([inside_of(deep)])


def test_chunks_follow_bytes_whatever_the_row_width():
    config = FeedConfig(chunk_rows=1000, chunk_bytes=1000)
    wide_last = [b"x" * 10] * 200 + [b"y" * 500] * 50
    sizes = [c.num_bytes for c in Packer(config).chunks(iter(wide_last))]
    assert max(sizes) <= 2000
    assert sum(c.num_rows for c in Packer(config).chunks(iter(wide_last))) == 250
    assert len(sizes) < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "wrap"),
    [
        (b"y", lambda x: x),
        ("y", lambda x: (1, x)),
        ([0.5], lambda x: {"a": x, "b": 2}),
        (np.zeros(1), lambda x: (x, 1)),
    ],
    ids=["bytes", "text in a tuple", "numbers in a dict", "arrays in a tuple"],
)
def test_rows_that_turn_wide_are_packed_before_many_of_them_are_held(value, wrap):
    read: list[int] = []
    wide = np.zeros(1 << 17) if isinstance(value, np.ndarray) else value * (1 << 17)
    num_bytes = 1 << (20 if isinstance(value, list | np.ndarray) else 17)

    def rows():
        yield wrap(value)
        for _ in range(200):
            read.append(num_bytes)
            yield wrap(wide)

    chunks = Packer(FeedConfig()).chunks(rows())
    ahead = left = 0
    for chunk in chunks:
        left += chunk.num_bytes
        ahead = max(ahead, sum(read) - left)
    assert len(read) == 200
    assert ahead <= 20 << 20


class Vector:
    """As a vector of Spark: it holds an array, and may be sparse."""

    def __init__(self, size):
        self.size = size

    def toArray(self):
        return np.zeros(self.size)


WIDE = {
    "row": lambda x: row_class(tuple(f"c{i}" for i in range(100)))((*range(99), x)),
    "tuple": lambda x: (*range(99), x),
    "dict": lambda x: {**{f"c{i}": i for i in range(99)}, "c99": x},
    "list of a few": lambda x: [1, x],
    "nested": lambda x: {"a": (1, [2, x])},
    "texts": lambda x: ["a", "b" * len(x)],
}


@pytest.mark.parametrize("wrap", [*WIDE.values()], ids=[*WIDE])
def test_a_wide_value_behind_others_is_seen_before_many_rows_are_held(wrap):
    config = FeedConfig(chunk_bytes=1 << 16)
    read = []

    def rows():
        yield wrap(b"")
        for number in range(400):
            read.append(number)
            yield wrap(b"x" * (1 << 16))

    next(iter(Packer(config).chunks(rows())))
    assert len(read) <= 64


def test_vectors_of_spark_are_seen_before_many_rows_are_held():
    read = []

    def rows():
        yield (Vector(1), 1)
        for number in range(400):
            read.append(number)
            yield (Vector(1 << 13), 1)

    next(iter(Packer(FeedConfig(chunk_bytes=1 << 16)).chunks(rows())))
    assert len(read) <= 64


def test_rows_that_turn_wide_by_turns_are_seen_before_many_are_held():
    read = []

    def rows():
        yield b""
        for number in range(400):
            read.append(number)
            yield b"" if number % 2 else b"x" * (1 << 17)

    next(iter(Packer(FeedConfig(chunk_bytes=1 << 16)).chunks(rows())))
    assert len(read) <= 64


def test_a_few_very_wide_rows_are_not_held_together():
    read = []

    def rows():
        yield b""
        for number in range(100):
            read.append(number)
            yield b"x" * (1 << 20)

    next(iter(Packer(FeedConfig(chunk_bytes=1 << 16)).chunks(rows())))
    assert len(read) <= 3


def test_a_long_text_before_many_numbers_leaves_chunks_as_large_as_others():
    rows = [("x" * 8000, *range(99))] * 1000
    chunks = list(Packer(FeedConfig()).chunks(iter(rows)))
    assert [chunk.num_bytes > 900_000 for chunk in chunks[1:-1]] == [True] * (len(chunks) - 2)
    assert len(chunks) < 12


def test_a_row_over_the_limit_is_refused_with_what_to_do():
    config = FeedConfig(chunk_bytes=100, max_chunk_bytes=1000)
    with pytest.raises(RowError, match=r"row 1: 20.* bytes, a row may have 1000; split it"):
        list(Packer(config).chunks(iter([b"x", b"y" * 2000])))


def test_huge_ints_among_floats_are_floats():
    assert round_trip([[1, 2], [2**70, 0.5]]) == [[1.0, 2.0], [2.0**70, 0.5]]
    assert round_trip([[2**53, math.inf], [1, 1e300]]) == [[2.0**53, math.inf], [1.0, 1e300]]
    with warnings.catch_warnings(action="error"):  # of 2**53 as a float16
        assert round_trip([[np.float16(2), np.int8(3)]]) == [[2.0, 3.0]]


@pytest.mark.parametrize(
    "row",
    [
        [2**53 + 1, 0.5],
        [-(2**53) - 1, math.nan],
        [np.int64(2**53 + 1), 0.5],
        [[2**53 + 1, 0.5]],
        2**53 + 1,
    ],
)
def test_an_int_that_floats_would_round_is_refused(row):
    rows = [np.full_like(row, 0.5, dtype=float).tolist(), row]
    with pytest.raises(RowError, match=r"row 1, .*9007199254740993 is an int among floats"):
        round_trip(rows)


class Dense:
    """A vector of Spark: it keeps the array that it was made of."""

    def __init__(self, values):
        self._values = values

    def toArray(self):
        return self._values


class Sparse:
    """A vector of Spark that makes another array each time."""

    def __init__(self):
        self.value = 0

    def toArray(self):
        return np.full(3, self.value)


class Pair(NamedTuple):
    x: Any
    y: Any


def filled_again(make: Callable[..., Any], count: int = 8) -> Iterator[Any]:
    """Yield rows around one array, one list and one bytearray, filled again for each row."""
    array, numbers, text = np.zeros(3, "f4"), [0, 0], bytearray(1)
    whole = make(array, numbers, text, 0)
    for row in range(count):
        array[:] = row
        numbers[:] = [row, -row]
        text[:] = bytes([row])
        if isinstance(whole, dict):
            whole["n"] = row
        yield whole if isinstance(whole, dict) else make(array, numbers, text, row)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1], ids=["many rows", "one row"])
@pytest.mark.parametrize(
    "make",
    [
        lambda array, *_: array,
        lambda array, *_: array[:2],
        lambda array, *_: Dense(array),
        lambda _, numbers, *__: numbers,
        lambda _, __, text, ___: text,
        lambda array, *_: (array, "text"),
        lambda array, numbers, text, row: {"a": array, "l": numbers, "t": text, "n": row},
        lambda array, numbers, _, row: Pair(array, (row, numbers)),
        lambda _, numbers, __, row: [[row], numbers],
        lambda _, __, ___, row: row,
    ],
    ids=["array", "view", "vector", "list", "bytes", "tuple", "dict", "row", "lists", "number"],
)
def test_a_generator_may_fill_one_row_again_for_each_row(make, chunk_bytes):
    """A chunk's rows are taken before they are encoded: without copies all would be the last."""
    config = FeedConfig(chunk_bytes=chunk_bytes, chunk_rows=3)
    found = [
        repr(row)
        for chunk in Packer(config).chunks(filled_again(make))
        for row in rows_of(through_wire(chunk))
    ]
    assert found == [
        repr(row)
        for each in range(8)
        for chunk in Packer(config).chunks(iter([list(filled_again(make, each + 1))[-1]]))
        for row in rows_of(through_wire(chunk))
    ]


def test_a_vector_that_makes_its_array_may_be_filled_again_too():
    def filled():
        vector = Sparse()
        for vector.value in range(8):
            yield vector

    found = [row for chunk in Packer(FeedConfig()).chunks(filled()) for row in rows_of(chunk)]
    assert [row.tolist() for row in found] == [[row] * 3 for row in range(8)]


def test_rows_that_share_nothing_are_not_copied():
    class Lazy:
        """A vector that cannot be copied."""

        def __init__(self, value):
            self._value = value
            self._lock = threading.Lock()

        def toArray(self):
            return np.full(3, self._value)

    rows = [(Lazy(row), {"x": [row]}) for row in range(8)]
    found = round_trip(rows)
    assert [(array.tolist(), part) for array, part in found] == [
        ([row] * 3, {"x": [row]}) for row in range(8)
    ]
