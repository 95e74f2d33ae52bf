"""TFRecord records of one byte range of a file, and the policy for records with damaged content.

Covers: opening, read-ahead, a file that changed, which split reads a compressed file; the file,
record and byte of a damaged record, and skipping it if the policy says so.
Does not: list files (reading.discover), split them (reading.splits), decode records (example,
to_arrow).
Threads: an iterator belongs to one thread.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import DataError
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import DEFAULTS
from feeding.formats.tfrecord import frame_kernels
from feeding.formats.tfrecord.framing import RecordBlock, RecordLimits, RecordReader, is_compressed
from feeding.reading.bad_records import BadData
from feeding.reading.listed import open_listed
from feeding.reading.splits import SourceFile, Split


@contextlib.contextmanager
def opened_records(
    split: Split,
    listed: SourceFile,
    bad: BadData,
    limits: RecordLimits | None,
    ahead_until: int | None = None,
) -> Iterator[RecordReader]:
    """Open the records of a range.

    The reader of a compressed file's first range reads the whole file.

    Args:
        split: its range.
        listed: the whole file.
        bad: policy for damaged records.
        limits: bound records and compression.
        ahead_until: see ReadAhead; None: the range's end.

    Raises:
        DataError: a record is damaged and the policy is to fail.
        FileChanged: the file has another size or version now.
        OSError: the file cannot be read.
    """
    with open_listed(listed) as file:
        if split.start and is_compressed(file.read_range(0, frame_kernels.FRAME_HEAD)):
            yield RecordReader(io.BytesIO(), split.path)
            return
        until = split.stop if ahead_until is None else ahead_until
        yield RecordReader(
            ReadAhead(file, DEFAULTS, begin=split.start, ahead_until=until),
            split.path,
            span=(split.start, split.stop),
            limits=limits,
            bad=bad,
        )


T = TypeVar("T")


class RecordDamage(Exception):
    """Record number `record` of a block does not fit the columns; becomes a DataError.

    Args:
        record: number of the record in its block, from 0.
        text: what does not fit, for the message.
    """

    def __init__(self, record: int, text: str) -> None:
        super().__init__(text)
        self.record = record


def without_damaged(
    block: RecordBlock, file: str, bad: BadData, make: Callable[[Array, Array], T]
) -> T:
    """Return `make(starts, lengths)` of a block's records; the policy may skip damaged ones.

    Args:
        block: n records.
        file: their file, for messages.
        bad: the policy.
        make: called with int64[n] offsets and lengths; raises RecordDamage for a damaged record.

    Raises:
        DataError: the policy is to fail; names file, record and byte.
    """
    starts, lengths = block.starts, block.lengths
    numbers = np.arange(len(starts)) + block.first_record
    while True:
        try:
            return make(starts, lengths)
        except RecordDamage as damage:
            at = damage.record
            byte = int(block.first_byte + starts[at])
            text = f"{file}: record {numbers[at]} at byte {byte}: {damage}"
            bad.skip(file, byte, DataError(text))
            keep = np.arange(len(starts)) != at
            starts, lengths, numbers = starts[keep], lengths[keep], numbers[keep]
