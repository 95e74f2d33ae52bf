"""Return values of main_fun: what travels comes back equal, the rest is named."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import math
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tfos.control import return_values
from tfos.control.messages import MAX_RESULT_BYTES, Done
from tfos.errors import NoResultError
from tfos.worker.process import _as_message

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64,)),
    hnp.unicode_string_dtypes(max_len=3),
    hnp.byte_string_dtypes(max_len=3),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
    )
)
VALUES = st.recursive(
    st.one_of(PLAIN, ARRAYS, ARRAYS.filter(lambda a: a.ndim == 0).map(lambda a: a[()])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.tuples(KEYS, KEYS)), inner, max_size=3),
    ),
    max_leaves=4,
)


def through(value: Any) -> Any:
    return return_values.decode(return_values.encode(value))


def same(left: Any, right: Any) -> bool:
    """Equal in every type and bit; NaN is NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        shape = left.dtype == right.dtype and left.shape == right.shape
        return shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        keys = same(list(left), list(right))
        return keys and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_a_plain_value_comes_back_with_its_types(value):
    assert same(through(value), value)


def test_subclasses_come_back_as_what_they_extend():
    class Colour(enum.IntEnum):
        RED = 7

    class Name(str):
        pass

    pair = collections.namedtuple("pair", "a b")
    counts = collections.OrderedDict(x=Colour.RED, name=Name("n"))
    assert same(through({"p": pair(1, 2), "c": counts}), {"p": (1, 2), "c": {"x": 7, "name": "n"}})
    assert math.isnan(through(math.nan))


def test_an_array_comes_back_writable_and_in_order():
    given = np.arange(12.0).reshape(3, 4).T
    found = through({"w": given})["w"]
    assert found.shape == (4, 3)
    np.testing.assert_array_equal(found, given)
    found += 1


class Model:
    pass


class Strange(dict):
    def items(self):
        raise RuntimeError("closed")


def nested() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Model(), r"main_fun returned a [\w.]*test_return_values\.Model; return None, numbers"),
        ({"model": Model()}, r"a dict whose 'model' is a [\w.]*test_return_values\.Model; return"),
        (
            [1, {"a": (2, Model())}],
            r"main_fun returned a list whose \[1\]\['a'\]\[1\] is a [\w.]*Model",
        ),
        ((1, Path("/x")), r"main_fun returned a tuple whose item 1 is a pathlib\.[\w.]*PosixPath;"),
        ({1, 2}, "main_fun returned a set;"),
        ({"t": datetime.date(2020, 1, 1)}, "'t' is a datetime.date;"),
        ({"o": np.array([None])}, "'o' is a numpy array of dtype object"),
        (np.zeros(2, [("a", "i4")]), r"main_fun returned a numpy array of dtype \[\('a'"),
        (np.ma.masked_array([1], [True]), "returned a numpy MaskedArray of dtype int64"),
        ({Model: 1}, "main_fun returned a dict with a type among its keys"),
        ({"a": {frozenset(): 1}}, "whose 'a' is a dict with a frozenset among its keys"),
        ({"s": "\ud800"}, "'s' is a str that is not valid Unicode"),
        (types.SimpleNamespace(numpy=1), r"a types.SimpleNamespace; call \.numpy\(\) on it"),
        (nested(), "a list with more than 50 levels of nesting, or one that contains itself"),
        (Strange(a=1), r"a [\w.]*Strange that cannot be read: RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_named_with_its_place(value, text):
    with pytest.raises(NoResultError, match=text):
        return_values.encode(value)


def test_a_refusal_has_no_control_characters_and_an_end():
    kind = type("\x1b[31m\U000e0001" * 5000, (), {})
    sent = _as_message({"\x1b" * 5000: kind()})
    assert sent.result == b""
    assert len(sent.no_result) < 4096
    assert sent.no_result.isprintable()


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ({"w": np.zeros(1_000_000)}, r"at least 8000002 bytes \(of which 'w' has 8000000\)"),
        ("x" * 2_000_000, "at least 2000001 bytes"),
        ([True] * 2_000_000, "at least 1048577 bytes"),
        ([0.5] * 200_000, "1800005 bytes"),
        (1 << 80_000_000, "at least 10000001 bytes"),
    ],
    ids=["array", "text", "many", "floats", "int"],
)
def test_a_value_above_the_limit_is_refused_with_both_sizes(value, size):
    with pytest.raises(NoResultError, match=f"a value of {size}, the limit is 1048576 bytes"):
        return_values.encode(value)


def test_the_limit_is_exact():
    fits = b"x" * (MAX_RESULT_BYTES - 5)
    assert through(fits) == fits
    with pytest.raises(NoResultError, match="a value of 1048577 bytes, the limit"):
        return_values.encode(b"x" * (MAX_RESULT_BYTES - 4))


def test_a_keras_history_travels_as_its_dict(monkeypatch):
    class History:
        history: Any

    fake = types.SimpleNamespace(callbacks=types.SimpleNamespace(History=History))
    monkeypatch.setitem(sys.modules, "keras", fake)
    history = History()
    history.history = {"loss": [0.5, np.float32(0.25)]}
    assert through(history) == {"loss": [0.5, np.float32(0.25)]}
    assert through({"h": history, "n": 1})["h"]["loss"][0] == 0.5
    history.history = {"lr": [Model()]}
    with pytest.raises(NoResultError, match=r"a dict whose \['lr'\]\[0\] is a [\w.]*Model"):
        return_values.encode(history)


def test_a_worker_sends_nothing_for_none():
    assert _as_message(None) == Done()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_damaged_bytes_are_a_value_or_refused(data):
    sent = bytearray(return_values.encode(data.draw(VALUES)) or b"\xc0")
    place = data.draw(st.integers(0, len(sent) - 1))
    sent[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(NoResultError):
        return_values.decode(bytes(sent))


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\xc7\x02\x09\x90\x90",
        b"\x91" * 100_000,
        return_values._extension(4, ["O", [1], b"12345678"]),
        return_values._extension(4, ["<i8", [-1], b""]),
        return_values._extension(4, ["<i8", [1 << 62, 4], b""]),
        return_values._extension(4, ["<i8", ["x"], b""]),
        return_values._extension(2, [[[1]], [2]]),
        return_values._extension(2, [[1], []]),
        return_values._extension(9, []),
        return_values._extension(4, ["<U1", [1], b"\0\0\x11\0"]),
        return_values._extension(5, [">U1", [], b"\0\x11\0\0"]),
        return_values._extension(5, ["<U1", [], b"\xff\xff\xff\xff"]),
        return_values._extension(5, ["<08", [], b"12345678"]),
        return_values._extension(5, ["<,8[ms]", [], b"12345678"]),
        return_values._extension(4, ["7)4", [1], b"1234"]),
        return_values._extension(4, ["<a2", [1], b"12"]),
    ],
    ids=range(17),
)
def test_bytes_that_no_worker_sends_are_refused(data):
    sent = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
    with pytest.raises(NoResultError, match=r"sent \d+ bytes that are not a value"):
        return_values.decode(sent)
