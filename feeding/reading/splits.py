"""Who reads what of which files: a pure function of files, workers, seed and epoch.

Covers: cutting files into pieces, their order in an epoch, each worker's share.
Does not: list or open files (filesystem, direct), find records in a range (tfrecord).      Pure.

Files that know how many rows they have (Parquet), or were counted (counted), are dealt by rows:
shares differ by one at most. Others are dealt by bytes, each to one worker. Shares differ by less
than one piece where files can be cut anywhere; files that cannot (gzip) are dealt whole, so shares
then differ by up to the largest one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from feeding.config import MIB
from feeding.errors import FeedSettingsError

PIECE_BYTES = 32 * MIB
"""Files are cut into pieces of about this size, which an epoch's order shuffles."""
MOST_PIECES = 8
"""That are read in one go where nothing is shuffled. Whoever goes on where a reader has stopped
reads what that one had read of them again, to find the place."""


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file of a data set."""

    path: str
    size_bytes: int
    can_be_cut: bool = True
    """By bytes; without meaning where the rows are known."""
    piece_rows: tuple[int, ...] | None = None
    """Rows of each piece that can be read by itself (row group, counted range of bytes), in the
    file's order; None: nobody knows without reading the file."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Bytes `start` to `stop` of a file: the records that begin there. With a piece: its rows."""

    path: str
    start: int
    stop: int
    piece: int | None = None
    """The number of a piece of a file with `piece_rows`; `start` and `stop` are rows within it."""

    @property
    def size(self) -> int:
        """Bytes, or rows of a piece."""
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
        files: all files, in any order; empty ones are dealt to nobody. All of them know their
            rows, or none does.
        worker: from 0.
        num_workers: who share the files.
        seed: of the pieces' order, another one in each epoch; None: by path, in every epoch.
        epoch: from 0.
        piece_bytes: size of the pieces of files that do not know their rows.

    Raises:
        FeedSettingsError: there is no such worker, a size that cannot be, or files of both kinds.
    """
    if not 0 <= worker < num_workers:
        raise FeedSettingsError(f"worker must be 0 to {num_workers - 1}, got {worker}")
    if piece_bytes < 1:
        raise FeedSettingsError(f"piece_bytes must be at least 1, got {piece_bytes}")
    in_order = sorted(files, key=lambda file: file.path)
    dice = random.Random(f"{seed} {epoch}")
    if counted := [file for file in in_order if file.piece_rows is not None]:
        return _row_share(counted, in_order, (worker, num_workers), seed, dice)
    pieces = _pieces(in_order, piece_bytes)
    if seed is not None:
        dice.shuffle(pieces)
    whole = _deal([piece for piece in pieces if not piece[1]], num_workers)[worker]
    cut = _cut([piece for piece, can_be_cut in pieces if can_be_cut], worker, num_workers)
    mine = [*whole, *cut]
    if seed is None:
        return sorted(mine)
    dice.shuffle(mine)
    return mine


def _row_share(
    counted: Sequence[SourceFile],
    files: Sequence[SourceFile],
    place: tuple[int, int],
    seed: int | None,
    dice: random.Random,
) -> list[Split]:
    if len(counted) < len(files):
        other = next(file.path for file in files if file.piece_rows is None)
        raise FeedSettingsError(
            f"the rows of {counted[0].path} are known, those of {other} are not; read them apart"
        )
    pieces = [
        Split(file.path, 0, num_rows, number)
        for file in counted
        for number, num_rows in enumerate(file.piece_rows or ())
        if num_rows
    ]
    if seed is not None:
        dice.shuffle(pieces)
    mine = _cut(pieces, *place)
    if seed is not None:
        dice.shuffle(mine)
    return mine


def _pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[tuple[Split, bool]]:
    return [(part, file.can_be_cut) for file in files for part in byte_pieces(file, piece_bytes)]


def byte_pieces(file: SourceFile, piece_bytes: int | None = None) -> list[Split]:
    """Return a file's pieces in its order; none of an empty file.

    Args:
        file: one that cannot be cut is one piece.
        piece_bytes: about how large; None: PIECE_BYTES.
    """
    size = file.size_bytes
    count = max(1, round(size / (piece_bytes or PIECE_BYTES))) if file.can_be_cut else 1
    bounds = [size * number // count for number in range(count + 1)]
    spans = itertools.pairwise(bounds)
    return [Split(file.path, start, stop) for start, stop in spans if stop > start]


def _deal(pieces: Sequence[tuple[Split, bool]], num_workers: int) -> list[list[Split]]:
    """Give each file, the largest first, to the worker with the fewest bytes; keep their order."""
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
    """Share out parts among workers that have something to read already; their order is kept.

    Args:
        parts: of any files, each byte or row once.
        loads: bytes or rows that each worker has.
        whole: paths of files that cannot be cut; dealt as they are.

    Returns:
        One list for each worker; the sums with `loads` are as even as cuts allow.
    """
    sums = list(loads)
    dealt: list[list[Split]] = [[] for _ in loads]
    for part in sorted((each for each in parts if each.path in whole), key=lambda p: -p.size):
        least = sums.index(min(sums))
        dealt[least].append(part)
        sums[least] += part.size
    pieces = [part for part in parts if part.path not in whole]
    at = 0
    for worker, size in enumerate(_evened(sums, sum(part.size for part in pieces))):
        dealt[worker] += _between(pieces, at, at + size)
        at += size
    return dealt


def _evened(loads: Sequence[int], total: int) -> list[int]:
    """Return how much each gets of `total`, so that the sums with the loads are even."""
    order = sorted(range(len(loads)), key=lambda worker: loads[worker])
    gets = [0] * len(loads)
    for count in range(1, len(order) + 1):
        level, more = divmod(total + sum(loads[worker] for worker in order[:count]), count)
        if count == len(order) or level < loads[order[count]]:
            for number, worker in enumerate(order[:count]):
                gets[worker] = level + (number < more) - loads[worker]
            break
    return gets


def _cut(pieces: Sequence[Split], worker: int, num_workers: int) -> list[Split]:
    """Return the worker's part of all bytes or rows."""
    total = sum(piece.size for piece in pieces)
    return _between(pieces, total * worker // num_workers, total * (worker + 1) // num_workers)


def _between(pieces: Sequence[Split], first: int, last: int) -> list[Split]:
    """Return what stands between two places in the pieces laid end to end."""
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
    """Whether two ranges of bytes are read in one go; not so many that one could hardly be left."""
    is_next = one.path == other.path and other.piece is None and one.stop == other.start
    return is_next and one.size + other.size <= MOST_PIECES * PIECE_BYTES
