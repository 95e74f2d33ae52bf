"""Arrow arrays as numpy arrays: views of Arrow's memory wherever the layout allows.

Covers: numbers, bools, text, the offsets of lists, conversion of rarer Arrow types to these; the
oldest supported pyarrow (checked at import, before anything that older ones lack is used).
Does not: name columns or refuse values (encoder, columns).
Threads: any; pure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from feeding.columnar.chunk import Array
from feeding.errors import MissingPackage

PYARROW_FLOOR = (18, 0, 0)
"""The floor in pyproject.toml; below 14.0.1 a file can run code."""


def check_pyarrow(version: str = pa.__version__) -> None:
    """Refuse a pyarrow that may run code from a file.

    Raises:
        MissingPackage: the version is too old; the text names both versions.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < PYARROW_FLOOR[: len(numbers)]:
        floor = ".".join(map(str, PYARROW_FLOOR))
        raise MissingPackage(
            f"pyarrow {version} is installed, tfos needs {floor} or newer (older ones run code "
            f"from files); pip install 'pyarrow>={floor}'"
        )


check_pyarrow()  # before any name that older versions lack

_EXACT_DIGITS = 15
"""float64 holds integers of 15 digits and powers of ten up to 10**22 exactly, so one division gives
the nearest number. Arrow's own cast of decimals does not."""

DTYPES = {
    pa.lib.Type_BOOL: "bool",
    pa.lib.Type_HALF_FLOAT: "float16",
    pa.lib.Type_FLOAT: "float32",
    pa.lib.Type_DOUBLE: "float64",
    pa.lib.Type_INT8: "int8",
    pa.lib.Type_INT16: "int16",
    pa.lib.Type_INT32: "int32",
    pa.lib.Type_INT64: "int64",
    pa.lib.Type_UINT8: "uint8",
    pa.lib.Type_UINT16: "uint16",
    pa.lib.Type_UINT32: "uint32",
    pa.lib.Type_UINT64: "uint64",
}
"""Names of numpy's dtypes by the id of an Arrow type."""
TEXTS = {
    pa.lib.Type_STRING: "str",
    pa.lib.Type_LARGE_STRING: "str",
    pa.lib.Type_BINARY: "bytes",
    pa.lib.Type_LARGE_BINARY: "bytes",
}
LISTS = frozenset([pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST])
_LARGE = frozenset([pa.lib.Type_LARGE_STRING, pa.lib.Type_LARGE_BINARY, pa.lib.Type_LARGE_LIST])


def plain(array: pa.Array) -> pa.Array:
    """Convert decimals, dates, timestamps, views and dictionaries; return other arrays as is."""
    convert = _PLAIN.get(array.type.id)
    return array if convert is None else convert(array)


def numbers(array: pa.Array) -> Array:
    """Return a null-free Arrow array of one of DTYPES as numpy [n]: a view, a copy for bools."""
    dtype = np.dtype(DTYPES[array.type.id])
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, dtype)
    if dtype == np.bool_:
        first, rest = divmod(array.offset, 8)
        packed = np.frombuffer(data, np.uint8)[first:]
        bits = np.unpackbits(packed, count=rest + len(array), bitorder="little")
        return bits[rest:].view(np.bool_)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def bounds(array: pa.Array) -> Array:
    """Return the offsets of an array of LISTS or TEXTS: int64[n + 1], in items or bytes."""
    kind = array.type
    if kind.id == pa.lib.Type_FIXED_SIZE_LIST:
        size = int(kind.list_size)
        return np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * size
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    dtype = np.dtype(np.int64 if kind.id in _LARGE else np.int32)
    found = np.frombuffer(data, dtype, len(array) + 1, array.offset * dtype.itemsize)
    return found.astype(np.int64)


def text(array: pa.Array) -> tuple[Array, Array]:
    """Return the bytes of a null-free array of TEXTS, uint8[bytes], and offsets int64[n + 1]."""
    found = bounds(array)
    data = array.buffers()[2]
    if data is None:
        return np.empty(0, np.uint8), found - found[0]
    return np.frombuffer(data, np.uint8)[found[0] : found[-1]], found - found[0]


def _decimals(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind.precision > _EXACT_DIGITS or not 0 <= kind.scale <= _EXACT_DIGITS:
        return array.cast(pa.string()).cast(pa.float64())
    if kind.id != pa.lib.Type_DECIMAL128:
        array = array.cast(pa.decimal128(kind.precision, kind.scale))
    data = array.buffers()[1]
    # Little-endian two's complement: the low half alone, where the digits fit into it.
    low = np.frombuffer(data, np.int64, 2 * len(array), 16 * array.offset)[::2]
    missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(low / 10.0**kind.scale, mask=missing)


def _days(array: pa.Array) -> pa.Array:
    return array.cast(pa.date32()).view(pa.int32())


def _microseconds(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind.unit != "us":
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)  # truncates below 1 µs
    return array.view(pa.int64())


_CONVERSIONS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "DECIMAL32": _decimals,
    "DECIMAL64": _decimals,
    "DECIMAL128": _decimals,
    "DECIMAL256": _decimals,
    "DATE32": _days,
    "DATE64": _days,
    "TIMESTAMP": _microseconds,
    "STRING_VIEW": lambda array: array.cast(pa.large_string()),
    "BINARY_VIEW": lambda array: array.cast(pa.large_binary()),
    "FIXED_SIZE_BINARY": lambda array: array.cast(pa.binary()),
    "DICTIONARY": lambda array: plain(array.dictionary_decode()),
}
_PLAIN = {
    getattr(pa.lib, f"Type_{name}"): convert
    for name, convert in _CONVERSIONS.items()
    if hasattr(pa.lib, f"Type_{name}")  # older versions lack some
}
