"""Row marks: how far a worker's trainer is in the fed rows, in a file that outlives the worker.

Covers: the marks of each feed, written by the worker and read by its supervisor after a crash.
Does not: count rows (feeding.receiver), report (tfos.node.supervisor.supervisor).
Threads: a writer's calls are serialised by the feed channel.

Heartbeats report the same seconds later. The rows between the two marks may be the cause of
a crash: the trainer, or what reads ahead for it, had them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import msgspec

from rpc.linux_calls import memfd_create
from tfos.control.messages import EpochRowCounts, FeedSnapshot

_MARK = struct.Struct("<qqqq")
"""Epoch plus one (0: nothing was read), rows trained, rows dropped, rows taken."""


def new_file() -> int:
    """Return the descriptor of a new file in memory for marks."""
    return memfd_create("tfos-rows")


class RowMarks:
    """Writes the marks of one worker.

    Args:
        descriptor: the file's descriptor.
        feeds: the names of all feeds.
    """

    def __init__(self, descriptor: int, feeds: Sequence[str]) -> None:
        self._descriptor = descriptor
        self._places = {feed: number * _MARK.size for number, feed in enumerate(feeds)}

    def note(
        self, feed: str, epoch: int, trained_rows: int, dropped_rows: int, taken_rows: int
    ) -> None:
        """Write the marks of a feed; one call of the system, so a kill leaves them whole.

        Args:
            feed: its name; feeds that the file does not have are ignored.
            epoch: epoch of the rows.
            trained_rows: trained rows before the first one that is neither trained nor dropped.
            dropped_rows: dropped rows before the same row.
            taken_rows: no row from this position on was read.
        """
        place = self._places.get(feed)
        if place is not None:
            mark = _MARK.pack(epoch + 1, trained_rows, dropped_rows, taken_rows)
            os.pwrite(self._descriptor, mark, place)


def marked(
    descriptor: int, feeds: Sequence[str], known: Sequence[FeedSnapshot]
) -> tuple[FeedSnapshot, ...]:
    """Return the counts of a worker's feeds as it left them.

    Args:
        descriptor: the file's descriptor; its writer has ended.
        feeds: the names of all feeds, as for its writer.
        known: the counts that it reported last.
    """
    found = {each.feed: each for each in known}
    for number, feed in enumerate(feeds):
        mark = os.pread(descriptor, _MARK.size, number * _MARK.size)
        if len(mark) < _MARK.size:
            continue
        following, trained, dropped, taken = _MARK.unpack(mark)
        if following:
            before = found.get(feed, FeedSnapshot(feed))
            marks = EpochRowCounts(following - 1, taken, trained, taken, dropped)
            found[feed] = _advanced(before, marks)
    return tuple(found.values())


def _advanced(known: FeedSnapshot, marks: EpochRowCounts) -> FeedSnapshot:
    """Return a snapshot with the marks of one epoch in it; counts never go back."""
    before = known.epoch(marks.epoch)
    newest = marks if marks.position >= before.position else before
    counts = msgspec.structs.replace(
        newest,
        accepted_rows=max(before.accepted_rows, marks.taken_rows),
        taken_rows=marks.taken_rows,
    )
    others = tuple(each for each in known.epochs if each.epoch != marks.epoch)
    more = counts.trained_rows - before.trained_rows
    return msgspec.structs.replace(
        known, trained_rows=known.trained_rows + more, epochs=(*others, counts)
    )
