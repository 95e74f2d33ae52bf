"""Whether a worker and the servers mean the same model, and the same way to train it. Pure.

Covers: the comparison of two manifests, and its sentences.      Does not: fetch them (exchange).
"""

from __future__ import annotations

from typing import Any

from ps.manifest.manifest import Manifest
from tfos.keras.errors import UnsupportedModel


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
