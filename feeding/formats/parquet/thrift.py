"""Thrift's compact protocol: the fields of a struct, as Parquet footers and page headers use it.

Covers: struct, Items, and its integers of varying length.
Does not: know what a field means (page_headers, column_metadata).
Threads: any; pure.
Source: Thrift compact protocol specification.
"""

from __future__ import annotations

from typing import NamedTuple

from feeding.errors import DataError

_MAX_DEPTH = 6
I32, I64, BINARY, _LIST, STRUCT = 5, 6, 8, 9, 12
_INTEGERS = (I32, I64, 4)
_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of skipped fields by kind: booleans (1 and 2, the value is the kind), bytes, doubles."""
_MANY_ITEMS = 15

Fields = dict[int, "int | Fields | Items"]


class Items(NamedTuple):
    """A list: the kind of its items by the protocol; structs, empty for other kinds."""

    kind: int
    structs: list[Fields]
    num_items: int

    def is_of(self, kind: int) -> bool:
        """Whether a reader that expects this kind reads the same bytes."""
        return not self.num_items or self.kind == kind


def struct(data: bytes, at: int, depth: int = 0) -> tuple[Fields, int]:
    """Read a struct: its integers and structs, and the lists of these, by field number.

    Args:
        data: holds the struct in compact form.
        at: offset of the struct.
        depth: number of structs around it.

    Returns:
        The fields, and the offset of the struct's end.

    Raises:
        DataError: a field is illegal.
        IndexError: the struct is truncated.
    """
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = signed(data, at)
        if number in fields:  # readers differ in which one they take
            raise DataError(f"its metadata holds field {number} of a struct twice")
        if kind in _INTEGERS:
            fields[number], at = signed(data, at)
        elif kind == STRUCT:
            if depth == _MAX_DEPTH:
                raise DataError("a struct of its metadata is nested too deep")
            fields[number], at = struct(data, at, depth + 1)
        elif kind == BINARY:
            length, at = varint(data, at)
            at += length
        elif kind == _LIST:
            fields[number], at = _list(data, at, depth)
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise DataError(f"its metadata holds a field of unknown kind {kind}")
    return fields, at + 1


def _list(data: bytes, at: int, depth: int) -> tuple[Items, int]:
    """Read a list; all but structs is passed over."""
    head = data[at]
    kind, count = head & 15, head >> 4
    at += 1
    if count == _MANY_ITEMS:
        count, at = varint(data, at)
    structs: list[Fields] = []
    for _ in range(count):
        _ = data[at]  # a longer list than the data ends here
        if kind == STRUCT:
            if depth == _MAX_DEPTH:
                raise DataError("a struct of its metadata is nested too deep")
            found, at = struct(data, at, depth + 1)
            structs.append(found)
        elif kind in _INTEGERS:
            _, at = varint(data, at)
        elif kind == BINARY:
            length, at = varint(data, at)
            at += length
        elif kind in _SIZES:
            at += _SIZES[kind] or 1  # a boolean of a list is a byte
        else:
            raise DataError(f"its metadata holds a list of unknown kind {kind}")
    return Items(kind, structs, count), at


def signed(data: bytes, at: int) -> tuple[int, int]:
    """Read an integer in zigzag form; return it, and the offset behind it; raises as struct."""
    found, at = varint(data, at)
    return (found >> 1) ^ -(found & 1), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an integer of 7 bits a byte; return it, and the offset behind it; raises as struct."""
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    found = byte & 127
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at + 1
    raise DataError("its metadata holds a number of more than 64 bits")
