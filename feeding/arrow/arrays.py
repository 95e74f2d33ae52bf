"""One Arrow array → numpy, as a view of Arrow's memory wherever its layout allows.

Covers: numbers, bools, text, where lists begin; kinds that hold the same as a simpler kind.
Does not: name columns or refuse values (arrow_columns).      Pure.

[merged feeding/arrow/arrays.py] The oldest pyarrow that files are read with; every module that
reads with it looks here first.

Does not: import anything of pyarrow but its version.      Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from feeding.columnar.chunk import Array
from feeding.errors import MissingPackage

PYARROW_FLOOR = (18, 0, 0)
"""pyproject's; below 14.0.1 a file can run code."""


def check_pyarrow(version: str = pa.__version__) -> None:
    """Refuse a pyarrow that may run code of a file's author.

    Raises:
        MissingPackage: names both versions.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < PYARROW_FLOOR[: len(numbers)]:
        floor = ".".join(map(str, PYARROW_FLOOR))
        raise MissingPackage(
            f"pyarrow {version} is installed, tfos needs {floor} or newer (old ones run code that "
            f"a file brings); pip install 'pyarrow>={floor}'"
        )


check_pyarrow()  # before anything is looked up that old ones lack

_EXACT_DIGITS = 15
"""Integers of so many digits and powers of ten up to 10**22 are exact float64, so that one division
of them gives the nearest number. Arrow's own cast of decimals does not."""

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
    """Return an array of numbers, text, lists or structs that holds the same, or the array."""
    convert = _PLAIN.get(array.type.id)
    return array if convert is None else convert(array)


def numbers(array: pa.Array) -> Array:
    """Return an array of one of DTYPES without nulls as numpy; a copy only of bools."""
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
    """Return where each row of LISTS or TEXTS begins, and the end of the last: int64[n + 1]."""
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
    """Return the bytes of an array of TEXTS without nulls, and where each row begins in them."""
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
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)  # below 1 µs: cut off
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
