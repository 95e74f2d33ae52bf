"""Reads a Parquet file again and again, each time with another bit of its footer flipped.

`python -m tests.support.footer_flips FILE FIRST STEP` reads the flips FIRST, FIRST + STEP, … and
prints a line `BIT OUTCOME` for each. A line `BIT` is a flip that ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from feeding.columnar.batch import Batch
from feeding.errors import DataError, FeedSettingsError
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.reader import DirectReader


def footer_bits(data: bytes) -> range:
    """Return the numbers of the footer's bits in a Parquet file, the first byte's lowest bit 0."""
    stop = len(data) - 8
    return range(8 * (stop - int.from_bytes(data[-8:-4], "little")), 8 * stop)


def outcome(path: Path) -> str:
    """Read the rows of a filter; return "read", "refused", or the error that lacks the file."""
    try:
        source = ParquetSource(str(path), ParquetRequest(filters=[("n", ">", 1)]))
        reader = DirectReader(source, 0, 1)
        while isinstance(reader.next_batch(64), Batch):
            pass
    except DataError as error:
        return "refused" if path.name in str(error) else f"unnamed: {error}"
    except FeedSettingsError:  # the file has no column of the filter's name
        return "refused"
    return "read"


def main(whole: str, first: str, step: str) -> None:
    """Flip, read and report."""
    data = Path(whole).read_bytes()
    broken = Path(whole).with_name(f"broken-{first}.parquet")
    for bit in footer_bits(data)[int(first) :: int(step)]:
        sys.stdout.write(f"{bit} ")
        sys.stdout.flush()
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        broken.write_bytes(flipped)
        sys.stdout.write(f"{outcome(broken)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
