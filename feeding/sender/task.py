"""Feed tasks: what Spark ships to its tasks, to feed a partition or to run inference on it.

Covers: FeedTask, InferenceTask; used as `rdd.mapPartitionsWithIndex(task)`.
Does not: import pyspark, or any code of the user.
Runs in: a Spark task.
Threads: one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from feeding.columnar.rows import rows_of
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.protocol.messages import Hello
from feeding.protocol.row_ranges import Span
from feeding.sender.feeder import Feeder, FeedReport
from feeding.sender.inference import InferenceFeeder
from feeding.sender.shuffle import Shuffle
from feeding.sender.worker_link import FeedTarget
from rpc.auth.handshake import Credentials

__all__ = ["FeedReport", "FeedTarget", "FeedTask", "InferenceTask"]


@dataclass(frozen=True, kw_only=True)
class FeedTask:
    """Feeds a partition's rows for training; yields one FeedReport."""

    targets: tuple[FeedTarget, ...]
    credentials: Callable[[], Credentials]
    """Returns those of the cluster; called in the task, so no closure needs to hold a secret."""
    epoch: int
    config: FeedConfig
    feed: str = "input"
    packer: Callable[..., Packer] = Packer
    """Makes the packer of a partition; defines what `rows` may hold."""
    shuffle: Shuffle | None = None
    """Order of the rows; None: that of the partition."""
    exactly_once: bool = False
    """Skip rows that earlier attempts of a partition's task have fed to live workers."""
    again: Mapping[int, tuple[Span, ...]] | None = None
    """Feed only these rows of these partitions: they were lost with a worker."""
    round_number: int = 0
    """Number of this round of feeding lost rows again, from 1; 0: the first feeding."""
    keeps_unsent: bool = False
    """Report rows that no worker is left to take: one that is started again may take them."""

    @property
    def feeds_all_in_order(self) -> bool:
        """Whether all partitions are fed in their own order."""
        return self.again is None and self.shuffle is None

    def order(self, num_partitions: int) -> list[int]:
        """Return the numbers of the partitions to feed, in order."""
        if self.again is not None:
            return [partition for partition in self.again if partition < num_partitions]
        if self.shuffle is not None:
            return self.shuffle.partitions(self.epoch, num_partitions)
        return list(range(num_partitions))

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[FeedReport]:
        """Feed all rows of a partition.

        Args:
            partition: its number.
            rows: rows of the partition, as `packer` takes them.

        Raises:
            FeedError: see feeding.sender.feeder.Feeder.run.
        """
        only = None if self.again is None else self.again.get(partition)
        if self.again is not None and not only:
            return
        hello = Hello(
            feed=self.feed,
            epoch=self.epoch,
            partition=partition,
            exactly_once=self.exactly_once,
            reopen=self.round_number,
        )
        feeder = Feeder(
            self.targets,
            self.credentials(),
            self.config,
            self.packer(self.config, feed=self.feed, epoch=self.epoch, partition=partition),
            hello,
            shuffle=self.shuffle,
            only=only,
            keeps_unsent=self.keeps_unsent,
        )
        yield feeder.run(iter(rows))


@dataclass(frozen=True, kw_only=True)
class InferenceTask:
    """Sends a partition's rows to one worker for inference; yields one result per row, in order."""

    targets: tuple[FeedTarget, ...]
    credentials: Callable[[], Credentials]
    """See FeedTask."""
    config: FeedConfig
    feed: str = "input"

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of a partition's rows.

        Args:
            partition: its number.
            rows: rows of the partition.

        Raises:
            FeedError: see feeding.sender.inference.InferenceFeeder.run.
        """
        with contextlib.closing(self.feeder(partition).run(iter(rows))) as chunks:
            for chunk in chunks:
                yield from rows_of(chunk)

    def feeder(
        self,
        partition: int,
        make_packer: Callable[..., Packer] = Packer,
        held_bytes: Callable[[], int] = lambda: 0,
    ) -> InferenceFeeder:
        """Return the feeder of a partition, which is used once.

        Args:
            partition: its number.
            make_packer: returns the packer of its rows.
            held_bytes: see InferenceFeeder.
        """
        return InferenceFeeder(
            self.targets,
            self.credentials(),
            self.config,
            feed=self.feed,
            partition=partition,
            make_packer=make_packer,
            held_bytes=held_bytes,
        )
