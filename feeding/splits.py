"""Who reads which bytes of which files: a pure function of files, workers, seed and epoch.

Covers: cutting files into pieces, their order in an epoch, each worker's share.
Does not: list or open files (filesystem, direct), find records in a range (tfrecord).      Pure.

All bytes are dealt, each to one worker. Shares differ by less than one piece where files can be cut
anywhere; files that cannot (gzip) are dealt whole, so shares then differ by up to the largest one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from feeding.config import MIB
from feeding.errors import SettingsError

PIECE_BYTES = 32 * MIB
"""Files are cut into pieces of about this size, which an epoch's order shuffles."""


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file of a data set."""

    path: str
    size_bytes: int
    can_be_cut: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Bytes `start` to `stop` of a file: the records that begin there."""

    path: str
    start: int
    stop: int


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
        files: all files, in any order; empty ones are dealt to nobody.
        worker: from 0.
        num_workers: who share the files.
        seed: of the pieces' order, another one in each epoch; None: by path, in every epoch.
        epoch: from 0.
        piece_bytes: size of the pieces.

    Raises:
        SettingsError: there is no such worker, or a size that cannot be.
    """
    if not 0 <= worker < num_workers:
        raise SettingsError(f"worker must be 0 to {num_workers - 1}, got {worker}")
    if piece_bytes < 1:
        raise SettingsError(f"piece_bytes must be at least 1, got {piece_bytes}")
    pieces = _pieces(sorted(files), piece_bytes)
    dice = random.Random(f"{seed} {epoch}")
    if seed is not None:
        dice.shuffle(pieces)
    whole = _deal([piece for piece in pieces if not piece[1]], num_workers)[worker]
    cut = _cut([piece for piece, can_be_cut in pieces if can_be_cut], worker, num_workers)
    mine = [*whole, *cut]
    if seed is None:
        return sorted(mine)
    dice.shuffle(mine)
    return mine


def _pieces(files: Sequence[SourceFile], piece_bytes: int) -> list[tuple[Split, bool]]:
    pieces = []
    for file in files:
        size = file.size_bytes
        count = max(1, round(size / piece_bytes)) if file.can_be_cut else 1
        bounds = [size * number // count for number in range(count + 1)]
        pieces += [
            (Split(file.path, start, stop), file.can_be_cut)
            for start, stop in itertools.pairwise(bounds)
            if stop > start
        ]
    return pieces


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


def _cut(pieces: Sequence[Split], worker: int, num_workers: int) -> list[Split]:
    """Return the worker's part of all bytes, cut out of the pieces laid end to end."""
    total = sum(piece.stop - piece.start for piece in pieces)
    first, last = total * worker // num_workers, total * (worker + 1) // num_workers
    mine: list[Split] = []
    at = 0
    for piece in pieces:
        size = piece.stop - piece.start
        start, stop = max(first - at, 0), min(last - at, size)
        if start < stop:
            part = Split(piece.path, piece.start + start, piece.start + stop)
            if mine and mine[-1].path == part.path and mine[-1].stop == part.start:
                part = Split(part.path, mine.pop().start, part.stop)
            mine.append(part)
        at += size
    return mine
