"""Pickled packer: pickled batches of rows to chunks, without unpickling rows.

Covers: batches as Spark stores them (cached or parallelized RDDs): pickles, protocol 5, of lists
of rows that are numbers, lists of numbers, or tuples of 2 or 3 of these.
Does not: unpickle. The caller's `loads` and the ordinary packer take every other batch.
Threads: one per packer; pure.

Rows of one kind have pickles of one length: opcodes at fixed positions, values between them.
    ]           EMPTY_LIST      94 MEMOIZE     ( MARK     e APPENDS
    K u8        BININT1         M u16 BININT2  J i32 BININT     G f64 big-endian BINFLOAT
    86 / 87     TUPLE2 / TUPLE3, then 94
So the packer parses one row, views the batch as a matrix of bytes, compares the opcodes of all rows
with those of the first, and takes the values as strided views: 1.5 µs per row of 784 small ints,
where unpickling and packing take 9.7 (floats: 6.4 and 24).
Source: Python's pickletools, protocol 5 (PEP 574).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from feeding.columnar.builder import Collector
from feeding.columnar.chunk import Array, Chunk
from feeding.columnar.schema import WHOLE_ROW, ColumnGroup, ColumnSpec, Node
from feeding.config import FeedConfig
from feeding.encode.packer import Packer, PackerOptions

_HEAD = b"\x80\x05"
_FRAME = 0x95
_FRAME_HEAD = struct.Struct("<xQ")
_LIST_OPEN = b"]\x94("
_GO_ON = b"e("
_APPENDED_AT_ONCE = 1000
"""Python's pickler appends to a list in batches of this many items."""
_MOST_RUNS = 1000
"""Most runs of a row; Python code runs at each, and rows with more are seldom alike."""
_MISSES = 3
"""Unrecognised batches after which the next 1, 2, 4, .. batches are not looked at."""
_MOST_PASSED = 64
_TUPLES = {2: b"\x86\x94", 3: b"\x87\x94"}
_NUMBERS = {ord("K"): "u1", ord("M"): "<u2", ord("J"): "<i4", ord("G"): ">f8"}
_SCALAR_BYTES = 8
"""Size of a row's single number: int64 or float64."""
_SAME = {
    opcode: re.compile(b"(?:%c.{%d})+" % (opcode, np.dtype(kind).itemsize), re.DOTALL)
    for opcode, kind in _NUMBERS.items()
}
"""Numbers of one opcode that follow each other."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Numbers of one opcode that follow each other in a row, from `start` (the first opcode)."""

    column: int
    start: int
    count: int
    opcode: int

    def values(self, rows: Array, dtype: str, skip: int) -> Array:
        """Return a view of one item per number: `skip` bytes after its opcode."""
        stride = 1 + np.dtype(_NUMBERS[self.opcode]).itemsize
        shape, strides = (len(rows), self.count), (rows.shape[1], stride)
        return np.ndarray(shape, dtype, rows.data, self.start + skip, strides)


@dataclass(frozen=True, slots=True)
class _Template:
    """Positions of opcodes and values in every row of a kind."""

    length: int
    runs: tuple[_Run, ...]
    vectors: tuple[bool, ...]
    """Per column: a list of numbers, or one number."""
    is_tuple: bool
    fixed: tuple[tuple[int, int], ...]
    """Places and values of the bytes that do not belong to numbers."""
    row_bytes: int
    """Size of a row in a chunk."""

    def matches(self, rows: Array) -> bool:
        """Whether every row has the opcodes of the first one."""
        return all(bool((rows[:, at] == byte).all()) for at, byte in self.fixed) and all(
            bool((run.values(rows, "u1", 0) == run.opcode).all()) for run in self.runs
        )


class PickledPacker(Packer):
    """A Packer for pickled batches instead of rows.

    Args:
        config: as for Packer.
        loads: unpickles the batches that are not recognised; others are never unpickled.
        options: as for Packer.
    """

    def __init__(
        self,
        config: FeedConfig,
        loads: Callable[[bytes], Sequence[Any]],
        **options: Unpack[PackerOptions],
    ) -> None:
        super().__init__(config, **options)
        self._loads = loads
        self._misses = 0
        """Batches in a row that were looked at and not recognised."""
        self._to_pass = 0
        """Further batches that are not looked at."""

    def skip(self, rows: Iterator[Any]) -> int:
        """Read batches to their end and return how many rows they hold."""
        return sum(len(self._loads(batch)) for batch in rows)

    def _convert(self, rows: Iterator[Any]) -> Iterator[Chunk]:
        template: _Template | None = None
        parts: list[Array] = []
        for batch in rows:
            found = self._recognise(bytes(batch), template)
            others = list(self._loads(batch)) if found is None else []
            # Before the next chunk is yielded: a feeder may end there.
            self.rows_read += len(others) if found is None else len(found[1])
            if template is not None and parts and (found is None or found[0] is not template):
                yield self._join(parts, template)
                parts = []
            if found is None:
                template = None
                yield from self.pack_rows(others)
                continue
            template, matrix = found
            most = self._most_rows(template)
            for at in range(0, len(matrix), most):
                part = matrix[at : at + most]
                # Rows of two batches are copied when they are joined, so wide ones are not.
                if parts and self._is_too_much(parts, part, template):
                    yield self._join(parts, template)
                    parts = []
                parts.append(part)
                if self._is_enough(parts, template):
                    yield self._join(parts, template)
                    parts = []
        if template is not None and parts:
            yield self._join(parts, template)

    def _recognise(self, batch: bytes, known: _Template | None) -> tuple[_Template, Array] | None:
        """Look at a batch, seldom where those before were not recognised: a look costs time."""
        if self._to_pass:
            self._to_pass -= 1
            return None
        found = _recognise(batch, known)
        self._misses = self._misses + 1 if found is None else 0
        if self._misses >= _MISSES:
            self._to_pass = min(1 << (self._misses - _MISSES), _MOST_PASSED)
        return found

    def _most_rows(self, template: _Template) -> int:
        return max(1, min(self._config.chunk_rows, self._most_bytes // template.row_bytes))

    def _is_too_much(self, parts: list[Array], part: Array, template: _Template) -> bool:
        num_rows = sum(map(len, parts)) + len(part)
        return num_rows * template.row_bytes > self._most_bytes

    def _is_enough(self, parts: list[Array], template: _Template) -> bool:
        num_rows = sum(map(len, parts))
        num_bytes = num_rows * template.row_bytes
        return num_rows >= self._config.chunk_rows or num_bytes >= self._config.chunk_bytes

    def _join(self, parts: list[Array], template: _Template) -> Chunk:
        """Make a chunk of rows of one template."""
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        out = self._collector()
        for column, is_vector in enumerate(template.vectors):
            name = str(column) if template.is_tuple else WHOLE_ROW
            _add_column(out, template, rows, column, name, is_vector)
        layout: Node = None
        if template.is_tuple:
            names = tuple(map(str, range(len(template.vectors))))
            layout = ColumnGroup("tuple", names, (None,) * len(names))
        chunk = self._finish(out, layout, len(rows))
        self._check_bytes(chunk)
        self._row += len(rows)
        return chunk


def _add_column(
    out: Collector, template: _Template, rows: Array, column: int, name: str, is_vector: bool
) -> None:
    runs = [run for run in template.runs if run.column == column]
    parts = [run.values(rows, _NUMBERS[run.opcode], 1) for run in runs]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    dtype = "int64"
    if values.dtype.kind == "f":
        dtype = "float64"
        values = values.astype(dtype)  # pickled big-endian
    if not is_vector:
        out.add(ColumnSpec(name, "tensor", "scalar", dtype), values[:, 0].astype(dtype))
        return
    out.add(ColumnSpec(name, "tensor", "list", dtype, (values.shape[1],)), values)


def _recognise(batch: bytes, known: _Template | None) -> tuple[_Template, Array] | None:
    """Return a batch as a matrix of its rows' bytes, with their template: `known` if it fits."""
    body = _body(batch)
    if body is None:
        return None
    rows = None if known is None else _matrix(body, known)
    if known is not None and rows is not None:
        return known, rows
    template = _parse(body)
    rows = None if template is None else _matrix(body, template)
    return None if template is None or rows is None else (template, rows)


def _body(batch: bytes) -> bytes | None:
    """Return the rows' part of the pickle of a list, without frame heads."""
    if batch[:2] != _HEAD:
        return None
    frames = []
    at = 2
    while at < len(batch):
        if batch[at] != _FRAME or at + _FRAME_HEAD.size > len(batch):
            return None
        (length,) = _FRAME_HEAD.unpack_from(batch, at)
        at += _FRAME_HEAD.size
        frames.append(batch[at : at + length])
        at += length
    body = frames[0] if len(frames) == 1 else b"".join(frames)
    if not body.startswith(_LIST_OPEN) or not body.endswith(b"e."):
        return None
    return body[len(_LIST_OPEN) : -2]


def _matrix(body: bytes, template: _Template) -> Array | None:
    """Return the rows' bytes as a matrix if all rows fit; lots of 1000 are put together."""
    lot = _APPENDED_AT_ONCE * template.length
    if len(body) > lot:
        lots = [body[at : at + lot] for at in range(0, len(body), lot + len(_GO_ON))]
        ends = range(lot, len(body), lot + len(_GO_ON))
        if any(body[end : end + len(_GO_ON)] != _GO_ON for end in ends):
            return None
        body = b"".join(lots)
    if not body or len(body) % template.length:
        return None
    rows = np.frombuffer(body, np.uint8).reshape(-1, template.length)
    return rows if template.matches(rows) else None


def _parse(body: bytes) -> _Template | None:
    """Parse the first row; None if it is not of a known kind."""
    parser = _Parser(body)
    first_end = 0
    for column in range(3):
        if not parser.value(column):
            break
        first_end = first_end or parser.at
        close = _TUPLES.get(column + 1)
        if close is not None and body.startswith(close, parser.at):
            parser.fix(len(close))
            return parser.template(column + 1, parser.at, is_tuple=True)
    # No tuple: what followed the first value was the next row.
    return parser.template(1, first_end, is_tuple=False) if first_end else None


def _row_bytes(runs: Sequence[_Run], vectors: Sequence[bool]) -> int:
    """Return the bytes of a row as _add_column stores it."""
    num_bytes = 0
    for column, is_vector in enumerate(vectors):
        mine = [run for run in runs if run.column == column]
        widest = max(np.dtype(_NUMBERS[run.opcode]).itemsize for run in mine)
        num_bytes += sum(run.count for run in mine) * (widest if is_vector else _SCALAR_BYTES)
    return num_bytes


class _Parser:
    """Parses the values of a row and notes the positions of their bytes."""

    def __init__(self, body: bytes) -> None:
        self.at = 0
        self._body = body
        self._runs: list[_Run] = []
        self._fixed: list[int] = []
        self._vectors: list[bool] = []

    def value(self, column: int) -> bool:
        """Read a number or a list of numbers; False if there is none."""
        if self.at >= len(self._body):
            return False
        is_vector = self._body.startswith(_LIST_OPEN, self.at)
        self._vectors.append(is_vector)
        if not is_vector:
            return self._number_run(column, most=1)
        self.fix(len(_LIST_OPEN))
        while self._number_run(column, most=_APPENDED_AT_ONCE):
            if self._body.startswith(_GO_ON, self.at):
                self.fix(len(_GO_ON))
            elif self._body[self.at : self.at + 1] == b"e":
                self.fix(1)
                return True
        return False

    def fix(self, num_bytes: int) -> None:
        """Note bytes that are the same in every row."""
        self._fixed += range(self.at, self.at + num_bytes)
        self.at += num_bytes

    def template(self, num_columns: int, length: int, *, is_tuple: bool) -> _Template:
        """Return what was read up to `length`."""
        runs = tuple(run for run in self._runs if run.column < num_columns)
        vectors = tuple(self._vectors[:num_columns])
        fixed = tuple((at, self._body[at]) for at in self._fixed if at < length)
        return _Template(length, runs, vectors, is_tuple, fixed, _row_bytes(runs, vectors))

    def _number_run(self, column: int, most: int) -> bool:
        opcode = self._body[self.at] if self.at < len(self._body) else 0
        if opcode not in _NUMBERS:
            return False
        start, stride = self.at, 1 + np.dtype(_NUMBERS[opcode]).itemsize
        found = _SAME[opcode].match(self._body, start, start + most * stride)
        if found is None or len(self._runs) >= _MOST_RUNS:
            return False
        self.at = found.end()
        self._runs.append(_Run(column, start, (self.at - start) // stride, opcode))
        return True
