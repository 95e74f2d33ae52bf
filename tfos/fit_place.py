"""FitPlace and FedEpochs: where the training of the distributed model is.

Covers: the records, and how the servers' metadata hold them.
Does not: find a place (tfos.control.epoch_log), use it (tfos.keras.fit), record epochs
(tfos.reading.fed_epochs).
"""

from __future__ import annotations

from typing import Any

import msgspec

METADATA_NAME = "tfos.fed_epochs"
"""Name of the metadata: `FedEpochs` by feed."""


class FitPlace(msgspec.Struct, frozen=True):
    """Which fit of the distributed model the chief is in, and which epoch of it."""

    number: int
    """Number of the fit, from 0. Earlier fits are over."""
    epoch: int
    """Epoch as Keras counts; -1: the fit has not begun."""
    first: int = 0
    """The epoch that the fit has begun with."""
    files_epoch: int = 0
    """The epoch of its files, or its feed, that comes next, counted by them and not by Keras."""


class FedEpochs(msgspec.Struct, frozen=True):
    """What a checkpoint says of one feed, for a run that resumes from it."""

    count: int
    """Epochs that every worker has trained, of all runs since one ended as it should."""
    before: int
    """How many of them the runs before this one trained."""
    fit: FitPlace
    """Where `fit` goes on."""
    run: str = ""
    """Id of the cluster whose chief has written it."""


def fed_epochs(metadata: dict[str, Any]) -> dict[str, FedEpochs]:
    """Return the records of the servers' metadata, by feed; none in those of a new run.

    Args:
        metadata: all that the servers keep, by name.
    """
    return msgspec.convert(metadata.get(METADATA_NAME, {}), dict[str, FedEpochs])
