"""Ledger of one epoch: which worker accepted which rows, what is trained, lost, repeated.

Covers: EpochLedger; rows to feed again after a loss, the counts of the epoch's report.
Does not: feed (tfos.feed.epoch_feeder), ask workers (tfos.control.members has their last counts).
Runs in: the driver.      Pure.

A worker trains rows in acceptance order, so one position per epoch says which rows are trained; of
the rows before it the worker says how many it dropped. The position of a lost worker is as old as
its last heartbeat: rows that it trained after that are fed again and count as repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from feeding.protocol.row_ranges import AcceptedRows, RowRanges, Span, rows_and_end
from feeding.sender.feeder import FeedReport
from tfos.control.messages import EpochRowCounts
from tfos.feed.suspects import Rows, Suspects
from tfos.monitor.reports import EpochReport


class EpochLedger:
    """Rows of one epoch of one feed.

    Workers are known by `feeding.sender.worker_link.FeedTarget.process`.

    Args:
        feed: its name, for messages.
        epoch: number of the epoch, from 0.
    """

    def __init__(self, feed: str, epoch: int) -> None:
        self._feed = feed
        self._epoch = epoch
        self._fed_rows = 0
        self._again_rows = 0
        self._skipped_rows = 0
        self._partition_rows: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._accepted: dict[int, list[tuple[int, bytes]]] = {}
        """Partition and packed rows by worker, as the feed tasks reported them."""
        self._unsent: dict[int, RowRanges] = {}
        """Rows by partition that no worker was left to take."""
        self.resent: Counter[tuple[int, str]] = Counter()
        """Rows in flight that went to others as a connection broke, by worker and its name."""
        self.suspects = Suspects()

    def add(self, reports: Iterable[FeedReport], *, again: bool = False) -> int:
        """Add the reports of a job; return how many rows no worker accepted and none will.

        Args:
            reports: one per task of the job.
            again: whether the job fed lost rows again. A partition whose number of rows has changed
                was computed differently: its rows then replace none of the lost ones.
        """
        dropped = 0
        for report in reports:
            for lost in report.lost:
                self.resent[lost.process, lost.name] += lost.resent_rows
            if not again:
                self._fed_rows += report.rows
                self._partition_rows[report.partition] = report.partition_rows
            elif report.partition_rows != self._partition_rows.get(report.partition):
                dropped += report.rows
                continue
            dropped += report.dropped_rows
            for start, stop in report.unsent:
                dropped -= stop - start
                self._unsent.setdefault(report.partition, RowRanges()).add(start, stop)
            for worker, packed in report.accepted.items():
                self._accepted.setdefault(worker, []).append((report.partition, packed))
                if again:
                    self._again_rows += rows_and_end(packed)[0]
        return dropped

    @property
    def has_unsent(self) -> bool:
        """Whether there are rows that no worker was left to take."""
        return bool(self._unsent)

    def counts_on(self, worker: int) -> bool:
        """Whether this worker has rows that `take_lost` has not decided on."""
        return worker in self._accepted and worker not in self._given_up

    def take_lost(
        self, lost: Mapping[int, EpochRowCounts], crashes: Mapping[int, str] | None = None
    ) -> Rows:
        """Return the rows, each once, that these workers had not trained or that none took.

        Args:
            lost: the lost workers, with their last counts of this epoch.
            crashes: the lost workers that crashed, with the text of their failures.
        """
        found, self._unsent = self._unsent, {}
        self._given_up |= lost.keys()
        for worker, last in lost.items():
            kept: list[tuple[int, bytes]] = []
            untrained: dict[int, RowRanges] = {}
            read: dict[int, list[Span]] = {}
            for partition, packed in self._accepted.get(worker, ()):
                accepted = AcceptedRows.unpack(packed)
                before, behind = accepted.split(last.position)
                read.setdefault(partition, []).extend(
                    accepted.between(last.position, last.taken_rows)
                )
                kept.append((partition, before.pack()))
                for start, stop in behind:
                    untrained.setdefault(partition, RowRanges()).add(start, stop)
                    found.setdefault(partition, RowRanges()).add(start, stop)
            self._accepted[worker] = kept
            if crashes and worker in crashes:
                is_known = last.taken_rows >= 0
                self.suspects.note(worker, crashes[worker], untrained, read if is_known else None)
        return {partition: tuple(ranges) for partition, ranges in sorted(found.items())}

    def leave_out(self, rows: Rows, blamed: Rows) -> Rows:
        """Return rows without blamed ones, which count as dropped; suspects are counted from zero.

        Args:
            rows: rows to feed again.
            blamed: the rows among them that are not fed again.
        """
        self.suspects = Suspects()
        kept = {
            partition: tuple(
                part
                for span in spans
                for part in RowRanges(blamed.get(partition, ())).outside(*span)
            )
            for partition, spans in rows.items()
        }
        self._skipped_rows += num_rows(rows) - num_rows(kept)
        return {partition: spans for partition, spans in kept.items() if spans}

    def report(
        self, last: Mapping[int, EpochRowCounts], names: Mapping[int, str], *, seconds: float
    ) -> EpochReport:
        """Return the counts of the epoch.

        Args:
            last: each worker's last counts of this epoch.
            names: names of the workers; attempts of one worker have one name.
            seconds: duration of the epoch.
        """
        trained = 0
        repeated = self._again_rows
        per_worker: Counter[str] = Counter()
        for worker, rows in last.items():
            known = max(0, self._rows_before(worker, rows.position) - rows.dropped_rows)
            trained += known
            per_worker[names[worker]] += rows.trained_rows
            # Its other trained rows came from attempts of tasks that failed and were retried.
            repeated += rows.trained_rows - known
        return EpochReport(
            feed=self._feed,
            epoch=self._epoch,
            fed_rows=self._fed_rows,
            trained_rows=trained,
            dropped_rows=self._fed_rows - trained,
            repeated_rows=repeated,
            skipped_rows=self._skipped_rows,
            seconds=seconds,
            per_worker=dict(per_worker),
        )

    def _rows_before(self, worker: int, position: int) -> int:
        """Return how many of this worker's reported rows are before this position."""
        count = 0
        for _, packed in self._accepted.get(worker, ()):
            num_rows, end = rows_and_end(packed)
            whole = end <= position
            count += num_rows if whole else AcceptedRows.unpack(packed).rows_before(position)
        return count


def num_rows(rows: Rows) -> int:
    """Return the total number of rows."""
    return sum(stop - start for ranges in rows.values() for start, stop in ranges)
