"""Splits: which worker reads which parts of which files, as a function of files, seed and epoch.

Covers: splitting files into pieces, their order in an epoch, each worker's share.
Does not: list or open files (discover, filesystem), find records in a range (formats).
Threads: any; pure.

Files with known rows (Parquet, or counted by row_counts) are shared by rows: shares differ by one
row at most. Other files are shared by bytes. Their shares differ by less than one piece if files
can be split anywhere; a file that cannot (gzip) is assigned whole, so shares then differ by up to
the largest file.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from feeding.config import MIB
from feeding.errors import FeedSettingsError

PIECE_BYTES = 32 * MIB
"""Approximate size of the pieces of a file, whose order is shuffled per epoch."""
MOST_PIECES = 8
"""Most pieces in one split without shuffling. A reader that continues inside a split reads the
split's beginning again to find its place."""
UNTOLD = "?"
"""A choice of rows that has no text."""


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file of a data set."""

    path: str
    size_bytes: int
    is_splittable: bool = True
    """Whether it can be split by bytes; ignored if its rows are known."""
    piece_rows: tuple[int, ...] | None = None
    """Rows of each independent piece (row group or counted byte range), in the file's order; None:
    unknown without reading the file."""
    base: str = field(default="", compare=False)
    """Directory that was read: `key=value` names below it are columns."""
    held_bytes: int = field(default=0, compare=False)
    """Memory, about, that reading one piece of it holds."""
    version: str = field(default="", compare=False)
    """When it was listed; see FileStatus."""
    choice: str = field(default="", compare=False)
    """Which of its rows are read, as text that is the same in each process; empty: all of them,
    UNTOLD: not known."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """The records that begin in bytes `start` to `stop` of a file; with a piece, rows of it."""

    path: str
    start: int
    stop: int
    piece: int | None = None
    """Index of a piece of a file with `piece_rows`; `start` and `stop` are then rows within it."""

    @property
    def size(self) -> int:
        """Size in bytes, or in rows of a piece."""
        return self.stop - self.start


def share(
    files: Iterable[SourceFile],
    worker: int,
    num_workers: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
    piece_bytes: int = PIECE_BYTES,
) -> list[Split]:
    """Return what one worker reads in one epoch, in order.

    Args:
        files: all files, in any order; empty ones are ignored. Either all have known rows or none.
        worker: from 0.
        num_workers: workers that share the files.
        seed: seed of the pieces' order, which differs in each epoch; None: by path, in every epoch.
        epoch: from 0.
        piece_bytes: size of the pieces of files with unknown rows.

    Raises:
        FeedSettingsError: an illegal worker or size, or some files with and some without known
        rows.
    """
    if not 0 <= worker < num_workers:
        raise FeedSettingsError(f"worker must be 0 to {num_workers - 1}, got {worker}")
    if piece_bytes < 1:
        raise FeedSettingsError(f"piece_bytes must be at least 1, got {piece_bytes}")
    in_order = sorted(files, key=lambda file: file.path)
    generator = random.Random(f"{seed} {epoch}")
    if counted := [file for file in in_order if file.piece_rows is not None]:
        return _row_share(counted, in_order, (worker, num_workers), seed, generator)
    pieces = _pieces(in_order, piece_bytes)
    if seed is not None:
        generator.shuffle(pieces)
    whole = _assign_files([piece for piece in pieces if not piece[1]], num_workers)[worker]
    divisible = _even_part(
        [piece for piece, is_splittable in pieces if is_splittable], worker, num_workers
    )
    mine = [*whole, *divisible]
    if seed is None:
        return sorted(mine)
    generator.shuffle(mine)
    return mine


def _row_share(
    counted: Sequence[SourceFile],
    files: Sequence[SourceFile],
    place: tuple[int, int],
    seed: int | None,
    generator: random.Random,
) -> list[Split]:
    if len(counted) < len(files):
        other = next(file.path for file in files if file.piece_rows is None)
        raise FeedSettingsError(
            f"the rows of {counted[0].path} are known, those of {other} are not; "
            "read them separately"
        )
    pieces = [
        Split(file.path, 0, num_rows, number)
        for file in counted
        for number, num_rows in enumerate(file.piece_rows or ())
        if num_rows
    ]
    if seed is not None:
        generator.shuffle(pieces)
    mine = _even_part(pieces, *place)
    if seed is not None:
        generator.shuffle(mine)
    return mine


def _pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[tuple[Split, bool]]:
    return [(part, file.is_splittable) for file in files for part in byte_pieces(file, piece_bytes)]


def byte_pieces(file: SourceFile, piece_bytes: int | None = None) -> list[Split]:
    """Return a file's pieces in order; none for an empty file.

    Args:
        file: an unsplittable file is one piece.
        piece_bytes: approximate size; None: PIECE_BYTES.
    """
    size = file.size_bytes
    count = max(1, round(size / (piece_bytes or PIECE_BYTES))) if file.is_splittable else 1
    bounds = [size * number // count for number in range(count + 1)]
    spans = itertools.pairwise(bounds)
    return [Split(file.path, start, stop) for start, stop in spans if stop > start]


def _assign_files(pieces: Sequence[tuple[Split, bool]], num_workers: int) -> list[list[Split]]:
    """Assign each file, the largest first, to the worker with the fewest bytes; keep the order."""
    owner: dict[str, int] = {}
    load = [0] * num_workers
    for piece, _ in sorted(pieces, key=lambda each: (-each[0].stop, each[0].path)):
        least = load.index(min(load))
        owner[piece.path] = least
        load[least] += piece.stop
    return [
        [piece for piece, _ in pieces if owner[piece.path] == worker]
        for worker in range(num_workers)
    ]


def deal_beside(
    parts: Sequence[Split], loads: Sequence[int], whole: Collection[str]
) -> list[list[Split]]:
    """Assign splits to workers that have other work already; the order of splits is kept.

    Args:
        parts: splits of any files, each byte or row once.
        loads: bytes or rows of each worker's other work.
        whole: paths of unsplittable files.

    Returns:
        One list per worker; the sums with `loads` are as even as the files allow.
    """
    sums = list(loads)
    assigned: list[list[Split]] = [[] for _ in loads]
    for part in sorted((each for each in parts if each.path in whole), key=lambda p: -p.size):
        least = sums.index(min(sums))
        assigned[least].append(part)
        sums[least] += part.size
    pieces = [part for part in parts if part.path not in whole]
    at = 0
    for worker, size in enumerate(_evened(sums, sum(part.size for part in pieces))):
        assigned[worker] += _between(pieces, at, at + size)
        at += size
    return assigned


def _evened(loads: Sequence[int], total: int) -> list[int]:
    """Return each worker's amount of `total` that evens out the loads (water filling)."""
    order = sorted(range(len(loads)), key=lambda worker: loads[worker])
    gets = [0] * len(loads)
    for count in range(1, len(order) + 1):
        level, more = divmod(total + sum(loads[worker] for worker in order[:count]), count)
        if count == len(order) or level < loads[order[count]]:
            for number, worker in enumerate(order[:count]):
                gets[worker] = level + (number < more) - loads[worker]
            break
    return gets


def _even_part(pieces: Sequence[Split], worker: int, num_workers: int) -> list[Split]:
    """Return the worker's contiguous part of all bytes or rows."""
    total = sum(piece.size for piece in pieces)
    return _between(pieces, total * worker // num_workers, total * (worker + 1) // num_workers)


def _between(pieces: Sequence[Split], first: int, last: int) -> list[Split]:
    """Return the range [first, last) of the concatenated pieces."""
    mine: list[Split] = []
    at = 0
    for piece in pieces:
        start, stop = max(first - at, 0), min(last - at, piece.size)
        if start < stop:
            part = Split(piece.path, piece.start + start, piece.start + stop, piece.piece)
            if mine and _adjoin(mine[-1], part):
                part = Split(part.path, mine.pop().start, part.stop)
            mine.append(part)
        at += piece.size
    return mine


def _adjoin(one: Split, other: Split) -> bool:
    """Return whether two byte ranges are adjacent and short enough to be one split."""
    is_next = one.path == other.path and other.piece is None and one.stop == other.start
    return is_next and one.size + other.size <= MOST_PIECES * PIECE_BYTES
