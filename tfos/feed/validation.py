"""Validation of a train(): its rows are fed once after each epoch, to a separate feed.

Covers: its feed and source, its epochs' reports.
Does not: feed (tfos.feed.epoch_feeder), drop unread rows (feeding.receiver.feed_queue, in the
workers).
Runs in: the driver.      Threads: the call's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tfos.console.progress import TrainingProgress
from tfos.control.messages import FeedEpoch
from tfos.driver.preflight import VALIDATION_FEED
from tfos.errors import SettingsError
from tfos.feed.request import FeedCall, FeedCalls, FeedRequest
from tfos.feed.sources import FeedSource, source_of
from tfos.monitor.reports import EpochReport


@dataclass(slots=True)
class ValidationPlan:
    """Validation data, fed after each epoch of one call."""

    request: FeedRequest
    source: FeedSource
    call: FeedCall
    progress: TrainingProgress
    reports: list[EpochReport] = field(default_factory=list)

    @property
    def feed_epoch(self) -> FeedEpoch:
        """The feed and its next epoch."""
        return self.call.feed, self.call.epoch

    def add(self, report: EpochReport) -> str:
        """Keep an epoch's report; return its console line."""
        report = dataclasses.replace(report, is_validation=True)
        self.reports.append(report)
        return f"{self.progress.title}: {report.summary}"


@contextlib.contextmanager
def validating(
    request: FeedRequest, calls: FeedCalls, is_abandoned: Callable[[], bool]
) -> Iterator[ValidationPlan | None]:
    """Reserve the feed of validation for a call; None if it has no validation.

    Args:
        request: the call's request.
        calls: the table of running calls.
        is_abandoned: whether the user's thread no longer waits for the call.

    Raises:
        SettingsError: the rows to train use the same feed, or the data cannot be fed.
        PhaseError: another call feeds validation.
    """
    if request.validation is None:
        yield None
        return
    if request.feed == VALIDATION_FEED:
        raise SettingsError(
            f"train(validation=...) uses the feed {VALIDATION_FEED!r}, which is this call's qname; "
            "feed the rows to train to another one"
        )
    own = dataclasses.replace(
        request,
        data=request.validation,
        feed=VALIDATION_FEED,
        validation=None,
        seed=None,
        batch=None,
        is_validation=True,
    )
    with calls.enter(VALIDATION_FEED, is_abandoned, request.feed_timeout_s) as call:
        yield ValidationPlan(
            own, source_of(own), call, TrainingProgress(request.num_epochs, is_validation=True)
        )
