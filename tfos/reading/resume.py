"""Resuming of file reading: positions of a saved run, and where the new run begins.

    reading/NAME/worker/3   `Position` of worker 3; sent with each of its pushes
    reading/NAME/course     `Course`: the history of earlier runs
    reading/NAME/files      paths, sizes and versions, to name changed files

The structs are those of feeding.reading.positions.
Covers: the chief's reading of the metadata (ps.metadata), the workers' rendezvous, the names.
Does not: read (feeding.reading), push metadata (tfos.keras.step.exchange), restore
(tfos.worker.saver).
Runs in: workers.      Threads: main_fun's.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from feeding.reading.found_files import FoundFiles, difference, summed_up
from feeding.reading.positions import (
    START,
    Course,
    ListedFile,
    Position,
    course_after,
    listed_files,
    refuse_changed,
)
from feeding.reading.splits import SourceFile
from ps.errors import PSSettingsError
from tfos.errors import SettingsError
from tfos.reading.protocols import ReadingContext

RENDEZVOUS_TIMEOUT_S = 600.0
"""Seconds for the slowest worker to list its files, after the chief has restored the servers."""
_NAME = re.compile(r"[0-9A-Za-z._-]{1,100}")
_MAX_LISTED_BYTES = 512 << 10


class _Arrival(msgspec.Struct, frozen=True):
    """The arrival of a worker's process that has to agree on the course."""

    process: str
    files: FoundFiles


def course_of(ctx: ReadingContext, name: str, files: Iterable[SourceFile], own: Position) -> Course:
    """Return where reading begins; all workers call it and get the same result.

    Args:
        ctx: the node's context.
        name: name of the rows.
        files: all files.
        own: the position of a reader that has read nothing.

    Raises:
        SettingsError: the name is invalid, the rows were shuffled differently, or another worker
            has found other files.
        FileChanged: files have changed; the text names them.
        NoServersError: the cluster has no servers to keep the positions.
        RequestTimeout: a worker did not make this call; the text names it.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"a name of rows has 1 to 100 of 0-9 A-Z a-z . _ -, got {name!r}")
    client, files = ctx.ps_client(), tuple(files)
    agreed = b""
    if _all_meet(ctx, client, name, files) and ctx.is_chief:
        agreed = msgspec.json.encode(_agreed(client, name, files, own))
    answers = client.rendezvous(_key(name, "course"), agreed, timeout_s=RENDEZVOUS_TIMEOUT_S)
    found = next((answer for answer in answers.values() if answer), None)
    if found is None:
        raise SettingsError(
            f"the chief has finished without reading {name!r}; every worker, the chief "
            "included, must make the same rows resumable"
        )
    return msgspec.json.decode(found, type=Course)


def position_name(name: str, worker: int) -> str:
    """Return the name of the metadata that holds a worker's position.

    Args:
        name: name of the rows.
        worker: rank.
    """
    return _key(name, f"worker/{worker}")


def files_metadata(name: str, files: Iterable[SourceFile]) -> tuple[str, Any]:
    """Return the name and value of the files' metadata; value None: too many files.

    Args:
        name: name of the rows.
        files: all files.
    """
    listed = listed_files(files)
    is_short = len(msgspec.json.encode(listed)) <= _MAX_LISTED_BYTES
    return _key(name, "files"), listed if is_short else None


def _key(name: str, what: str) -> str:
    return f"reading/{name}/{what}"


def _all_meet(ctx: ReadingContext, client: Any, name: str, files: tuple[SourceFile, ...]) -> bool:
    """Compare the workers' files; return whether no worker reads until all agree on the course.

    Otherwise an earlier process of this worker has agreed with the others, which read now: their
    positions are not those of a run that has ended.
    """
    own = _Arrival(uuid.uuid4().hex, summed_up(files))
    key = _key(name, "arrivals")
    limit_s = RENDEZVOUS_TIMEOUT_S + client.restore_s
    answers = client.rendezvous(key, msgspec.msgpack.encode(own), timeout_s=limit_s)
    told = {rank: msgspec.msgpack.decode(each, type=_Arrival) for rank, each in answers.items()}
    if differs := difference(files, ctx.rank, {rank: each.files for rank, each in told.items()}):
        raise SettingsError(
            f"rows {name!r}: {differs}. Each worker cuts its share from its own list, so rows "
            "would be read twice or never. Name the same files on every worker, and do not "
            "change them"
        )
    return own in told.values()


def _agreed(client: Any, name: str, files: tuple[SourceFile, ...], own: Position) -> Course:
    """Return the course that the chief finds, and store it for runs that resume this one."""
    metadata: dict[str, Any] = client.metadata()
    prefix = _key(name, "worker/")
    try:
        before = msgspec.convert(metadata.get(_key(name, "course"), START), Course)
        saved = {
            key: msgspec.convert(value, Position)
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        listed = msgspec.convert(metadata.get(_key(name, "files")), list[ListedFile] | None)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"the checkpoint's metadata {_key(name, '')}... are not positions of files: {error}. "
            "Use another name: resumable(name=...)"
        ) from error
    if saved and listed is not None:  # too many files to list have only their fingerprint
        refuse_changed(listed, files)
    course = course_after(before, saved.values(), files, own)
    if course != before:
        # First: without it the positions mean nothing. They may return with ps:0, it may not.
        _store(client, name, course)
        for key in saved:
            client.set_metadata(key, None)
    if course.run_number:
        logging.getLogger("tfos").info(
            "rows %r: reading resumes in epoch %d, where %d workers have stopped%s",
            name,
            course.first_epoch + 1,
            len(course.stops[-1]) if course.stops else 0,
            f"; {own.num_workers} workers share the remaining rows",
        )
    return course


def _store(client: Any, name: str, course: Course) -> None:
    try:
        client.set_metadata(_key(name, "course"), course, of_run=True)
    except PSSettingsError as error:
        raise SettingsError(
            f"rows {name!r}: runs were stopped {len(course.stops)} times within unread epochs, and "
            f"the places of all their {sum(map(len, course.stops))} workers are more than a "
            "checkpoint keeps. Use another name, which begins with the first row: "
            "resumable(name=...)"
        ) from error
