"""Restore: the values of a committed checkpoint into a shard, or only a comparison of digests.

Covers: restoring, verifying, falling back to an older checkpoint, another model's refusal.
Does not: find steps (ps.checkpoint.reader), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from ps.checkpoint.digest import digest, refuse_nonfinite
from ps.checkpoint.format import (
    Checkpoint,
    bucket_nbytes,
    new_arrays,
    step_name,
)
from ps.checkpoint.reader import (
    Root,
    complete_chains,
    load_chain,
    load_index,
    load_indexes,
    log_skipped,
    logger,
    none_complete,
    read_manifest,
    steps_on_disk,
)
from ps.checkpoint.storage import Storage, if_sound, storage_at, typed_errors
from ps.checkpoint.table_reader import check_step_rows
from ps.errors import CheckpointError
from ps.manifest.manifest import Layout, Manifest
from ps.optim.row_rules import rule_of_rows
from ps.optim.rules import rule_of
from rpc.field_texts import with_field_texts

if TYPE_CHECKING:
    from ps.dense.shard import DenseShard

Array = np.ndarray[Any, Any]


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a restore."""

    manifest: Manifest | None = None
    """The manifest to restore for; None: the saved one. Settings of a rule may differ from the
    saved ones, parameters and rules may not."""
    reset_optimizer: bool = False
    """Restore the values only: slots and steps are reset, and the rules may differ."""
    strict: bool = False
    """Fail if the newest step is damaged, instead of taking the newest one that is whole."""
    job: str | None = None
    """Only checkpoints of this job; None: of any job."""


AS_SAVED = RestoreOptions()
MAX_LOOKS = 4
"""At the steps, each of which is the newest one when its files are read."""


def find(root: Root, step: int | None, like: RestoreOptions) -> tuple[Checkpoint, Manifest]:
    """Return the checkpoint to restore, and the manifest to restore it for.

    Args:
        root: the checkpoint root.
        step: number of the step; None: the newest one that can be restored.
        like: what the checkpoint has to fit.

    Raises:
        CheckpointError: there is none, or the requested one is damaged or of another model.
    """
    if step is None:
        found = newest_sound(root, strict=like.strict, job=like.job)
    else:
        found = read_manifest(root, step)
    return found, _check_fits(found, like)


def _check_fits(found: Checkpoint, like: RestoreOptions) -> Manifest:
    manifest = manifest_to_serve(found, like)
    check_same_model(found.manifest, manifest, reset_optimizer=like.reset_optimizer)
    return manifest


def check_restorable(root: Root, step: int | None, like: RestoreOptions) -> None:
    """Refuse what `find` refuses, as far as that is seen without reading values; those may be many.

    Args:
        root: as `find`.
        step: as `find`.
        like: as `find`.

    Raises:
        CheckpointError: there is none, or the one that `find` would return is of another model.
    """
    storage = storage_at(root)
    steps = steps_on_disk(storage)
    if step is not None or not steps:
        find(root, step, like)
        return
    if like.strict:
        newest = load_chain(storage, steps[0])[0]
    else:
        chains = complete_chains(storage, is_told=False)
        found = next((each for each, *_ in chains if like.job in (None, each.job)), None)
        if found is None:
            raise none_complete(storage)
        newest = found
    try:
        _check_fits(newest, like)
    except CheckpointError:
        find(root, None, like)  # it may be damaged, and an older one fit


def manifest_to_serve(checkpoint: Checkpoint, like: RestoreOptions) -> Manifest:
    """Return what a server trains that is restored from a checkpoint.

    Without frozen groups if the checkpoint has none, as those of versions that did not keep them:
    they come with the next seed.

    Args:
        checkpoint: the one to restore.
        like: what was asked for.
    """
    asked = like.manifest or checkpoint.manifest
    return asked if checkpoint.manifest.frozen_groups else asked.without_frozen()


def restore_shard(
    root: Root, checkpoint: Checkpoint, shard: DenseShard, *, reset_optimizer: bool = False
) -> None:
    """Load all buckets that `shard` owns, whichever servers saved them.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        shard: the shard to fill.
        reset_optimizer: restore the values only; slots and steps are reset, and rules may differ.

    Raises:
        CheckpointError: another model, or a damaged file; the shard may be partly loaded then and
            must not serve.
    """
    check_same_model(checkpoint.manifest, shard.manifest, reset_optimizer=reset_optimizer)
    wanted = {*shard.bucket_ids, *(bucket.id for bucket in shard.frozen.buckets)}
    for piece in read_values(root, checkpoint, wanted):
        if piece.bucket_id in shard.frozen:
            shard.frozen.load(piece.bucket_id, piece.arrays[0])
        elif reset_optimizer:
            shard.set_values(piece.bucket_id, piece.arrays[0])
        else:
            shard.load(piece.bucket_id, piece.arrays[0], piece.arrays[1:], piece.step)


def verify(root: Root, checkpoint: Checkpoint) -> None:
    """Read everything and compare all digests, one bucket or piece of a table in memory at a time.

    Args:
        root: the checkpoint root.
        checkpoint: a step, read with the steps that it needs.

    Raises:
        CheckpointError: names the first damaged file.
    """
    storage = storage_at(root)
    _verified(storage, load_chain(storage, checkpoint.step))


def _verified(storage: Storage, chain: list[Checkpoint]) -> list[Checkpoint]:
    for each in chain:
        verify_files(storage, each)
    return chain


def verify_files(storage: Storage, checkpoint: Checkpoint) -> None:
    """As `verify`, without the checkpoints that a delta needs.

    Args:
        storage: the checkpoint root.
        checkpoint: the step to read.
    """
    for _ in _read_buckets(storage, checkpoint, None):
        pass
    check_step_rows(storage, checkpoint)
    for shard in checkpoint.shards:
        read_extra(storage, checkpoint, shard.rank)


def newest_sound(root: Root, *, strict: bool = False, job: str | None = None) -> Checkpoint:
    """Return the newest checkpoint that `verify` accepts; log why newer ones are skipped.

    A save that is committed meanwhile may remove the newest one, whose missing files are no damage:
    then it looks again, a few times. Where saves are faster than each look, it takes the newest
    that it has found sound.

    Args:
        root: the checkpoint directory.
        strict: raise the error of the newest step instead of restoring an older one.
        job: accept only this job's checkpoints; None: any.

    Raises:
        CheckpointError: there is none, or the file system does not give a newer one's files, or
            saves have replaced the newest one faster than it could be read.
    """
    storage = storage_at(root)
    first = steps = steps_on_disk(storage)
    sound: Checkpoint | None = None
    failure: CheckpointError | None = None
    for look in range(MAX_LOOKS):
        steps = steps_on_disk(storage) if look else first
        try:
            sound = _newest_sound(storage, steps, strict=strict, job=job)
        except CheckpointError as error:
            if steps_on_disk(storage)[:1] == steps[:1]:
                raise
            failure = error
        else:
            if steps[:1] == [sound.step] or steps_on_disk(storage)[:1] == steps[:1]:
                break
        logger.info("%s: looking again, as newer steps were saved meanwhile", storage.where())
    if sound is None:
        raise CheckpointError(
            f"{storage.where()}: the newest step was {first[0]} at first and is "
            f"{steps_on_disk(storage)[0]} now: each was replaced before it was read. Save less "
            "often, keep more checkpoints (keep=...), or restore once nothing saves there"
        ) from failure
    _tell_newer(storage, sound.step, steps)
    return sound


def _newest_sound(
    storage: Storage, steps: Sequence[int], *, strict: bool, job: str | None
) -> Checkpoint:
    """As `newest_sound`, of these steps. Raises as that."""
    if strict and steps:
        return _verified(storage, load_chain(storage, steps[0]))[0]
    for chain in complete_chains(storage):
        newest = chain[0]
        if job is not None and newest.job != job:
            continue
        tell = functools.partial(log_skipped, storage, newest.step)
        if if_sound(functools.partial(_verified, storage, chain), tell) is not None:
            return newest
    raise none_complete(storage)


def _tell_newer(storage: Storage, taken: int, steps: Sequence[int]) -> None:
    """Log which newer steps are skipped; they may become readable again later."""
    newer = [step for step in steps if step > taken]
    if newer:
        logger.warning(
            "%s: step %d is taken, not step %s, which is newer by its number: what was trained "
            "between them is not part of it. Checkpoints that are saved from here on say so, and "
            "later restores prefer them; step=%d takes the other one",
            storage.where(),
            taken,
            ", ".join(map(str, newer[:5])),
            newer[0],
        )


class SavedBucket(NamedTuple):
    """One bucket as it was saved."""

    bucket_id: int
    step: int
    arrays: list[Array]
    """Values, then the slots in the rule's order."""


def read_values(root: Root, checkpoint: Checkpoint, wanted: set[int]) -> Iterator[SavedBucket]:
    """Yield the wanted buckets, each from the newest file of the chain that has it.

    Args:
        root: the checkpoint root.
        checkpoint: the newest step of the chain.
        wanted: numbers of the buckets.

    Raises:
        CheckpointError: a file is damaged, or none has a bucket.
    """
    storage = storage_at(root)
    left = set(wanted)
    for each in load_chain(storage, checkpoint.step):
        for piece in _read_buckets(storage, each, left):
            yield piece
            left.discard(piece.bucket_id)
    if left:
        raise CheckpointError(f"step {checkpoint.step} lacks bucket {min(left)} of {len(left)}")


def _read_buckets(
    storage: Storage, checkpoint: Checkpoint, wanted: set[int] | None
) -> Iterator[SavedBucket]:
    """Yield the wanted buckets (None: all) of one step; check digests and finiteness."""
    layout = Layout.whole(checkpoint.manifest)
    num_pushed = len(Layout.of(checkpoint.manifest).buckets)
    for name, index in load_indexes(storage, checkpoint):
        if wanted is not None and wanted.isdisjoint(index.bucket_ids):
            continue
        with typed_errors(storage, name, "read"), storage.open(name) as file:
            position = 0
            rows = zip(index.bucket_ids, index.steps, index.digests, strict=True)
            for bucket_id, step, expected in rows:
                if wanted is None or bucket_id in wanted:
                    file.seek(position)
                    arrays = new_arrays(layout, checkpoint.manifest, bucket_id)
                    path, where = storage.where(name), f"bucket {bucket_id}"
                    _read_bucket(file, path, arrays, where, expected)
                    if bucket_id < num_pushed:  # a frozen weight may be a mask of -inf
                        for array in arrays:
                            refuse_nonfinite(array, f"{path}: {where}")
                    yield SavedBucket(bucket_id, step, arrays)
                position += bucket_nbytes(layout, checkpoint.manifest, bucket_id)


def _read_bucket(file: BinaryIO, path: str, arrays: list[Array], name: str, expected: str) -> None:
    position = file.tell()
    parts = [array.data.cast("B") for array in arrays]
    if any(_read_exactly(file, part) != len(part) for part in parts):
        raise CheckpointError(f"{path} ends inside {name}, which starts at byte {position}")
    if digest(*parts) != expected:
        raise CheckpointError(
            f"{path} is damaged: the digest of {name} (from byte {position}) is "
            f"{digest(*parts)}, its index says {expected}"
        )


def _read_exactly(file: BinaryIO, into: memoryview) -> int:
    data = file.read(len(into))
    into[: len(data)] = data
    return len(data)


def read_extra(root: Root, checkpoint: Checkpoint, rank: int) -> bytes:
    """Return the extra bytes that the server of this rank saved.

    Args:
        root: the checkpoint root.
        checkpoint: the step to read.
        rank: of the server that saved.
    """
    storage = storage_at(root)
    directory = step_name(checkpoint.step)
    if not 0 <= rank < len(checkpoint.shards):
        raise CheckpointError(
            f"{storage.where(directory)} has {len(checkpoint.shards)} shards, asked for {rank}"
        )
    shard = checkpoint.shards[rank]
    name = f"{directory}/{shard.file_name}"
    path = storage.where(name)
    index = load_index(storage, shard, checkpoint, Layout.whole(checkpoint.manifest), directory)
    with typed_errors(storage, name, "read"), storage.open(name) as file:
        file.seek(shard.nbytes - shard.index_nbytes - index.extra_nbytes)
        extra = file.read(index.extra_nbytes)
    if digest(extra) != index.extra_digest:
        raise CheckpointError(
            f"{path} is damaged: the digest of its records is {digest(extra)}, "
            f"its index says {index.extra_digest}"
        )
    return extra


def check_same_model(saved: Manifest, asked: Manifest, *, reset_optimizer: bool = False) -> None:
    """Refuse a checkpoint of other parameters or rules; settings of a rule may differ.

    Args:
        saved: manifest of the checkpoint.
        asked: manifest to restore for.
        reset_optimizer: the rules may differ as well: their slots are not restored.
    """
    if saved.bucket_bytes != asked.bucket_bytes:
        raise CheckpointError(
            f"saved with bucket_bytes={saved.bucket_bytes}, asked {asked.bucket_bytes}; "
            "use the saved value"
        )
    old = _description(saved, with_rules=not reset_optimizer)
    new = _description(asked, with_rules=not reset_optimizer)
    if old == new:
        return
    only_old = [line for line in old if line not in new][:5]
    only_new = [line for line in new if line not in old][:5]
    is_rule = only_old and all(
        line.startswith(("group ", "rule of table ")) for line in [*only_old, *only_new]
    )
    raise CheckpointError(
        "the checkpoint is of another model. Only saved: "
        f"{'; '.join(only_old) or 'nothing'}. Only asked: {'; '.join(only_new) or 'nothing'}"
        f"{'' if only_old or only_new else '. The order of parameters differs'}"
        f"{'. reset_optimizer=True takes the values and drops the slots' if is_rule else ''}"
    )


def _description(manifest: Manifest, *, with_rules: bool) -> list[str]:
    lines: list[str] = []
    for group in manifest.groups:
        rule = rule_of(group.rule)
        if with_rules:
            lines.append(f"group {group.name} {rule.name}({', '.join(rule.kept)})")
        lines += [f"{group.name}/{p.name} {group.dtype}{list(p.shape)}" for p in group.params]
    for table in manifest.tables:
        if with_rules:
            rule = rule_of_rows(table)
            kept = ", ".join((*rule.slots, *rule.row_slots))
            lines.append(f"rule of table {table.name} {rule.name}({kept})")
        lines.append(
            f"table {table.name} {table.dtype}[{table.dim}] of {table.id_kind} ids, "
            f"{table.initializer}, seed {table.seed}"
        )
    return lines
