"""What becomes of records that are framed well and hold the wrong thing.

Covers: naming file, record and byte of one; leaving it out where the policy says so.
Does not: frame records (tfrecord) or look into them (example, example_arrow).
Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import DataError
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.reading.bad_records import BadData

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
