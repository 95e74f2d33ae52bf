"""The records that begin in one range of a TFRecord file, wherever the file is.

Covers: opening, reading ahead, a file that changed, who reads a compressed file.
Does not: list files (data_files), cut them (splits), decode records (example, example_arrow).
Threads: an iterator belongs to one thread.

[merged feeding/formats/tfrecord/records.py] What becomes of records that are framed well and hold
the wrong thing.

Covers: naming file, record and byte of one; leaving it out where the policy says so.
Does not: frame records (tfrecord) or look into them (example, example_arrow).
Threads: any.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import DataError, FileChanged
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import DEFAULTS, filesystem_for
from feeding.formats.tfrecord import frame_kernels
from feeding.formats.tfrecord.framing import RecordBlock, RecordLimits, RecordReader, is_gzip
from feeding.reading.bad_records import BadData
from feeding.reading.splits import Split


def record_blocks(
    split: Split, size_bytes: int, bad: BadData, limits: RecordLimits | None = None
) -> Iterator[RecordBlock]:
    """Yield the records of a range, some at a time; see RecordReader.blocks.

    Args and raises: see opened_records.
    """
    with opened_records(split, size_bytes, bad, limits) as reader:
        yield from reader.blocks()


@contextlib.contextmanager
def opened_records(
    split: Split, size_bytes: int, bad: BadData, limits: RecordLimits | None = None
) -> Iterator[RecordReader]:
    """Open the records of a range.

    A compressed file is read whole by whoever reads its beginning.

    Args:
        split: file and range.
        size_bytes: of the whole file when it was listed.
        bad: what becomes of damaged records.
        limits: what the file may ask for.

    Raises:
        DataError: a record is damaged and the policy is to fail.
        FileChanged: the file has another size now.
        OSError: it cannot be read.
    """
    with contextlib.closing(filesystem_for(split.path).open(split.path)) as file:
        if file.size_bytes != size_bytes:
            raise FileChanged(
                f"{split.path} had {size_bytes} bytes when it was listed, now {file.size_bytes}; "
                "read files that are not written to any more"
            )
        if split.start and is_gzip(file.read_range(0, frame_kernels.FRAME_HEAD)):
            yield RecordReader(io.BytesIO(), split.path)
            return
        yield RecordReader(
            ReadAhead(file, DEFAULTS, begin=split.start),
            split.path,
            span=(split.start, split.stop),
            limits=limits,
            bad=bad,
        )


T = TypeVar("T")


class RecordDamage(Exception):
    """Record `record` of those at hand is not what was asked for; becomes a DataError."""

    def __init__(self, record: int, text: str) -> None:
        super().__init__(text)
        self.record = record


def without_damaged(
    block: RecordBlock, file: str, bad: BadData, make: Callable[[Array, Array], T]
) -> T:
    """Return `make(starts, lengths)` of a block's records; damaged ones are left out by policy.

    Args:
        block: the records.
        file: where they come from, for messages.
        bad: the policy.
        make: raises RecordDamage for a record that is not what it should be.

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
