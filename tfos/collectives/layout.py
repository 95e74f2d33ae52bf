"""A value as bytes: an array, or a list, tuple or dict of arrays, one after the other.

Covers: a value's arrays, its bytes without a copy, the value rebuilt from bytes; slices.
Does not: send anything.      Threads: any.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from rpc.limits import DEFAULT_LIMITS
from tfos.errors import SettingsError

Array = np.ndarray[Any, Any]
_KINDS = "biufc"
_MAX_TEXT_ARRAYS = 3
_MAX_TEXT_CHARS = 160
MAX_ENCODED_BYTES = DEFAULT_LIMITS.max_reply_bytes
"""Largest layout that a peer may get: about 170,000 numbers, or 20,000 variables with names."""


class ArrayLayout(msgspec.Struct, frozen=True, array_like=True):
    """One array: dtype and shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class ValueLayout(msgspec.Struct, frozen=True, array_like=True):
    """A value: its arrays in order, and their container."""

    kind: Literal["array", "list", "tuple", "dict"]
    arrays: tuple[ArrayLayout, ...]
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [str(each) for each in self.arrays[:_MAX_TEXT_ARRAYS]]
        if self.keys:
            names = self.keys[:_MAX_TEXT_ARRAYS]
            shown = [f"{name}: {each}" for name, each in zip(names, shown, strict=True)]
        text = ", ".join(shown) or "nothing"
        if self.kind != "array":
            text = f"{self.kind} of {text}"
        if len(self.arrays) <= _MAX_TEXT_ARRAYS and len(text) <= _MAX_TEXT_CHARS:
            return text
        # The digest tells it from other values with the same beginning.
        digest = hashlib.blake2b(encode(self), digest_size=6).hexdigest()
        rest = f"{len(self.arrays)} arrays, {self.num_bytes:,} bytes, kinds {digest}"
        return f"{text[:_MAX_TEXT_CHARS]}… ({rest})"

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(each.num_bytes for each in self.arrays)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ValueLayout).decode


def taken_apart(value: Any) -> tuple[ValueLayout, list[Array]]:
    """Return the layout of a value and its arrays, contiguous, without a copy if they already are.

    Args:
        value: a number or array, or a list, tuple or dict with text keys of these.

    Raises:
        SettingsError: it contains something else.
    """
    kind, parts = "array", [value]
    keys: tuple[str, ...] = ()
    if isinstance(value, dict):
        kind, keys, parts = "dict", tuple(value), list(value.values())
        if not all(isinstance(key, str) for key in keys):
            raise SettingsError(f"keys of a dict of arrays must be text, got {list(keys)!r}")
    elif isinstance(value, list | tuple):
        kind, parts = ("list" if isinstance(value, list) else "tuple"), list(value)
    arrays = [_as_array(part) for part in parts]
    layouts = tuple(ArrayLayout(each.dtype.str, each.shape) for each in arrays)
    return ValueLayout(kind, layouts, keys), arrays  # type: ignore[arg-type]


def check_tells(layout: ValueLayout) -> None:
    """Refuse a value with too many arrays: its layout would not fit into a reply.

    Raises:
        SettingsError: names the number of arrays.
    """
    num_bytes = len(encode(layout))
    if num_bytes > MAX_ENCODED_BYTES:
        raise SettingsError(
            f"the layout of a {layout.kind} of {len(layout.arrays):,} arrays takes "
            f"{num_bytes:,} bytes, more than {MAX_ENCODED_BYTES:,}: each element is an array of "
            "its own. Pass a list of numbers as np.asarray(list), else fewer and larger arrays"
        )


def put_together(layout: ValueLayout, arrays: Sequence[Array]) -> Any:
    """Return the value from which `taken_apart` made the arrays.

    Args:
        layout: layout of the value.
        arrays: its arrays in order.
    """
    if layout.kind == "array":
        return arrays[0]
    if layout.kind == "dict":
        return dict(zip(layout.keys, arrays, strict=True))
    return list(arrays) if layout.kind == "list" else tuple(arrays)


def arrays_of(layout: ValueLayout, data: memoryview) -> list[Array]:
    """Return arrays over these bytes, without a copy; `data` has exactly `num_bytes`."""
    arrays, start = [], 0
    for each in layout.arrays:
        stop = start + each.num_bytes
        flat = np.frombuffer(data[start:stop], dtype=each.dtype)
        arrays.append(flat.reshape(each.shape))
        start = stop
    return arrays


def cut(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return bytes start to stop of views that follow one another."""
    found, at = [], 0
    for view in views:
        first, last = max(start - at, 0), min(stop - at, len(view))
        if first < last:
            found.append(view[first:last])
        at += len(view)
    return found


def bounds(count: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` nearly equal slices of `count` elements."""
    return [count * part // num_parts for part in range(num_parts + 1)]


def _as_array(part: Any) -> Array:
    if isinstance(part, dict) or _holds_arrays(part):
        raise SettingsError(
            "collective calls take arrays, or a list, tuple or dict of arrays, but an element is "
            f"a {type(part).__name__}. Pass each of its arrays as an element of the outer "
            "container, in a dict under its own key such as 'layers/0'"
        )
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise SettingsError(
            f"collective calls take arrays, got a {type(part).__name__} that is not one: {error}. "
            "Pass its rows as arrays in a list"
        ) from error
    if array.dtype.kind not in _KINDS:
        raise SettingsError(
            f"collective calls take arrays of numbers and booleans, got {type(part).__name__} of "
            f"dtype {array.dtype}{_instead_of(part, array)}"
        )
    if isinstance(part, np.ma.MaskedArray):
        raise SettingsError(
            "the mask of a masked array is not transferred: pass its filled() values, and its "
            "mask as another array"
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)  # for big-endian files
    return np.ascontiguousarray(native).reshape(array.shape)


def _holds_arrays(part: Any) -> bool:
    """Whether a list begins with an array; numpy would stack arrays of equal shapes."""
    if not isinstance(part, list | tuple):
        return False
    while isinstance(part, list | tuple) and part:
        part = part[0]
    return isinstance(part, dict) or getattr(part, "ndim", 0) > 0


def _instead_of(part: Any, array: Array) -> str:
    """Return what to pass instead of a value that is not an array of numbers."""
    if array.dtype.name == "bfloat16":
        return "; pass x.astype('float32')"
    if hasattr(part, "get_weights"):
        return "; pass its get_weights()"
    return ""
