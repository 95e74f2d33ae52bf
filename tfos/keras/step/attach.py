"""Attaching a worker to the servers: they get or have its model, it takes their frozen weights.

Covers: the manifest that `ctx.distribute` asks for; seeding; the size of buckets; the comparison of
two manifests and its sentences; taking over frozen weights; what each rank's layers draw.
Does not: pull what trains (tfos.keras.step.exchange).
Threads: none of its own.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import keras
import msgspec
import numpy as np

from ps.client.retry import READY_TIMEOUT_S
from ps.manifest.diff import MAX_SHOWN
from ps.manifest.manifest import GroupSpec, Manifest
from ps.manifest.sharding import bucket_bytes_for
from ps.manifest.shares import shares
from ps.manifest.table_spec import LIMITS
from ps.protocol.messages import MAX_WAIT_S
from tfos.errors import UnsupportedModel
from tfos.keras.embedding import dense_embeddings
from tfos.keras.embedding.loading import Save
from tfos.keras.embedding.table_settings import differences
from tfos.keras.step import optimizers
from tfos.keras.step.adapted_layers import renewing_normalization
from tfos.keras.step.settings import Settings
from tfos.keras.step.table_specs import learn_id_sources
from tfos.keras.step.variables import VariableGroup, Variables

ATTACH_TIMEOUT_S = READY_TIMEOUT_S + 600.0
"""Seconds for the chief to seed the servers: its imports, data and first batch, then the wait for
the servers' kernels. They include sending the values to the servers and to all workers at once: 100
GB take 85 s at 10 Gb/s, and a step never moves more."""
_logger = logging.getLogger("tfos")
_AUTOMATIC = frozenset(name.lower() for name in dir(keras.layers))
"""The names that Keras gives layers, without underscores and numbers."""
_NUMBER = re.compile(r"_\d+$")
_REPEATED = re.compile(r"#\d+$")
_SEED_STATE = "seed_generator_state"
"""Keras' name for the variable of a `keras.random.SeedGenerator`: seed and number of draws."""
SLOW_BYTES_PER_S = 50e6
"""What a server moves at least, each way: less than half of 1 Gb/s."""


def limit_s(client: Any) -> float:
    """Return the most seconds in which the chief fills the servers, its own restore included.

    Args:
        client: the process's PSClient.
    """
    return ATTACH_TIMEOUT_S + max(0.0, float(client.restore_s) - READY_TIMEOUT_S)


def push_s(client: Any, num_workers: int) -> float:
    """Return the seconds in which a slow server takes and gives the values of all workers at once.

    Args:
        client: the process's PSClient, attached.
        num_workers: number of workers.
    """
    share_bytes = max(shares(client.manifest.without_frozen(), client.num_servers))
    return min(num_workers * share_bytes / SLOW_BYTES_PER_S, MAX_WAIT_S)


def attach(
    client: Any,
    model: Any,
    variables: Variables,
    settings: Settings,
    *,
    seeds: bool,
    save: Save,
) -> int | None:
    """Bind a built model to the servers, and take their frozen weights.

    Args:
        client: the process's PSClient.
        model: the compiled and built model.
        variables: the model's variables.
        settings: settings of `ctx.distribute`.
        seeds: whether this worker's values fill empty servers.
        save: see Save; called once servers that resume have other limits of tables.

    Returns:
        On the worker that seeds, the number of updates that the servers' values had before; else
        None.

    Raises:
        UnsupportedModel: the servers hold another model.
        SettingsError, UnsupportedModel: the settings do not fit the model.
        PSError: as for PSClient.seed and PSClient.attach.
    """
    optimizer = model.optimizer
    manifest = variables.manifest(
        optimizer,
        consistency=settings.consistency,
        reduction=settings.reduction,
        staleness_bound=settings.bound_for(optimizers.batches_per_update(optimizer)),
        staleness_aware=settings.divides_by_staleness(
            damps_itself=optimizers.damps_itself(optimizer)
        ),
        compression=settings.compression,
    )
    num_updates, timeout_s = None, limit_s(client)
    if seeds:
        dense_embeddings.warn_of_large(model)
        groups = (*variables.groups, *variables.frozen)
        served = served_by(client)
        manifest = as_served(manifest, served, client.num_servers)
        values = {group.name: group.values() for group in groups}
        num_updates = client.seed(manifest, values, timeout_s=timeout_s)
        if served is not None:
            _save_limits(manifest, served, save)
    adopted = client.attach(timeout_s=timeout_s)
    check_same(manifest, adopted)
    learn_id_sources(variables.embeddings, adopted.tables)
    manifest = msgspec.structs.replace(manifest, bucket_bytes=adopted.bucket_bytes)
    adopt_frozen(client, model, manifest, variables.frozen, timeout_s=timeout_s)
    return num_updates


def adopt_frozen(
    client: Any,
    model: Any,
    manifest: Manifest,
    groups: Sequence[VariableGroup],
    *,
    timeout_s: float,
) -> None:
    """Assign the servers' frozen weights to the model's variables.

    Args:
        client: the process's PSClient.
        model: the model.
        manifest: manifest of this model.
        groups: the model's frozen groups.
        timeout_s: seconds for the chief to seed them, if the servers' checkpoint had none.

    Raises:
        PSError: as for PSClient.pull_frozen.
    """
    import tensorflow as tf

    received = {group.name: np.empty(sum(group.sizes), group.dtype) for group in groups}
    client.pull_frozen(manifest, received, timeout_s=timeout_s)
    with renewing_normalization(model):
        for group in groups:
            group.assign(tf.constant(received.pop(group.name)))


def draw_apart(model: Any, rank: int) -> None:
    """Make the layers of this rank draw other numbers than those of rank 0, which do not change.

    A layer with a seed, or a program that sets one, has the same seed on all workers: each would
    drop the same units in all rows that are trained at once.

    Args:
        model: model whose seed generators may have the same state on all ranks.
        rank: rank of this worker, from 0; or another number, such as a fit's seed.
    """
    for variable in model.non_trainable_variables if rank else ():
        if variable.name == _SEED_STATE:
            seed, count = np.asarray(variable)
            own = np.random.SeedSequence([int(seed), rank]).generate_state(1)[0]
            variable.assign([own, count])


def served_by(client: Any) -> Manifest | None:
    """Return the manifest of filled servers; None: they are empty.

    Servers that lack part of a lost chief's seed count as empty: the next seed replaces it.

    Args:
        client: the process's PSClient.

    Raises:
        PSError: as for PSClient.is_filled and PSClient.attach.
    """
    return client.attach() if client.is_filled() else None


def as_served(manifest: Manifest, servers: Manifest | None, num_servers: int) -> Manifest:
    """Return the manifest with the buckets, names and seeds of filled servers, or its own.

    A restored checkpoint keeps its buckets, whatever the number of servers is now.

    Args:
        manifest: manifest of this model.
        servers: see served_by.
        num_servers: number of servers.
    """
    if servers is not None:
        groups = tuple(_named_as(group, servers.groups) for group in manifest.groups)
        named = msgspec.structs.replace(manifest, groups=groups, bucket_bytes=servers.bucket_bytes)
        return named.with_seeds_of(servers)
    num_bytes = sum(group.nbytes for group in manifest.pushed_groups)
    size = bucket_bytes_for(num_bytes, num_servers)
    return msgspec.structs.replace(manifest, bucket_bytes=size)


def _save_limits(manifest: Manifest, served: Manifest, save: Save) -> None:
    """Save the limits of tables that a resumed run has changed: a server that restarts reads them.

    Args:
        manifest: what the servers serve now.
        served: what they have restored.
        save: see Save.
    """
    before = {spec.name: spec for spec in served.tables}
    for spec in manifest.tables:
        if changed := differences(spec, before[spec.name], LIMITS):
            _logger.info("table %r of this run and of its checkpoint: %s", spec.name, changed)
    if manifest.limits_hash() != served.limits_hash() and (failed := save()):
        _logger.warning(
            "the new limits of tables are not saved: %s. A server that restarts before the next "
            "save has the checkpoint's",
            failed,
        )


def _named_as(ours: GroupSpec, served: Sequence[GroupSpec]) -> GroupSpec:
    """Return a group with the servers' names if they differ only in the names of outer layers.

    Keras calls a weight `sequential/dense/kernel` in a model that code has built, and
    `dense/kernel` in the same model loaded from a file.
    """
    theirs = next((each for each in served if each.name == ours.name), ours)
    is_same = len(theirs.params) == len(ours.params) and all(
        mine.shape == their.shape and _ends_alike(mine.name, their.name)
        for mine, their in zip(ours.params, theirs.params, strict=True)
    )
    return msgspec.structs.replace(ours, params=theirs.params) if is_same else ours


def _ends_alike(one: str, other: str) -> bool:
    """Return whether one path ends with the other, by whole parts."""
    return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}")


def check_same(ours: Manifest, servers: Manifest) -> None:
    """Refuse servers that hold another model; names may differ, as Keras numbers layers.

    Names that come in another order are refused; numbers that Keras gives do not count.

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
    if not servers.frozen_groups:  # the chief's seed brings them
        ours = ours.without_frozen()
    # The chief's limits count, and a run that resumes may change them after others have attached.
    _check_same_tables(ours.with_seeds_of(servers).with_limits_of(servers), servers)
    mine = [_summary(group) for group in ours.groups]
    theirs = [_summary(group) for group in servers.groups]
    if mine != theirs:
        differing = next(
            (pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]),
            (f"{len(mine)} groups", f"{len(theirs)} groups"),
        )
        raise UnsupportedModel(
            "the parameter servers already hold another model: this worker has "
            f"{differing[0]}, the servers have {differing[1]}. Build and compile the same model on "
            "every worker, one model per cluster"
        )
    for our, their in zip(ours.groups, servers.groups, strict=True):
        _check_same_order(our, their)
        if our.compression != their.compression:
            raise UnsupportedModel(
                f"this worker distributes with compression={our.compression!r}, the parameter "
                f"servers take {their.compression!r}; use the same on every worker"
            )


def _check_same_order(ours: GroupSpec, theirs: GroupSpec) -> None:
    """Refuse weights that trade places: each would hold another one's values."""
    mine, others = (_own_names(group) for group in (ours, theirs))
    if mine == others or sorted(mine) != sorted(others):
        return
    moved = [at for at, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]]
    here, there = ([each.params[at].name for at in moved[:MAX_SHOWN]] for each in (ours, theirs))
    raise UnsupportedModel(
        f"this worker's model has {here} where the parameter servers have {there}: the same "
        "weights in another order, so each would take another one's values. Run the same code "
        "everywhere, and make layers in a fixed order: sort a directory listing or a set before a "
        "loop that makes a layer for each"
    )


def _own_names(group: GroupSpec) -> list[list[str]]:
    """Return the names without the layers that all are in, and without Keras's numbers.

    It numbers layers in the order in which a process makes them; for the outer layers see
    `_named_as`.
    """
    paths = [list(map(_unnumbered, param.name.split("/"))) for param in group.params]
    levels = zip(*paths, strict=False)
    num_common = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    return [path[num_common:] for path in paths]


def _unnumbered(name: str) -> str:
    """Return a layer's name without the number, if Keras gave it: `dense_2`, but not `expert_2`."""
    name = _REPEATED.sub("", name)
    kind = _NUMBER.sub("", name)
    return kind if kind.replace("_", "") in _AUTOMATIC else name


def _check_same_tables(ours: Manifest, servers: Manifest) -> None:
    mine, theirs = ({spec.name: spec for spec in each.tables} for each in (ours, servers))
    if mine.keys() != theirs.keys():
        raise UnsupportedModel(
            f"this worker's model has the tables {sorted(mine)}, the parameter servers have "
            f"{sorted(theirs)}. Build the same model on every worker, and name the tables, because "
            "each process numbers its layers: Embedding(…, table='user')"
        )
    for name, spec in mine.items():
        if "any" in (spec.id_source, theirs[name].id_source):  # a layer that was not called yet
            spec = msgspec.structs.replace(spec, id_source=theirs[name].id_source)  # noqa: PLW2901
        if differing := differences(spec, theirs[name], spec.__struct_fields__):
            raise UnsupportedModel(
                f"table {name!r} of this worker's model and of the parameter servers differ: "
                f"{differing}; give its Embedding the same settings everywhere"
            )


def _summary(group: Any) -> tuple[Any, ...]:
    return group.name, group.dtype, group.rule, [param.shape for param in group.params]
