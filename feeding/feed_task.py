"""What Spark ships to its tasks: feed a partition, or have it answered.

Covers: FeedTask, InferenceTask; used as `rdd.mapPartitionsWithIndex(task)`.
Does not: import pyspark, or anything of the user's.
Runs in: a Spark task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from feeding.config import FeedConfig
from feeding.feeder import Feeder, FeedReport
from feeding.inference import InferenceFeeder
from feeding.lane import FeedTarget, LostWorker
from feeding.packer import Packer
from feeding.rows import rows_of
from rpc.handshake import Credentials

__all__ = ["FeedReport", "FeedTarget", "FeedTask", "InferenceTask", "LostWorker"]


@dataclass(frozen=True, kw_only=True)
class FeedTask:
    """Feeds a partition's rows for training; yields one FeedReport."""

    targets: tuple[FeedTarget, ...]
    credentials: Credentials
    epoch: int
    config: FeedConfig
    feed: str = "input"
    packer: Callable[..., Packer] = Packer
    """Makes what packs a partition; decides what `rows` may hold."""

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[FeedReport]:
        """Feed all rows of a partition.

        Raises:
            FeedError: see feeding.feeder.Feeder.run.
        """
        packer = self.packer(self.config, feed=self.feed, epoch=self.epoch, partition=partition)
        feeder = Feeder(
            self.targets,
            self.credentials,
            self.config,
            packer,
            feed=self.feed,
            partition=partition,
        )
        yield feeder.run(iter(rows))


@dataclass(frozen=True, kw_only=True)
class InferenceTask:
    """Has a partition's rows answered by one worker; yields one result per row, in order."""

    targets: tuple[FeedTarget, ...]
    credentials: Credentials
    config: FeedConfig
    feed: str = "input"

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of a partition's rows.

        Raises:
            FeedError: see feeding.inference.InferenceFeeder.run.
        """
        feeder = InferenceFeeder(
            self.targets,
            self.credentials,
            self.config,
            feed=self.feed,
            partition=partition,
        )
        with contextlib.closing(feeder.run(iter(rows))) as chunks:
            for chunk in chunks:
                yield from rows_of(chunk)
