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

import heapq
import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
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


def shares(
    files: Iterable[SourceFile],
    num_workers: int,
    *,
    seed: int | None = None,
    epoch: int = 0,
) -> list[list[Split]]:
    """Return what each worker reads in one epoch, in order.

    Positions in checkpoints point into these lists: another order would continue elsewhere.

    Args:
        files: all files, in any order; empty ones are ignored. Either all have known rows or none.
        num_workers: workers that share the files.
        seed: seed of the pieces' order, which differs in each epoch; None: by path, in every epoch.
        epoch: from 0.

    Raises:
        FeedSettingsError: some files have known rows, and some have not.
    """
    in_order = sorted(files, key=lambda file: file.path)
    generator = random.Random(f"{seed} {epoch}")
    if any(file.piece_rows is not None for file in in_order):
        pieces, whole = _row_pieces(in_order), set[str]()
    else:
        pieces = [part for file in in_order for part in byte_pieces(file)]
        whole = {file.path for file in in_order if not file.is_splittable}
    if seed is not None:
        generator.shuffle(pieces)
    owned = _assign_files([piece for piece in pieces if piece.path in whole], num_workers)
    divided = _evenly([piece for piece in pieces if piece.path not in whole], num_workers)
    found = [[*files, *parts] for files, parts in zip(owned, divided, strict=True)]
    state = generator.getstate()  # a worker's order does not depend on the others' shares
    for mine in found:
        if seed is None:
            mine.sort(key=lambda each: (each.path, each.piece or 0, each.start))
        else:
            generator.setstate(state)
            generator.shuffle(mine)
    return found


def _row_pieces(files: Sequence[SourceFile]) -> list[Split]:
    for file in files:
        if file.piece_rows is None:
            counted = next(each.path for each in files if each.piece_rows is not None)
            raise FeedSettingsError(
                f"the rows of {counted} are known, those of {file.path} are not; "
                "read them separately"
            )
    return [
        Split(file.path, 0, num_rows, number)
        for file in files
        for number, num_rows in enumerate(file.piece_rows or ())
        if num_rows
    ]


def byte_pieces(file: SourceFile) -> list[Split]:
    """Return a file's pieces in order: none of an empty file, one of an unsplittable one."""
    size = file.size_bytes
    count = max(1, round(size / PIECE_BYTES)) if file.is_splittable else 1
    bounds = [size * number // count for number in range(count + 1)]
    spans = itertools.pairwise(bounds)
    return [Split(file.path, start, stop) for start, stop in spans if stop > start]


def _assign_files(files: Sequence[Split], num_workers: int) -> list[list[Split]]:
    """Assign each file, the largest first, to the worker with the fewest bytes; keep the order."""
    by_size = sorted(files, key=lambda each: (-each.stop, each.path))
    workers = _with_least((each.stop for each in by_size), [0] * num_workers)
    owner = dict(zip((each.path for each in by_size), workers, strict=True))
    assigned: list[list[Split]] = [[] for _ in range(num_workers)]
    for each in files:
        assigned[owner[each.path]].append(each)
    return assigned


def _with_least(sizes: Iterable[int], sums: list[int]) -> Iterator[int]:
    """Yield the worker that gets each size: the first with the smallest sum, which then grows."""
    least = [(size, worker) for worker, size in enumerate(sums)]
    heapq.heapify(least)
    for size in sizes:
        worker = least[0][1]
        sums[worker] += size
        heapq.heapreplace(least, (sums[worker], worker))
        yield worker


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
    by_size = sorted((each for each in parts if each.path in whole), key=lambda p: -p.size)
    workers = _with_least((part.size for part in by_size), sums)
    for part, worker in zip(by_size, workers, strict=True):
        assigned[worker].append(part)
    pieces = [part for part in parts if part.path not in whole]
    sizes = _evened(sums, sum(part.size for part in pieces))
    cut = _cut(pieces, list(itertools.accumulate(sizes)))
    return [[*mine, *more] for mine, more in zip(assigned, cut, strict=True)]


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


def _evenly(pieces: Sequence[Split], num_workers: int) -> list[list[Split]]:
    """Return each worker's contiguous part of all bytes or rows."""
    total = sum(piece.size for piece in pieces)
    return _cut(pieces, [total * (worker + 1) // num_workers for worker in range(num_workers)])


def _cut(pieces: Sequence[Split], ends: Sequence[int]) -> list[list[Split]]:
    """Cut the concatenated pieces into parts that end there; the last one ends with the pieces."""
    cut: list[list[Split]] = [[] for _ in ends]
    worker = at = 0
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            while ends[worker] <= at:
                worker += 1
            stop = min(piece.stop, start + ends[worker] - at)
            is_whole = (start, stop) == (piece.start, piece.stop)  # a million pieces are not copied
            part = piece if is_whole else Split(piece.path, start, stop, piece.piece)
            mine = cut[worker]
            if mine and _adjoin(mine[-1], part):
                part = Split(part.path, mine.pop().start, part.stop)
            mine.append(part)
            at += stop - start
            start = stop
    return cut


def _adjoin(one: Split, other: Split) -> bool:
    """Return whether two byte ranges are adjacent and short enough to be one split."""
    is_next = one.path == other.path and other.piece is None and one.stop == other.start
    return is_next and one.size + other.size <= MOST_PIECES * PIECE_BYTES
