"""Row counts of files, made by all workers together, so that each gets the same number of rows.

    each worker counts its pieces ─► rendezvous exchanges the counts ─► all know all files' rows

Covers: the rendezvous, counting without servers or when a worker is missing.
Does not: count (feeding), assign rows (feeding.reading.splits).
Runs in: workers.      Threads: main_fun's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from feeding.reading.found_files import FoundFiles, difference, summed_up
from feeding.reading.row_counts import Countable, CountedSource, counting_share, pieces_of
from feeding.reading.splits import SourceFile
from tfos.errors import NoServersError, SettingsError
from tfos.reading.protocols import ReadingContext

RENDEZVOUS_TIMEOUT_S = 3600.0
"""Seconds for the slowest worker to read its share of the files once."""
_KEY = "reading/counts"

_logger = logging.getLogger(__name__)


class _WorkerCounts(msgspec.Struct, frozen=True):
    """The counts of one worker."""

    files: FoundFiles
    first: int
    """Number of the first counted piece."""
    rows: list[int]


def counted(ctx: ReadingContext, source: Countable, timeout_s: float) -> CountedSource:
    """Return the same rows from files with known row counts.

    Every worker calls it and counts its share of the bytes; without servers it counts all of them.

    Args:
        ctx: the node's context.
        source: the files.
        timeout_s: seconds that the slowest worker may take.

    Raises:
        SettingsError: another worker lists other files.
        RequestTimeout: a worker did not arrive; the text names it.
        DataError: a file is damaged, and the policy is to fail.
        OSError: a file cannot be read, or has changed since it was listed.
    """
    files = source.files()
    pieces = pieces_of(files)
    began_s = time.monotonic()
    client = _client(ctx)
    mine = (
        counting_share(pieces, ctx.rank, ctx.num_workers)
        if client is not None
        else range(len(pieces))
    )
    rows = {number: source.count(pieces[number]) for number in mine}
    took_s = time.monotonic() - began_s
    num_bytes = sum(pieces[number].size for number in mine)
    if client is not None:
        counts = _WorkerCounts(summed_up(files), mine.start, list(rows.values()))
        answers = client.rendezvous(_KEY, msgspec.msgpack.encode(counts), timeout_s=timeout_s)
        rows = _merged(ctx, files, answers)
    found = [
        rows[number] if number in rows else source.count(piece)
        for number, piece in enumerate(pieces)
    ]
    if ctx.is_chief:
        _logger.info(
            "%d rows in %s; this worker counted %d bytes of them in %.1f s",
            sum(found),
            _listed(files),
            num_bytes,
            took_s,
        )
    return CountedSource(source, found)


def _client(ctx: ReadingContext) -> Any:
    """Return the client for the rendezvous; None: there is only one worker, or no server."""
    if ctx.num_workers == 1:
        return None
    try:
        return ctx.ps_client()
    except NoServersError:
        return None


def _merged(
    ctx: ReadingContext, files: Sequence[SourceFile], answers: Mapping[int, bytes]
) -> dict[int, int]:
    """Return the row counts of pieces by number; those of a lost worker are missing."""
    told = {
        worker: msgspec.msgpack.decode(answer, type=_WorkerCounts)
        for worker, answer in answers.items()
    }
    if differs := difference(
        files, ctx.rank, {worker: each.files for worker, each in told.items()}
    ):
        raise SettingsError(
            f"equal_steps(): {differs}. Name the same files on every worker, in the same order of "
            "calls, and do not change them"
        )
    return {
        number: rows for each in told.values() for number, rows in enumerate(each.rows, each.first)
    }


def _listed(files: Sequence[SourceFile]) -> str:
    size = sum(file.size_bytes for file in files)
    more = ", …" if len(files) > 1 else ""
    return f"{len(files)} files of {size} bytes ({files[0].path}{more})"
