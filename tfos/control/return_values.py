"""Return values of main_fun as bytes: plain values and numpy arrays in msgpack, never pickle.

    msgpack's own types   None, bool, int of 64 bits, float, str, bytes, list, dict with str keys
    extension 1           tuple: an array
    extension 2           dict with other keys: an array of keys, an array of values
    extension 3           larger int: hexadecimal digits
    extension 4           numpy array: dtype, shape, bytes in C order
    extension 5           numpy scalar: as an array without dimensions

Covers: what may travel, its bytes, the sentence for what may not.
Does not: send the bytes (tfos.worker.process), keep them (tfos.control.members) or decide when they
are read (tfos.driver.results).
Runs in: workers, and drivers that ask for results: it imports numpy.      Threads: any; pure.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rpc.printable import visible
from tfos.control.messages import MAX_RESULT_BYTES
from tfos.errors import NoResultError

MAX_DEPTH = 50
"""Levels of nesting; a value that contains itself has no end."""
_TUPLE, _DICT, _INT, _ARRAY, _SCALAR = range(1, 6)
_NUMPY_KINDS = "biufcSUMm"
"""Kinds of dtypes whose bytes are the whole value: no objects, no structures."""
_DTYPE = re.compile(rf"[<>|][{_NUMPY_KINDS}]\d+(\[\d*[A-Za-zμ]+\])?")
"""A dtype of these kinds as numpy writes it. For other texts numpy raises SyntaxError or others."""
_MAX_TEXT_CHARS = 2000
_AS_THEY_ARE = frozenset({type(None), bool, float})
_INT_LIMIT = 1 << 63
_ADVICE = (
    "return None, numbers, text, bytes, numpy arrays, or lists, tuples and dicts of them; "
    "ctx.export(model, path) keeps a model"
)
Keys = tuple[object, ...]
"""Keys and positions from the returned value to one of its parts."""
Kinds = type | tuple[type, ...]


def encode(value: object) -> bytes:
    """Return a return value as bytes; none for None.

    Args:
        value: what main_fun returned. For a keras.callbacks.History its `.history`.

    Raises:
        NoResultError: a part of it cannot travel, or it is too large; the text names the part, or
            both sizes.
    """
    if value is None:
        return b""
    try:
        data = msgspec.msgpack.encode(_Packing(value).packed(value, ()))
    except NoResultError:
        raise
    except Exception as error:  # a subclass of dict or str may do anything
        raise NoResultError(
            _text(f"main_fun returned {_of_type(value)} that cannot be read: {error!r}; {_ADVICE}")
        ) from error
    if len(data) > MAX_RESULT_BYTES:
        raise _too_large(f"{len(data)} bytes")
    return data


def decode(data: bytes) -> Any:
    """Return the value of `encode`'s bytes.

    Raises:
        NoResultError: the bytes are not such a value.
    """
    if not data:
        return None
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpacked)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise NoResultError(
            f"a worker sent {len(data)} bytes that are not a value: {error}"
        ) from error


class _Packing:
    """One value on its way to msgpack.

    Args:
        root: the whole value.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_bytes = 0
        """A lower bound of what is packed so far: a value that is too large is not copied."""
        self._ways = self._ways_by_kind()

    def packed(self, value: Any, keys: Keys) -> Any:
        """Return a part as what msgpack can encode.

        Args:
            value: the part.
            keys: where it is in the whole value.
        """
        if len(keys) > MAX_DEPTH:
            raise NoResultError(
                _text(
                    f"main_fun returned {_of_type(self._root)} with more than {MAX_DEPTH} levels "
                    "of nesting, or one that contains itself; return a flatter value"
                )
            )
        self._count(1, keys)
        if type(value) in _AS_THEY_ARE:
            return value
        value = _history(value)
        for kinds, pack in self._ways:
            if isinstance(value, kinds):
                return pack(value, keys)
        raise self._refusal(keys, value)

    def _ways_by_kind(self) -> tuple[tuple[Kinds, Callable[[Any, Keys], Any]], ...]:
        """Ways to pack a value; the first that fits counts: numpy's float64 is a float as well."""
        return (
            ((np.generic, np.ndarray), self._numpy),
            (int, self._int),
            (float, lambda value, _: float(value)),
            (str, self._str),
            ((bytes, bytearray, memoryview), self._bytes),
            (dict, self._dict),
            ((list, tuple), self._sequence),
        )

    def _int(self, value: int, keys: Keys) -> Any:
        self._count(value.bit_length() // 8, keys)
        if -_INT_LIMIT <= value < _INT_LIMIT:
            return int(value)
        return _extension(_INT, hex(value))  # str() of many digits is slow, and refused

    def _str(self, value: str, keys: Keys) -> str:
        self._count(len(value), keys)
        try:
            return value.encode().decode()  # msgspec takes no subclasses
        except UnicodeEncodeError:
            raise self._refusal(keys, value, "str that is not valid Unicode") from None

    def _bytes(self, value: Any, keys: Keys) -> bytes:
        self._count(memoryview(value).nbytes, keys)
        return bytes(value)

    def _sequence(self, value: Any, keys: Keys) -> Any:
        parts = [self.packed(each, (*keys, place)) for place, each in enumerate(value)]
        return parts if isinstance(value, list) else _extension(_TUPLE, parts)

    def _dict(self, value: dict[Any, Any], keys: Keys) -> Any:
        values = [self.packed(each, (*keys, key)) for key, each in value.items()]
        if all(type(key) is str for key in value):
            return dict(zip((self._str(key, keys) for key in value), values, strict=True))
        return _extension(_DICT, [[self._key(key, keys) for key in value], values])

    def _key(self, key: Any, keys: Keys) -> Any:
        try:
            return _Packing(key).packed(key, ())
        except NoResultError:
            what = f"a dict with {_of_type(key)} among its keys"
            where = f"main_fun returned {what}" if not keys else f"{self._where(keys)} is {what}"
            raise NoResultError(_text(f"{where}; {_ADVICE}")) from None

    def _numpy(self, value: Any, keys: Keys) -> Any:
        if value.dtype.kind not in _NUMPY_KINDS or isinstance(value, np.ma.MaskedArray):
            kind = type(value).__name__ if value.dtype.kind in _NUMPY_KINDS else "array"
            raise self._refusal(keys, value, f"numpy {kind} of dtype {value.dtype}")
        self._count(value.nbytes, keys)
        array = np.asarray(value)
        parts = [array.dtype.str, list(array.shape), array.tobytes()]
        return _extension(_SCALAR if isinstance(value, np.generic) else _ARRAY, parts)

    def _count(self, num_bytes: int, keys: Keys) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_RESULT_BYTES:
            is_most = keys and 2 * num_bytes > self._num_bytes
            part = f" (of which {_place(self._root, keys)} has {num_bytes})" if is_most else ""
            raise _too_large(f"at least {self._num_bytes} bytes{part}")

    def _refusal(self, keys: Keys, value: object, what: str = "") -> NoResultError:
        found = _with_article(what) if what else _of_type(value)
        advice = f"call .numpy() on it, or {_ADVICE}" if hasattr(value, "numpy") else _ADVICE
        where = f"{self._where(keys)} is {found}" if keys else f"main_fun returned {found}"
        return NoResultError(_text(f"{where}; {advice}"))

    def _where(self, keys: Keys) -> str:
        return f"main_fun returned {_of_type(self._root)} whose {_place(self._root, keys)}"


def _history(value: Any) -> Any:
    """Return the dict of a Keras History, which `fit` returns; any other value as it is."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(value, keras.callbacks.History):
        return value.history
    return value


def _extension(code: int, parts: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _unpacked(code: int, data: memoryview) -> Any:
    parts = msgspec.msgpack.decode(data, ext_hook=_unpacked)
    if code == _TUPLE:
        return tuple(parts)
    if code == _DICT:
        return dict(zip(*parts, strict=True))
    if code == _INT:
        return int(parts, 16)
    if code not in (_ARRAY, _SCALAR):
        raise ValueError(f"extension {code} is unknown")
    name, shape, content = parts
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is not a dtype of an array that may travel")
    dtype = np.dtype(name)
    if dtype.itemsize * math.prod(shape) != len(content):
        raise ValueError(f"{len(content)} bytes are not an array {shape} of dtype {dtype}")
    if dtype.kind == "U":
        _check_text(content, dtype)
    array = np.ndarray(tuple(shape), dtype, content).copy()
    return array[()] if code == _SCALAR else array


def _check_text(content: bytes, dtype: np.dtype[Any]) -> None:
    """Refuse numbers that are not characters: numpy raises SystemError if it makes a str of one.

    Args:
        content: the bytes of an array.
        dtype: the array's dtype, of kind U: four bytes a character.
    """
    largest = int(np.frombuffer(content, f"{dtype.str[0]}u4").max(initial=0))
    if largest > sys.maxunicode:
        raise ValueError(f"{largest:#x} is not a character, the last one is {sys.maxunicode:#x}")


def _place(root: object, keys: Keys) -> str:
    """Return where a part is: `'model'`, `item 3`, `['models'][0]`."""
    shown = [reprlib.repr(key) if isinstance(key, str | int) else _of_type(key) for key in keys]
    if len(keys) > 1:
        return "".join(f"[{each}]" for each in shown)
    return shown[0] if isinstance(_history(root), dict) else f"item {shown[0]}"


def _of_type(value: object) -> str:
    kind = type(_history(value))
    module = "keras" if kind.__module__.startswith("keras.") else kind.__module__
    is_plain = module in ("builtins", "__main__")
    return _with_article(kind.__qualname__ if is_plain else f"{module}.{kind.__qualname__}")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _too_large(size: str) -> NoResultError:
    return NoResultError(
        _text(
            f"main_fun returned a value of {size}, the limit is {MAX_RESULT_BYTES} bytes; return "
            "less, or write a file that the driver sees and return its path"
        )
    )


def _text(sentence: str) -> str:
    """Return a sentence as a message may carry it, whatever the names of types and keys are."""
    return visible(sentence[:_MAX_TEXT_CHARS], keep="")[:_MAX_TEXT_CHARS]
