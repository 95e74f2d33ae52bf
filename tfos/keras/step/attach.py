"""Attaching a worker to the servers: whether both mean the same model, and its frozen weights.

Covers: the comparison of two manifests and its sentences; the size of buckets; taking over frozen
weights.
Does not: seed, fetch the manifest or pull what trains (tfos.keras.step.trainer).
Threads: none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ps.manifest.manifest import Manifest
from ps.manifest.sharding import bucket_bytes_for
from tfos.errors import UnsupportedModel
from tfos.keras.embedding.table_settings import differences
from tfos.keras.step.variables import VariableGroup


def adopt_frozen(
    client: Any, manifest: Manifest, groups: Sequence[VariableGroup], *, timeout_s: float
) -> None:
    """Assign the servers' frozen weights to the model's variables.

    Args:
        client: the process's PSClient.
        manifest: of this model.
        groups: its frozen groups.
        timeout_s: for the chief to seed them, where the servers' checkpoint had none.

    Raises:
        PSError: as PSClient.pull_frozen.
    """
    import tensorflow as tf

    received = {group.name: np.empty(sum(group.sizes), group.dtype) for group in groups}
    client.pull_frozen(manifest, received, timeout_s=timeout_s)
    for group in groups:
        group.assign(tf.constant(received.pop(group.name)))


def with_buckets(manifest: Manifest, client: Any) -> Manifest:
    """Return the manifest with the buckets of servers that have parameters, or with fitting ones.

    Those that lack the seed of a lost chief have none: the next seed replaces it.

    A restored checkpoint keeps its buckets, whatever the number of servers is now.

    Args:
        manifest: of this model.
        client: the process's PSClient.

    Raises:
        PSError: as PSClient.is_filled and PSClient.attach.
    """
    if client.is_filled():
        size = client.attach().bucket_bytes
    else:
        num_bytes = sum(group.nbytes for group in manifest.pushed_groups)
        size = bucket_bytes_for(num_bytes, client.num_servers)
    return msgspec.structs.replace(manifest, bucket_bytes=size)


def check_same(ours: Manifest, servers: Manifest) -> None:
    """Refuse servers that hold another model; names may differ, as Keras numbers layers.

    Args:
        ours: manifest of this worker's model.
        servers: manifest that the servers serve.
    """
    for field in ("consistency", "reduction", "staleness_bound", "staleness_aware"):
        if getattr(ours, field) != getattr(servers, field):
            raise UnsupportedModel(
                f"this worker distributes with {field}={getattr(ours, field)!r}, the parameter "
                f"servers run {getattr(servers, field)!r}; use the same on every worker"
            )
    if not servers.frozen_groups:  # they come with the chief's seed
        ours = ours.without_frozen()
    _check_same_tables(ours, servers)
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


def _check_same_tables(ours: Manifest, servers: Manifest) -> None:
    mine, theirs = ({spec.name: spec for spec in each.tables} for each in (ours, servers))
    if mine.keys() != theirs.keys():
        raise UnsupportedModel(
            f"this worker's model has the tables {sorted(mine)}, the parameter servers have "
            f"{sorted(theirs)}; build the same model on every worker, and name the tables, since "
            "Keras numbers layers anew in each process: Embedding(…, table='user')"
        )
    for name, spec in mine.items():
        if differing := differences(spec, theirs[name], spec.__struct_fields__):
            raise UnsupportedModel(
                f"table {name!r} of this worker's model and of the parameter servers differ: "
                f"{differing}; give its Embedding the same settings everywhere"
            )


def _summary(group: Any) -> tuple[Any, ...]:
    return group.name, group.dtype, group.rule, [param.shape for param in group.params]
