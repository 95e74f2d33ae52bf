"""tf.Example: rows become columns; what does not fit is named; hostile bytes end typed."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.columnar.batch import BatchColumn, Ragged
from feeding.errors import DataError, FeedSettingsError, RowError
from feeding.formats.tfrecord.example import ExampleDecoder, Feature
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.infer import decode_example, infer_features
from feeding.formats.tfrecord.to_arrow import ArrowDecoder
from feeding.reading.bad_records import BadData

pytestmark = pytest.mark.slow  # kernels are compiled at first

ROOT = Path(__file__).parents[4]
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=5)
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
TEXTS = st.lists(st.binary(max_size=9), max_size=3)
ROWS = st.lists(
    st.fixed_dictionaries({}, optional={"f": FLOATS, "i": INTS, "b": TEXTS, "": INTS}), max_size=8
)
DTYPES = {"f": "float32", "i": "int64", "b": "bytes", "": "int64"}


def block(records: list[bytes]) -> RecordBlock:
    lengths = np.array([len(record) for record in records], np.int64)
    buffer = np.frombuffer(bytearray().join(records), np.uint8)
    return RecordBlock(buffer, np.cumsum(lengths) - lengths, lengths, 10, 1000)


def decode(records: list[bytes], **features: Feature) -> dict[str, Any]:
    return ExampleDecoder(features).decode(block(records), "part-0", BadData())


def as_lists(column: BatchColumn) -> list[list]:
    assert isinstance(column, Ragged)
    values = column.values.tolist()
    return [values[start:stop] for start, stop in itertools.pairwise(column.offsets.tolist())]


def with_dtype(name: str, values: list):
    return values if name == "b" else np.array(values, DTYPES[name])


@given(ROWS)
def test_any_rows_come_back(rows: list[dict[str, list]]):
    records = [encode_example({k: with_dtype(k, v) for k, v in row.items()}) for row in rows]
    columns = decode(records, **{name: Feature(dtype, None) for name, dtype in DTYPES.items()})
    for name, column in columns.items():
        assert as_lists(column) == [row.get(name, []) for row in rows]


def test_columns_have_the_shape_and_dtype_asked_for():
    rows = [{"x": np.full((2, 3), n), "y": n, "s": f"n{n}", "z": 2.5} for n in range(5)]
    columns = decode(
        [encode_example(row) for row in rows],
        x=Feature("int32", (2, 3)),
        y=Feature("uint8"),
        s=Feature("bytes"),
        z=Feature("float64", (1,)),
    )
    assert columns["x"].shape == (5, 2, 3)
    assert columns["x"].dtype == np.int32
    assert columns["y"].tolist() == [0, 1, 2, 3, 4]
    assert columns["s"].tolist() == [b"n0", b"n1", b"n2", b"n3", b"n4"]
    assert columns["z"].tolist() == [[2.5]] * 5


@pytest.mark.parametrize(
    ("dtype", "default"),
    [
        ("int64", 0.5),
        ("int32", np.float64("nan")),
        ("int8", np.float32(300)),
        ("uint8", np.int64(256)),
        ("int64", Fraction(1, 2)),
        ("bool", 2),
        ("bool", "False"),
        ("float32", 1e40),
        ("float32", 10**39),
        ("float16", [0.0, 70_000.0]),
    ],
)
def test_a_default_that_its_dtype_would_make_another_number_is_refused(dtype, default):
    with pytest.raises(FeedSettingsError, match=rf"is no {dtype} of shape .* it would be \S+"):
        Feature(dtype, np.shape(default), default)


def test_a_default_that_its_dtype_holds_is_taken():
    for dtype, default in (
        ("int64", 2.0),
        ("bool", True),
        ("float32", 0.1),
        ("float32", 10**30),
        ("float16", float("nan")),
        ("bytes", b""),
        ("float32", float("-inf")),
    ):
        assert Feature(dtype, (), default).default is default


def test_a_default_stands_for_what_is_missing():
    records = [encode_example({"x": 1.0}), encode_example({}), encode_example({"x": None})]
    assert decode(records, x=Feature(default=-1))["x"].tolist() == [1.0, -1.0, -1.0]
    assert decode(records, s=Feature("bytes", default=b"?"))["s"].tolist() == [b"?"] * 3


UNFIT: dict[str, tuple[dict[str, Any], Feature]] = {
    "lacks feature 'x'": ({"y": 1.0}, Feature()),
    "has 2 values of feature 'x', asked for 1": ({"x": [1.0, 2.0]}, Feature()),
    "has 2 values of feature 'x', asked for 3": ({"x": [1.0, 2.0]}, Feature("float32", (3,))),
    "feature 'x' holds no float list": ({"x": 1}, Feature()),
    "holds no int64 list, which Feature.'uint8'. reads": (
        {"x": "text"},
        Feature("uint8"),
    ),
    "holds 300, which uint8 cannot": ({"x": 300}, Feature("uint8")),
    "holds 2, which bool cannot": ({"x": 2}, Feature("bool")),
    "holds 70000.0, which float16 cannot; ask for float32": ({"x": 7e4}, Feature("float16")),
    "holds -70000.0, which float16": ({"x": [1.0, -7e4]}, Feature("float16", (2,))),
}


@pytest.mark.fault("F46")
@pytest.mark.parametrize("text", UNFIT)
def test_what_does_not_fit_is_named_or_skipped(text: str):
    row, feature = UNFIT[text]
    good = encode_example({"x": {"float": 5.0, "int64": 1}.get(kind_of(feature), b"")})
    if feature.shape:
        good = encode_example({"x": [5.0] * feature.shape[0]})
    records = [good, encode_example(row), good]
    with pytest.raises(
        DataError, match=rf"^part-0: record 11 at byte {1000 + len(good)}: .*{text}"
    ):
        decode(records, x=feature)
    bad = BadData("skip")
    left = ExampleDecoder({"x": feature}).decode(block(records), "part-0", bad)["x"]
    assert isinstance(left, np.ndarray)
    assert len(left) == 2
    assert bad.num_skipped == 1


def kind_of(feature: Feature) -> str:
    return {1: "bytes", 2: "float", 3: "int64"}[feature.kind]


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def entry(key: bytes, feature: bytes) -> bytes:
    return field(1, field(1, key) + field(2, feature))


def test_an_integer_of_more_than_64_bits_is_named():
    record = field(1, entry(b"i", field(3, field(1, b"\xff" * 10 + b"\x01"))))
    schema = pa.schema({"i": pa.list_(pa.int64())})
    for beginning, read in (
        ("part-0: record 10 at byte 1000", lambda: decode([record], i=Feature("int64", None))),
        ("part-0: ", lambda: ArrowDecoder(schema).decode(block([record]), "part-0", BadData())),
        ("the record", lambda: decode_example(record)),
    ):
        told = f"^{beginning}.*: its feature 'i' holds an integer of more than 64 bits"
        with pytest.raises(DataError, match=told):
            read()


def test_of_equal_keys_and_lists_the_last_counts_and_unpacked_values_are_read():
    unpacked = field(3, b"\x08\x05\x08\xff\x01" + field(1, b"\x07"))
    floats = field(2, b"\x0d\0\0\x80\x3f" + field(1, b"\0\0\0\x40"))
    record = field(
        1,
        entry(b"i", field(3, field(1, b"\x01"))) + entry(b"f", floats + field(1, field(1, b"no"))),
    )
    record += field(1, entry(b"i", floats + unpacked) + entry(b"f", unpacked + floats))
    record += b"\x10\x01" + b"\x1d\0\0\0\0" + field(9, b"unknown")
    columns = decode([record], i=Feature("int64", None), f=Feature("float32", None))
    assert columns["i"].values.tolist() == [5, 255, 7]
    assert columns["f"].values.tolist() == [1.0, 2.0]


def test_features_of_a_sample_are_inferred():
    rows = [
        {"one": 1, "three": [1.0, 2.0, 3.0], "any": [1] * n, "some": b"x" if n else None, "s": "t"}
        for n in range(3)
    ]
    assert infer_features(encode_example(row) for row in rows) == {
        "any": Feature("int64", None),
        "one": Feature("int64"),
        "s": Feature("bytes"),
        "some": Feature("bytes", None),
        "three": Feature("float32", (3,)),
    }
    assert infer_features([]) == {}
    mixed = [encode_example({"x": 1}), encode_example({"x": 1.0})]
    with pytest.raises(DataError, match="'x' is a list of different kinds"):
        infer_features(mixed)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
@pytest.mark.parametrize("texts", [[b"ab", b"cd"], [b"ab", b"c"], [b""]])
def test_a_list_of_other_kinds_of_bytes_is_no_list_of_numbers(kind, texts):
    others = list(map(kind, texts))
    assert encode_example({"x": others}) == encode_example({"x": texts})
    assert encode_example({"x": [others, others]}) == encode_example({"x": [texts, texts]})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        [b"a", 1],
        [bytearray(b"a"), 1],
        [1, bytearray(b"a")],
        [1.0, bytearray()],
        1j,
        np.uint64(2**63),
        [[1], [1, 2]],
    ],
)
def test_a_value_that_no_list_takes_is_named(value):
    with pytest.raises(RowError, match="feature 'x' holds"):
        encode_example({"x": value})


@pytest.mark.attack("A21")
def test_hostile_messages_end_typed():
    dice = random.Random(11)
    features = {name: Feature(dtype, None) for name, dtype in DTYPES.items() if name}
    decoder = ExampleDecoder(features)
    whole = encode_example({"f": [1.0, 2.0], "i": [1, -1], "b": [b"x", b"yz"]})
    for number in range(2000):
        record = bytearray(whole[: dice.randrange(len(whole) + 1)] if number % 2 else whole)
        for _ in range(dice.randrange(4) if record else 0):
            record[dice.randrange(len(record))] = dice.choice((0, 1, 10, 18, 26, 127, 128, 255))
        bad = BadData("skip")
        columns = decoder.decode(block([bytes(record), whole]), "part-0", bad)
        rows = {len(as_lists(column)) for column in columns.values()}
        assert rows == {2 - bad.num_skipped}
        assert as_lists(columns["i"])[-1] == [1, -1]
        try:
            infer_features([bytes(record)])
        except DataError as error:
            assert "record 0" in str(error)  # noqa: PT017  # most of them are whole


@pytest.mark.attack("A21")
def test_no_read_leaves_a_damaged_message():
    program = [sys.executable, "-m", "tests.support.programs.examples_between_pages"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "every message was decoded or skipped\n"), (
        f"ended by {done.returncode}: {done.stderr[-2000:]}"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Feature("complex64"),
        lambda: Feature(shape=(-1,)),
        lambda: Feature(shape=None, default=1.0),
        lambda: Feature(shape=784),  # type: ignore[arg-type]
        lambda: Feature(shape=0),  # type: ignore[arg-type]
        lambda: Feature("uint8", default=-1),
        lambda: Feature("int64", default="x"),
        lambda: Feature("float32", (2,), default=[1, 2, 3]),
        lambda: ExampleDecoder({}),
        lambda: ExampleDecoder({"n": "int64"}),  # type: ignore[dict-item]
    ],
)
def test_impossible_features_are_refused(make):
    with pytest.raises(FeedSettingsError):
        make()
