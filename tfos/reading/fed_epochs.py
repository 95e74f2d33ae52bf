"""Resuming of fed epochs: the chief records on the servers which epochs every worker has trained.

Covers: the record while `fit` follows a feed, its end when main_fun returns.
Does not: skip epochs (tfos.feed.cluster_feeder, at the driver), begin `fit` there (tfos.keras.fit),
save.
Runs in: the chief's process.
Threads: `note` comes from the thread that runs `fit`, the others from the main thread, before and
after it.

The record is set between two epochs, when all pushes are acknowledged, so a checkpoint that counts
an epoch has its updates. A run whose main_fun has returned removes it: the next one trains all of
its epochs. A run that was interrupted leaves it, and the next one goes on there. Orca's fits always
leave it (TrainedFeeds.keeps_epochs): the driver tells the next one whether to go on there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ps.errors import ServerPhaseError
from tfos.fit_place import METADATA_NAME, FedEpochs, FitPlace, fed_epochs

if TYPE_CHECKING:
    from ps.client.client import PSClient


class FedEpochRecord:
    """The record of one cluster; it keeps nothing until `begin`."""

    def __init__(self) -> None:
        self._client: Callable[[], PSClient] | None = None
        self._run = ""
        self._feeds: dict[str, FedEpochs] = {}
        self.before: dict[str, int] = {}
        """Number of epochs that the resumed run had trained, by feed."""

    def begin(
        self,
        metadata: dict[str, Any],
        client: Callable[[], PSClient],
        *,
        run: str,
        resumes: bool,
    ) -> None:
        """Take what the restored checkpoint says, or the servers that this run has filled before.

        The record names its run: a chief that was lost may have restored the servers without
        reaching this call.

        Args:
            metadata: the servers' metadata.
            client: function that returns the client of the servers that `fit` uses.
            run: id of this cluster, the same for every attempt of its chief.
            resumes: whether the run goes on where an interrupted one stopped, or forgets that one.
        """
        self._client, self._run = client, run
        found = fed_epochs(metadata)
        for feed, each in found.items():
            if each.run == run:
                self._feeds[feed] = each
            elif resumes:
                self._feeds[feed] = FedEpochs(each.count, each.count, each.fit, run)
        if self._feeds != found:
            self._write()
        self.before = {feed: found.before for feed, found in self._feeds.items()}

    def note(self, feed: str, num_fed: int, place: FitPlace) -> None:
        """Record an epoch that every worker has trained.

        Args:
            feed: name of the feed.
            num_fed: number of its epochs that this run has trained, as the driver counts.
            place: the place where `fit` goes on after it.
        """
        before = self.before.get(feed, 0)
        self._feeds[feed] = FedEpochs(before + num_fed, before, place, self._run)
        self._write()

    def stopped(self, feed: str, number: int) -> None:
        """Let a run that resumes begin with the next fit: this one stopped early.

        Args:
            feed: name of the feed that the fit read.
            number: number of the fit.
        """
        found = self._feeds.get(feed)
        if found is not None and found.fit.number == number:
            self._feeds[feed] = msgspec.structs.replace(found, fit=FitPlace(number + 1, -1))
            self._write()

    def end(self) -> None:
        """Remove the record: main_fun has returned, so a later run has nothing to go on with."""
        if self._feeds:
            self._feeds = {}
            self._write()

    def _write(self) -> None:
        if self._client is not None:
            value = msgspec.to_builtins(self._feeds) or None
            # Servers without a model: no epoch had a row yet, and nothing can be saved.
            with contextlib.suppress(ServerPhaseError):
                self._client().set_metadata(METADATA_NAME, value)
