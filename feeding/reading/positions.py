"""Reading positions: where the readers of files are, and who reads the rest after a stop.

An epoch's work of one worker is a list of parts; a part is a list of splits, of which a reader
reads several side by side (lanes). A stopped reader has a place in its work. What all readers have
left is the work that the next readers share:

    as many readers    each continues exactly where its predecessor stopped
    another number     windows   the rest of each window that a stopped reader was in
                       begun     the rest of each split behind those windows; each assigned whole
                       the rest  all splits that no reader has begun, split again for even shares

Later epochs, which no reader has begun, are shared as usual. A place counts rows that a split
yields when it is read, also rows that filters or damage drop later.

Covers: EpochPosition, Position, Course, an epoch's work after any number of stops.
Does not: read (reader), split files (splits), store positions (tfos.reading, ps.metadata).
Threads: any; pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from feeding.errors import FeedSettingsError, FileChanged
from feeding.filesystem.interface import is_other
from feeding.reading import splits
from feeding.reading.host_paths import without_directory
from feeding.reading.splits import UNTOLD, SourceFile, Split

Count = Annotated[int, msgspec.Meta(ge=0)]


class Front(msgspec.Struct, frozen=True, array_like=True):
    """Which splits of a part are being read, and how far."""

    lanes: tuple[tuple[Count, Count], ...] = ()
    """Lanes in the order of their turns: index of the split in the part, and how many of its rows
    were read."""
    begun: Count = 0
    """Splits of the part that were begun, those that have ended included."""


UNBEGUN = Front()


class EpochPosition(msgspec.Struct, frozen=True, array_like=True):
    """How much of an epoch one reader has yielded."""

    epoch: Count
    part: Count = 0
    front: Front = UNBEGUN
    """Where the current window begins; without windows, the next row."""
    taken: Count = 0
    """Rows of the window that were yielded; 0: no window is begun."""
    rows: Count = 0
    """Rows of the window."""
    end: Front = UNBEGUN
    """Where the window ends."""
    width: Count = 0
    """Most splits read side by side in the window; 0: no window is begun."""


BEGINNING = EpochPosition(0)
Stop = tuple[EpochPosition, ...]
"""The places of all readers of a run when it stopped."""


class Position(msgspec.Struct, frozen=True):
    """Position of one reader of a run, as a checkpoint stores it."""

    files: str
    """The `fingerprint` of the files."""
    seed: int | None
    shuffle_rows: int
    run_number: int
    """See Course."""
    worker: int
    num_workers: int
    place: EpochPosition
    versions: str
    """The `versions` of the files; empty: unknown."""
    choice: str
    """The `choice` of the files; empty: not compared."""


class ListedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file, as a checkpoint stores it beside the positions."""

    path: str
    """Path as `without_directory` returns it."""
    size_bytes: int
    version: str = ""
    """See FileStatus; empty: unknown, as of files of a host."""


class Course(msgspec.Struct, frozen=True):
    """What the readers of a run need of the runs that it continues."""

    run_number: int = 0
    """Number of runs before this one. Positions of another run do not count."""
    first_epoch: int = 0
    stops: tuple[Stop, ...] = ()
    """Stops of earlier runs inside epochs that are still to be read, the oldest first."""


START = Course()


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """Splits that one worker reads, several side by side."""

    splits: tuple[Split, ...]
    skipped: tuple[int, ...] = ()
    """Rows at the beginning of each of the first splits that earlier runs read."""
    place: EpochPosition = BEGINNING
    """Where an earlier run stopped in it; the epoch and the number of the part do not count."""
    ends_with_window: bool = False
    """Whether other parts have what is behind the window of that place."""

    def rows_read(self, split: int) -> int:
        """Return the rows of a split, by index, that were read when it had not been begun."""
        return self.skipped[split] if split < len(self.skipped) else 0

    @property
    def window(self) -> WorkerPart | None:
        """The rest of the window that was begun; None: there is none."""
        if not self.place.taken:
            return None
        return replace(self, splits=self.splits[: self.place.end.begun], ends_with_window=True)

    def behind_window(self) -> list[tuple[Split, int]]:
        """Return the splits that have rows behind the window, and how many rows to skip."""
        if self.ends_with_window:
            return []
        front = self.place.end if self.place.taken else self.place.front
        later = range(front.begun, len(self.splits))
        rest = [*front.lanes, *((split, self.rows_read(split)) for split in later)]
        return [(self.splits[split], row) for split, row in rest]


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
        seed: see splits.shares.
        epoch: from 0.
        stops: where earlier runs stopped, the oldest first.

    Raises:
        FeedSettingsError: there is no such worker; or see splits.shares.
    """
    if not 0 <= worker < num_workers:
        raise FeedSettingsError(f"worker must be 0 to {num_workers - 1}, got {worker}")
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
    stop = tuple(places.get(w, EpochPosition(before.first_epoch)) for w in range(num_workers))
    stops = (*before.stops, stop)
    epoch, end = min(p.epoch for p in stop), max(p.epoch for p in stop)
    while epoch < end and not any(_works(files, num_workers, reader.seed, epoch, stops)):
        epoch += 1
    while stops and not any(_is_begun(place, epoch) for place in stops[0]):
        stops = stops[1:]
    return Course(before.run_number + 1, epoch, stops)


def fingerprint(files: Iterable[SourceFile]) -> str:
    """Return a hash of the files' paths, sizes and rows; equal for copies on other hosts."""
    named = without_directory(files)
    return _digest([(file.path, file.size_bytes, file.piece_rows) for file in named], 12)


def choice(files: Iterable[SourceFile]) -> str:
    """Return a hash of which rows of the files are read; empty: they do not tell."""
    told = sorted({file.choice for file in files})
    return "" if UNTOLD in told else _digest(told, 12)


def versions(files: Iterable[SourceFile]) -> str:
    """Return a hash of the versions of files that all hosts share, behind the versions' kinds.

    Returns:
        A text for `is_other`; its kind also tells which files have a version of which kind. Empty:
        no version is known.
    """
    told = [(file.path, file.version) for file in without_directory(files) if file.version]
    kinds = [(path, version.partition(" ")[0]) for path, version in told]
    names = "+".join(sorted({kind for _, kind in kinds}))
    return f"{names}/{_digest(kinds, 4)} {_digest(told, 12)}" if told else ""


def _digest(of: object, size_bytes: int) -> str:
    return hashlib.blake2b(msgspec.json.encode(of), digest_size=size_bytes).hexdigest()


def listed_files(files: Iterable[SourceFile]) -> list[ListedFile]:
    """Return what a checkpoint stores of files."""
    named = without_directory(files)
    return [ListedFile(file.path, file.size_bytes, file.version) for file in named]


def refuse_changed(before: Iterable[ListedFile], files: Iterable[SourceFile]) -> None:
    """Refuse files that have changed.

    Args:
        before: when the position was saved.
        files: as they are now.

    Raises:
        FileChanged: names the files that differ.
    """
    then, now = ({file.path: file for file in each} for each in (before, listed_files(files)))
    both = [(then[path], now[path]) for path in sorted(then.keys() & now.keys())]
    changed = [
        f"{one.path} had {one.size_bytes} bytes, now {other.size_bytes}"
        if one.size_bytes != other.size_bytes
        else f"{one.path} was {one.version}, now {other.version}"
        for one, other in both
        if one.size_bytes != other.size_bytes or is_other(one.version, other.version)
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
            f"position was saved (fingerprint {saved.files}, now {reader.files}), or equal_steps() "
            "is used only then or only now"
        )
    if saved.choice and reader.choice and saved.choice != reader.choice:
        raise FileChanged(
            "reading cannot continue: the position was saved with another filter, CSV header or "
            f"quoting (fingerprint {saved.choice}, now {reader.choice}), which leave other rows. "
            "Read the files as then, or start under another name"
        )
    if is_other(saved.versions, reader.versions):
        raise FileChanged(
            "reading cannot continue: files were written again since the position was saved, with "
            f"equal sizes (versions {saved.versions}, now {reader.versions}). Read the files as "
            "they were, or start under another name"
        )
    for name in ("seed", "shuffle_rows"):
        then, now = getattr(saved, name), getattr(reader, name)
        if then != now:
            raise FeedSettingsError(
                f"reading cannot continue: it had {name}={then}, now {now}; pass the "
                "same, or start under another name"
            )


def _is_begun(place: EpochPosition, epoch: int) -> bool:
    """Return whether a reader has begun this epoch or a later one."""
    return place.epoch > epoch or (place.epoch == epoch and place != EpochPosition(epoch))


def _works(
    files: Sequence[SourceFile],
    num_workers: int,
    seed: int | None,
    epoch: int,
    stops: Sequence[Stop],
) -> list[Work]:
    """Return every worker's work."""
    if not any(_is_begun(place, epoch) for stop in stops for place in stop):
        found = splits.shares(files, num_workers, seed=seed, epoch=epoch)
        return [(WorkerPart(tuple(mine)),) if mine else () for mine in found]
    *before, last = stops
    begun = _works(files, len(last), seed, epoch, before)
    left = [_left(work, place, epoch) for work, place in zip(begun, last, strict=True)]
    return left if len(left) == num_workers else _deal(left, files, num_workers)


def _left(work: Work, place: EpochPosition, epoch: int) -> Work:
    if place.epoch > epoch:
        return ()
    if not _is_begun(place, epoch):
        return work
    rest = work[place.part :]
    if not rest:
        return ()
    if rest[0].ends_with_window and not place.taken:
        return rest[1:]
    return (replace(rest[0], place=place), *rest[1:])


def _deal(left: Iterable[Work], files: Sequence[SourceFile], num_workers: int) -> list[Work]:
    """Assign what several readers have left to other readers."""
    windows: list[WorkerPart] = []
    begun: list[tuple[Split, int]] = []
    rest: list[Split] = []
    for part in (part for work in left for part in work):
        if (window := part.window) is not None:
            windows.append(window)
        for split, row in part.behind_window():
            if row:
                begun.append((split, row))
            else:
                rest.append(split)
    loads = [0] * num_workers
    works: list[list[WorkerPart]] = [[] for _ in range(num_workers)]
    for window in sorted(windows, key=lambda part: part.place.taken - part.place.rows):
        least = loads.index(min(loads))
        works[least].append(window)
        # Rows of unknown size count as one byte: a window is small beside what is left of splits.
        loads[least] += window.place.rows - window.place.taken
    heads: list[list[tuple[Split, int]]] = [[] for _ in range(num_workers)]
    for head in sorted(begun, key=lambda each: -_rest(*each)):
        least = loads.index(min(loads))
        heads[least].append(head)
        loads[least] += _rest(*head)
    whole = {file.path for file in files if not file.is_splittable and file.piece_rows is None}
    dealt = splits.deal_beside(rest, loads, whole)
    for worker, (mine, more) in enumerate(zip(heads, dealt, strict=True)):
        if mine or more:
            skipped = tuple(row for _, row in mine)
            works[worker].append(WorkerPart((*(split for split, _ in mine), *more), skipped))
    return [tuple(work) for work in works]


def _rest(split: Split, row: int) -> int:
    """Return the size of a split behind a row, in rows; in bytes, where rows have no known size."""
    return split.size if split.piece is None else max(1, split.size - row)
