"""Reading positions: where the readers of files are, and who reads the rest after a stop.

An epoch's work of one worker is a list of parts; a part is a list of consecutive splits. A stopped
reader has a place in its work. What all readers have left is the work that the next readers share:

    as many readers    each continues exactly where its predecessor stopped
    another number     begun     the window that a stopped reader was in, with the splits that the
                                 window reaches; assigned whole
                       the rest  all splits that no reader has begun, split anew for even shares

Later epochs, which no reader has begun, are shared as usual. A place counts rows that a split
yields when it is read, also rows that filters or damage drop later.

Covers: Place, Position, Course, an epoch's work after any number of stops.
Does not: read (reader), split files (splits), store positions (tfos.reading, ps.metadata).
Threads: any; pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from feeding.errors import FeedSettingsError, FileChanged
from feeding.reading import splits
from feeding.reading.splits import SourceFile, Split

Count = Annotated[int, msgspec.Meta(ge=0)]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """How much of an epoch one reader has yielded."""

    epoch: Count
    part: Count = 0
    split: Count = 0
    """Split of the part where the current window begins; without windows, of the next row."""
    row: Count = 0
    """Rows of that split before the window, or before the next row."""
    taken: Count = 0
    """Rows of the window that were yielded."""
    opened: Count = 0
    """Splits of the part that were begun: the last one with rows in the window, plus one."""


Stop = tuple[Place, ...]
"""The places of all readers of a run when it stopped."""


class Position(msgspec.Struct, frozen=True, rename={"run_number": "generation"}):
    """Position of one reader of a run, as a checkpoint stores it."""

    files: str
    """The `fingerprint` of the files."""
    seed: int | None
    shuffle_rows: int
    run_number: int
    """See Course."""
    worker: int
    num_workers: int
    place: Place


class Course(msgspec.Struct, frozen=True, rename={"run_number": "generation"}):
    """What the readers of a run need of the runs that it continues."""

    run_number: int = 0
    """Number of runs before this one. Positions of another run do not count."""
    first_epoch: int = 0
    stops: tuple[Stop, ...] = ()
    """Stops of earlier runs inside epochs that are still to be read, the oldest first."""


START = Course()


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """Splits that one worker reads in sequence."""

    splits: tuple[Split, ...]
    row: int = 0
    """Rows at the beginning of the first split that an earlier run read."""
    taken: int = 0
    """Rows of the first window that an earlier run yielded."""
    opened: int = 0
    """Splits that the first window reaches; 0 if no reader has begun the part."""


Work = tuple[WorkerPart, ...]


def work_of(
    files: Sequence[SourceFile],
    worker: int,
    num_workers: int,
    *,
    seed: int | None,
    epoch: int,
    stops: Sequence[Stop] = (),
) -> Work:
    """Return what one worker reads in one epoch.

    Args:
        files: all files.
        worker: from 0.
        num_workers: workers that share the files.
        seed: see splits.share.
        epoch: from 0.
        stops: of earlier runs, the oldest first.

    Raises:
        FeedSettingsError: see splits.share.
    """
    if not any(_is_begun(place, epoch) for stop in stops for place in stop):
        mine = splits.share(files, worker, num_workers, seed=seed, epoch=epoch)
        return (WorkerPart(tuple(mine)),) if mine else ()
    return _works(files, num_workers, seed, epoch, stops)[worker]


def course_after(
    before: Course, found: Iterable[Position], files: Sequence[SourceFile], reader: Position
) -> Course:
    """Return the course of a run that continues another one.

    Args:
        before: course of the other run.
        found: its saved positions; a worker without one has yielded nothing.
        files: all files.
        reader: any position of a reader of the new run.

    Raises:
        FileChanged: the files have changed.
        FeedSettingsError: the order of rows differs (seed or shuffle_rows).
    """
    last = [each for each in found if each.run_number == before.run_number]
    if not last:
        return before
    for each in last:
        _check_same(each, reader)
    num_workers = max(each.num_workers for each in last)
    places = {each.worker: each.place for each in last}
    stop = tuple(places.get(w, Place(before.first_epoch)) for w in range(num_workers))
    stops = (*before.stops, stop)
    epoch, end = min(p.epoch for p in stop), max(p.epoch for p in stop)
    while epoch < end and not any(_works(files, num_workers, reader.seed, epoch, stops)):
        epoch += 1
    while stops and not any(_reaches(place, epoch) for place in stops[0]):
        stops = stops[1:]
    return Course(before.run_number + 1, epoch, stops)


def fingerprint(files: Iterable[SourceFile]) -> str:
    """Return a hash of the files' paths, sizes and rows."""
    found = sorted((file.path, file.size_bytes, file.piece_rows) for file in files)
    return hashlib.blake2b(msgspec.json.encode(found), digest_size=12).hexdigest()


def refuse_changed(before: Iterable[tuple[str, int]], files: Iterable[SourceFile]) -> None:
    """Refuse files that have changed.

    Args:
        before: paths and sizes in bytes when the position was saved.
        files: as they are now.

    Raises:
        FileChanged: names the files that differ.
    """
    then, now = dict(before), {file.path: file.size_bytes for file in files}
    changed = [
        f"{path} had {then[path]} bytes, now {now[path]}"
        for path in sorted(then.keys() & now.keys())
        if then[path] != now[path]
    ]
    changed += [f"{path} is gone" for path in sorted(then.keys() - now.keys())]
    changed += [f"{path} is new" for path in sorted(now.keys() - then.keys())]
    if changed:
        more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        raise FileChanged(
            f"reading cannot continue, the files have changed: "
            f"{'; '.join(changed[:_MAX_NAMED])}{more}. Read the files as they were, or start "
            "under another name"
        )


_MAX_NAMED = 5


def _check_same(saved: Position, reader: Position) -> None:
    if saved.files != reader.files:
        raise FileChanged(
            "reading cannot continue: the files, their sizes or their rows have changed since the "
            f"position was saved (fingerprint {saved.files}, now {reader.files}), or they were "
            "read with equal_steps() then and without it now, or the reverse"
        )
    for name in ("seed", "shuffle_rows"):
        then, now = getattr(saved, name), getattr(reader, name)
        if then != now:
            raise FeedSettingsError(
                f"reading cannot continue: it had {name}={then}, now {now}; pass the "
                "same, or start under another name"
            )


def _is_begun(place: Place, epoch: int) -> bool:
    return place.epoch > epoch or (place.epoch == epoch and place != Place(epoch))


def _reaches(place: Place, epoch: int) -> bool:
    """Return whether a reader has begun this epoch or a later one."""
    return place.epoch > epoch or _is_begun(place, epoch)


def _works(
    files: Sequence[SourceFile],
    num_workers: int,
    seed: int | None,
    epoch: int,
    stops: Sequence[Stop],
) -> list[Work]:
    """Return every worker's work."""
    if not any(_is_begun(place, epoch) for stop in stops for place in stop):
        return [
            work_of(files, worker, num_workers, seed=seed, epoch=epoch)
            for worker in range(num_workers)
        ]
    *before, last = stops
    begun = _works(files, len(last), seed, epoch, before)
    left = [_left(work, place, epoch) for work, place in zip(begun, last, strict=True)]
    return left if len(left) == num_workers else _deal(left, files, num_workers)


def _left(work: Work, place: Place, epoch: int) -> Work:
    if place.epoch > epoch:
        return ()
    if not _is_begun(place, epoch):
        return work
    rest = work[place.part :]
    if not rest:
        return ()
    here = rest[0].splits[place.split :]
    first = WorkerPart(here, place.row, place.taken, max(0, place.opened - place.split))
    return (first, *rest[1:]) if here else rest[1:]


def _deal(left: Iterable[Work], files: Sequence[SourceFile], num_workers: int) -> list[Work]:
    """Assign what several readers have left to other readers."""
    begun: list[WorkerPart] = []
    rest: list[Split] = []
    for part in (part for work in left for part in work):
        if part.opened:
            begun.append(WorkerPart(part.splits[: part.opened], part.row, part.taken, part.opened))
        rest += part.splits[part.opened :]
    loads = [0] * num_workers
    works: list[list[WorkerPart]] = [[] for _ in range(num_workers)]
    for head in sorted(begun, key=lambda part: -_size(part.splits)):
        least = loads.index(min(loads))
        works[least].append(head)
        loads[least] += _size(head.splits)
    whole = {file.path for file in files if not file.is_splittable and file.piece_rows is None}
    for worker, mine in enumerate(splits.deal_beside(rest, loads, whole)):
        if mine:
            works[worker].append(WorkerPart(tuple(mine)))
    return [tuple(work) for work in works]


def _size(several: Iterable[Split]) -> int:
    return sum(split.size for split in several)
