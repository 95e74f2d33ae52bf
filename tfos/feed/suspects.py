"""Suspects: rows that several workers had accepted and not trained when they crashed.

Covers: how often each row was there, which rows are blamed, the sentence about them.
Does not: know which rows a worker had (tfos.feed.ledger), what a crash is (tfos.failure), feed.
Runs in: the driver.      Pure.

A row that makes its worker crash is fed again to the next worker, which crashes too. A worker has
many rows at once, so a crash alone says little: the rows that were there each time are what is
left. They are a batch or two where the supervisor could read how far its worker was
(tfos.node.supervisor.row_marks); else the worker's last heartbeat is all that is known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from feeding.protocol.row_ranges import RowRanges, Span

Rows = dict[int, tuple[Span, ...]]
"""Ranges of rows by partition."""
RowsOfProcesses = dict[int, dict[int, RowRanges]]
"""By process of a worker, by partition."""
MOST_CRASHES = 3
"""Crashes at which rows are blamed: those of Dask's `allowed-failures`. Two may be chance, as when
a host kills what needs too much memory."""
_MOST_NAMED = 4
"""Ranges that the sentence names; of more it has the number."""


class Suspects:
    """Rows that were at crashes, of one epoch of one feed."""

    def __init__(self) -> None:
        self._crashes: dict[int, str] = {}
        self._untrained: RowsOfProcesses = {}
        self._read: RowsOfProcesses = {}
        """Of those processes of which it is known."""

    def note(
        self,
        process: int,
        crash: str,
        untrained: Mapping[int, Iterable[Span]],
        read: Mapping[int, Iterable[Span]] | None = None,
    ) -> None:
        """Note rows that a worker had when it crashed.

        Args:
            process: the worker's, as `feeding.sender.worker_link.FeedTarget.process`.
            crash: as the driver tells it, such as "worker:1 killed by SIGSEGV".
            untrained: ranges by partition that it had accepted and not trained.
            read: those of them that its trainer, or what reads ahead, had read; None: unknown.
        """
        self._crashes[process] = crash
        _add(self._untrained.setdefault(process, {}), untrained)
        if read is None:
            self._read.pop(process, None)
        else:
            _add(self._read.setdefault(process, {}), read)

    def blamed(self) -> Rows:
        """Return the rows that were at the most crashes, if these are enough to blame them.

        What had only been accepted counts if no row was read each time: what receives rows may
        crash, too.
        """
        return _common({**self._untrained, **self._read}) or _common(self._untrained)

    def text(self, title: str, order: str) -> str:
        """Return the sentence about the blamed rows, and what to do.

        Args:
            title: of the epoch, such as "epoch 1 of 'input'".
            order: of the rows within a partition.
        """
        rows = self.blamed()
        guilty = [
            crash
            for process, crash in self._crashes.items()
            if _overlap(self._untrained[process], rows)
        ]
        ranges = [
            f"rows {start} to {stop - 1} of partition {partition}"
            for partition, spans in rows.items()
            for start, stop in spans
        ]
        named = ", ".join(ranges[:_MOST_NAMED])
        if len(ranges) > _MOST_NAMED:
            named += f" and {len(ranges) - _MOST_NAMED} more ranges"
        return (
            f"{title}: {named} were at {len(guilty)} crashes ({'; '.join(guilty)}). One of these "
            "rows, or a batch with it, is probably what crashes a worker, so they are fed to no "
            f"other one. Look at them and leave out what is wrong. Rows count from 0, {order}"
        )


def _add(known: dict[int, RowRanges], rows: Mapping[int, Iterable[Span]]) -> None:
    for partition, spans in rows.items():
        for start, stop in spans:
            known.setdefault(partition, RowRanges()).add(start, stop)


def _common(had: RowsOfProcesses) -> Rows:
    """Return the rows that the most processes had; none if these are not enough."""
    counted = {
        partition: _counts([rows[partition] for rows in had.values() if partition in rows])
        for partition in sorted({number for rows in had.values() for number in rows})
    }
    most = max((count for found in counted.values() for count, _ in found), default=0)
    if most < MOST_CRASHES:
        return {}
    kept = {
        partition: tuple(span for count, span in found if count == most)
        for partition, found in counted.items()
    }
    return {partition: spans for partition, spans in kept.items() if spans}


def _overlap(had: Mapping[int, RowRanges], rows: Rows) -> bool:
    return any(
        partition in had and had[partition].inside(start, stop)
        for partition, spans in rows.items()
        for start, stop in spans
    )


def _counts(had: Sequence[Iterable[Span]]) -> list[tuple[int, Span]]:
    """Return ranges with the number of crashes at which they were, in ascending order.

    Args:
        had: by crash, disjoint ranges of one partition.
    """
    steps: Counter[int] = Counter()
    for start, stop in itertools.chain.from_iterable(had):
        steps[start] += 1
        steps[stop] -= 1
    edges = sorted(edge for edge, step in steps.items() if step)
    found, count = [], 0
    for start, stop in itertools.pairwise(edges):
        count += steps[start]
        found.append((count, (start, stop)))
    return found
