"""Weights that do not train: given to all workers once, in pieces, through their meetings.

Covers: making frozen weights equal everywhere at the beginning.
Does not: put them on the servers, where every step would move them.
Threads: none of its own.

[merged tfos/keras/step/attach.py] Whether a worker and the servers mean the same model, and the
same way to train it. Pure.

Covers: the comparison of two manifests, and its sentences.      Does not: fetch them (exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ps.errors import WorkerLost
from ps.manifest.manifest import Manifest
from tfos.errors import UnsupportedModel

PIECE_BYTES = 1 << 20
"""Most bytes of one meeting's value."""


def share(
    rendezvous: Callable[[str, bytes], dict[int, bytes]], weights: Sequence[Any], *, seeds: bool
) -> None:
    """Give the seeder's frozen weights to the other workers.

    Args:
        rendezvous: brings a value under a key and returns all workers' values by rank; all workers
            call this at the same point.
        weights: the frozen Keras variables, in the same order everywhere.
        seeds: whether this worker's weights count.

    Raises:
        WorkerLost: the seeder is gone.
    """
    for position, variable in enumerate(weights):
        own = np.ascontiguousarray(variable.numpy())
        data = own.reshape(-1).view(np.uint8)
        received = np.empty_like(data)
        for start in range(0, data.size, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES].tobytes() if seeds else b""
            answers = rendezvous(f"frozen/{position}/{start}", piece)
            given = next((value for value in answers.values() if value), b"")
            if not given:  # and no StopIteration, which Keras takes for the end of the data
                raise _nobody_gave(variable.path)
            received[start : start + len(given)] = np.frombuffer(given, np.uint8)
        if not seeds:
            variable.assign(received.view(own.dtype).reshape(own.shape))


def _nobody_gave(name: str) -> WorkerLost:
    return WorkerLost(
        f"the chief was lost before it had given the other workers the frozen weight {name!r}; "
        "start the training again"
    )


def check_same(ours: Manifest, servers: Manifest) -> None:
    """Refuse servers that hold another model; names may differ, as Keras numbers layers."""
    for field in ("consistency", "reduction", "staleness_bound", "staleness_aware"):
        if getattr(ours, field) != getattr(servers, field):
            raise UnsupportedModel(
                f"this worker distributes with {field}={getattr(ours, field)!r}, the parameter "
                f"servers run {getattr(servers, field)!r}; use the same on every worker"
            )
    mine = [_summary(group) for group in ours.groups]
    theirs = [_summary(group) for group in servers.groups]
    if mine != theirs:
        differing = next(
            (pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]),
            (f"{len(mine)} groups", f"{len(theirs)} groups"),
        )
        raise UnsupportedModel(
            "the parameter servers already hold another model: this worker has "
            f"{differing[0]}, the servers have {differing[1]}; build and compile the same model on "
            "every worker, one model per cluster"
        )
    for our, their in zip(ours.groups, servers.groups, strict=True):
        if our.compression != their.compression:
            raise UnsupportedModel(
                f"this worker distributes with compression={our.compression!r}, the parameter "
                f"servers take {their.compression!r}; use the same on every worker"
            )


def _summary(group: Any) -> tuple[Any, ...]:
    return group.name, group.dtype, group.rule, [param.shape for param in group.params]
