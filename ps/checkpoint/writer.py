"""Writer of checkpoints: `write_shard` on every server, then `commit` once.

A save becomes a checkpoint by one rename, after all files and the manifest are on the disk, so
every `step-<n>` is complete. A crash before the rename leaves a `.tmp-` directory that no reader
opens.

Covers: writing (format: ps.checkpoint.format).      Does not: read (ps.checkpoint.reader), open
sockets, decide who saves and when, or import numba (clients commit).
Threads: any; a shard is copied one bucket at a time under that bucket's lock, so updates wait for
one bucket's copy at most. Without a snapshot an async file is consistent per
bucket only; in sync mode call it at a clock boundary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from ps.checkpoint.choice import best_first, complete_chains, passed_over_by, steps_on_disk
from ps.checkpoint.digest import MAX_COUNT, digest, refuse_nonfinite
from ps.checkpoint.format import (
    FORMAT,
    MANIFEST_NAME,
    Checkpoint,
    ShardIndex,
    ShardRecord,
    encode_manifest,
    new_arrays,
    staging_name,
    step_name,
)
from ps.checkpoint.reader import (
    Root,
    SeenSteps,
    check_sizes,
    is_there,
    load_chain,
    open_shards,
)
from ps.checkpoint.score import Score
from ps.checkpoint.storage import Storage, storage_at, typed_errors
from ps.checkpoint.tables.format import SegmentSource, segment_nbytes, write_segment
from ps.dense.frozen import FrozenValues
from ps.errors import CheckpointError
from ps.manifest.manifest import Bucket, Layout, Manifest

Array = np.ndarray[Any, Any]


class ShardSource(Protocol):
    """The interface of a shard to save: ps.dense.shard.DenseShard, or a snapshot of one."""

    manifest: Manifest
    buckets: tuple[Bucket, ...]
    frozen: FrozenValues

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket's values, then its slots, to `out`; return its step.

        Args:
            bucket_id: number of the bucket.
            out: [num_elements] each, as of `format.new_arrays`; filled.
        """


@dataclass(frozen=True, slots=True)
class Base:
    """Base of a delta: a committed checkpoint of the same servers."""

    step: int
    save_id: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a save: its job and its base."""

    job: str = ""
    """The cluster's id."""
    base: Base | None = None
    """Base of a delta; None: the shards hold every bucket."""
    passed_over: tuple[int, ...] = ()
    """See ps.checkpoint.format.Checkpoint."""
    score: Score | None = None


UNKNOWN_ORIGIN = Origin()


@dataclass(frozen=True, slots=True)
class Portion:
    """Part of a shard to write."""

    is_unchanged: Callable[[int], bool] = lambda _: False
    """Whether a delta's base has this bucket unchanged; called before each copy."""
    segments: Sequence[SegmentSource] = ()
    """Segments of every table, in the manifest's order; copied after the buckets."""


ALL_BUCKETS = Portion()


def write_shard(
    root: Root,
    save_id: str,
    *,
    rank: int,
    shard: ShardSource,
    extra: bytes | Callable[[], bytes] = b"",
    portion: Portion = ALL_BUCKETS,
) -> ShardRecord:
    """Write one server's file into the staging directory of a save; retrying overwrites it.

    Args:
        root: the checkpoint directory, the same for all servers.
        save_id: 1 to 64 of the characters 0-9 a-z -, new for each save; its shards and its commit
            share it.
        rank: rank of this server.
        shard: the shard to save.
        extra: the server's records (exactly-once, clocks), returned by `read_extra`. A callable is
            called after the last bucket and the last row were copied.
        portion: the buckets and tables to write.

    Raises:
        CheckpointError: disk full, no permission, or a parameter is not finite; nothing is left.
    """
    storage = storage_at(root)
    staging = staging_name(save_id)
    name = f"{staging}/ps-{rank}.data"
    with typed_errors(storage, name, "write"):
        try:
            with storage.create(name) as file:
                record = _write(file, save_id, rank, shard, extra, portion)
                storage.sync(file)
        except BaseException:
            storage.remove(name)
            with suppress(OSError):  # other servers' files keep it; `abort` removes those
                if not storage.names(staging):
                    storage.remove(staging)
            raise
    return record


def _write(
    file: BinaryIO,
    save_id: str,
    rank: int,
    shard: ShardSource,
    records: bytes | Callable[[], bytes],
    portion: Portion,
) -> ShardRecord:
    ids: list[int] = []
    steps: list[int] = []
    digests: list[str] = []
    num_bytes = 0
    manifest = shard.manifest
    layout = Layout.of(manifest)
    for bucket in shard.buckets:
        if portion.is_unchanged(bucket.id):
            continue
        copies = new_arrays(layout, manifest, bucket.id)
        ids.append(bucket.id)
        steps.append(shard.dump(bucket.id, copies))
        for array in copies:
            refuse_nonfinite(array, f"not saved: bucket {bucket.id} of group {bucket.group!r}")
        parts = [array.data.cast("B") for array in copies]
        digests.append(digest(*parts))
        for part in parts:
            num_bytes += file.write(part)
    for bucket, view in zip(shard.frozen.buckets, shard.frozen.views(), strict=True):
        if not portion.is_unchanged(bucket.id):
            ids.append(bucket.id)
            steps.append(0)
            digests.append(digest(view))
            num_bytes += file.write(view)
    tables = tuple(write_segment(file, segment) for segment in portion.segments)
    specs = manifest.tables
    num_bytes += sum(segment_nbytes(specs[record.table], record) for record in tables)
    extra = records() if callable(records) else records
    index = ShardIndex(
        save_id, tuple(ids), tuple(steps), tuple(digests), len(extra), digest(extra), tables
    )
    encoded = msgspec.msgpack.encode(index)
    num_bytes += file.write(extra) + file.write(encoded)
    return ShardRecord(rank, num_bytes, len(encoded), digest(encoded))


def commit(
    root: Root,
    save_id: str,
    *,
    step: int,
    manifest: Manifest,
    shards: Sequence[ShardRecord],
    origin: Origin = UNKNOWN_ORIGIN,
) -> str:
    """Make a save the checkpoint of `step`; repeating a commit is harmless.

    Args:
        root: the checkpoint directory.
        save_id: as in `write_shard`.
        step: number of the checkpoint.
        manifest: the manifest of the shards.
        shards: results of `write_shard` of all servers.
        origin: job of the save, and base of a delta.

    Returns:
        The path of the committed directory.

    Raises:
        CheckpointError: a shard's file is missing or of another size, the step exists already, the
            base does not exist or is of another model, or the disk fails. The save is not visible
            then; `abort` removes it.
    """
    if not 0 <= step <= MAX_COUNT:
        raise CheckpointError(f"a checkpoint's step is a number in 0..{MAX_COUNT}, got {step}")
    storage = storage_at(root)
    staging, target = staging_name(save_id), step_name(step)
    if _is_committed(storage, save_id, step, origin):
        return storage.where(target)
    base = origin.base
    if base is not None:
        _check_base(storage, base, step, manifest, origin.passed_over)
    checkpoint = Checkpoint(
        format=FORMAT,
        save_id=save_id,
        step=step,
        manifest=manifest,
        shards=tuple(sorted(shards, key=lambda shard: shard.rank)),
        job=origin.job,
        base=None if base is None else base.step,
        base_save_id="" if base is None else base.save_id,
        passed_over=origin.passed_over,
        score=origin.score,
    )
    name = f"{staging}/{MANIFEST_NAME}"
    with typed_errors(storage, name, "commit"):
        check_whole(storage, checkpoint)
        with storage.create(name) as file:  # last: its rename with the directory is the commit
            file.write(encode_manifest(checkpoint))
            storage.sync(file)
        storage.publish(staging, target)
    if base is not None:
        _refuse_without(storage, base, step)
    return storage.where(target)


def _is_committed(storage: Storage, save_id: str, step: int, origin: Origin) -> bool:
    """Whether this very save is the step already; refuses a step that another one is, or was."""
    if step in origin.passed_over:
        raise CheckpointError(
            f"step {step} was in {storage.where()} when this run went on from an older one; save "
            "another step"
        )
    target = step_name(step)
    with typed_errors(storage, "", "list"):
        names = storage.names()
    if target not in names:
        return False
    other = SeenSteps(storage).whole(step).save_id
    if other == save_id:
        return True
    raise CheckpointError(
        f"step {step} exists in {storage.where()} (save {other}); remove "
        f"{storage.where(target)} or save another step"
    )


def _check_base(
    storage: Storage, base: Base, step: int, manifest: Manifest, passed_over: Collection[int]
) -> None:
    if base.step in passed_over:
        raise CheckpointError(
            f"step {step} cannot add to step {base.step}: a server has resumed from an older one"
        )
    found = load_chain(storage, base.step)[0]
    if found.save_id != base.save_id or base.step >= step:
        raise CheckpointError(
            f"step {step} cannot add to save {base.save_id} of step {base.step}: there is save "
            f"{found.save_id}, and steps must grow"
        )
    ours, theirs = manifest, found.manifest
    if (ours.hash(), ours.frozen_hash()) != (theirs.hash(), theirs.frozen_hash()):
        raise CheckpointError(
            f"step {step} cannot add to step {base.step}, which is of another model: frozen "
            "weights came to the servers since; save again, with all parameters"
        )


def _refuse_without(storage: Storage, base: Base, step: int) -> None:
    """Take a step back whose base is gone, for which another saver's retention had no use."""
    if is_there(storage, base.step, base.save_id):
        return
    _remove(storage, step)
    raise CheckpointError(
        f"step {step} adds to step {base.step}, which another saver of this job has removed from "
        f"{storage.where()} since this save began. It is not committed; save again"
    )


def abort(root: Root, save_id: str) -> None:
    """Remove the files of a failed save; do nothing after its commit.

    Args:
        root: the checkpoint root.
        save_id: names the save.
    """
    storage_at(root).remove(staging_name(save_id))


def check_whole(storage: Storage, checkpoint: Checkpoint) -> None:
    """Check a save's files before its commit; reads the indexes, not the values.

    Args:
        storage: the checkpoint root.
        checkpoint: what is about to be committed.
    """
    staging = staging_name(checkpoint.save_id)
    check_sizes(storage, checkpoint, staging, _check_written)
    open_shards(storage, checkpoint, Layout.whole(checkpoint.manifest), staging)


def _check_written(storage: Storage, directory: str, shard: ShardRecord) -> None:
    name = f"{directory}/{shard.file_name}"
    try:
        size = storage.size(name)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot commit: {storage.where(name)}, which ps:{shard.rank} has written, is not "
            f"there for this host: hosts do not share {storage.where()}, or something removed the "
            "file. Name a directory on a file system that all hosts share"
        ) from error
    if size != shard.nbytes:
        raise CheckpointError(
            f"{storage.where(name)} has {size} bytes, its server wrote {shard.nbytes}"
        )


def keep_newest(root: Root, count: int, *, committed: int | None = None) -> list[int]:
    """Remove all but the newest `count` complete checkpoints, the best ones, and their bases.

    Of each metric by which checkpoints are scored the best complete one stays. Incomplete steps
    older than the newest complete one are removed too. The newest complete checkpoint is never
    removed, nor anything newer, nor anything more once another saver of the job has committed.

    Args:
        root: the checkpoint directory.
        count: number of checkpoints to keep, at least 1.
        committed: the step that was just saved. If it cannot be read now, nothing is removed,
            because its list of skipped steps is unknown.

    Returns:
        The steps that were removed.

    Raises:
        CheckpointError: the directory cannot be listed, `committed` is not the newest, or a
            manifest that exists cannot be read now: it may be the best one's. Nothing is removed
            then, or no more.
    """
    if count < 1:
        raise CheckpointError(f"at least 1 checkpoint is kept, asked for {count}")
    storage = storage_at(root)
    kept: set[int] = set()
    newest: int | None = None
    seen = SeenSteps(storage)
    steps = steps_on_disk(storage)  # before the look: what appears later is not judged
    for chain in itertools.islice(complete_chains(storage, seen=seen), count):
        newest = chain[0].step if newest is None else newest
        kept.update(each.step for each in chain)
    if committed is not None and newest != committed:
        raise CheckpointError(
            f"step {committed} was saved, the newest that can be read is {newest}"
        )
    if newest is None:
        return []
    known = seen.readable(steps)
    kept.update(_best_and_bases(seen, known))
    older = {step for step in steps if step < newest} | passed_over_by(known)
    removed = [step for step in steps if step in older and step not in kept]
    gone: list[int] = []
    # Newest first: a base goes after what adds to it, so a commit need only look at its own.
    for step in removed:
        if not set(steps).issuperset(steps_on_disk(storage)):
            break  # another saver of this job has committed: its step may add to any of these
        _remove(storage, step)
        gone.append(step)
    return gone


def _remove(storage: Storage, step: int) -> None:
    # The manifest first: a crash in between leaves a step that counts as incomplete.
    storage.remove(f"{step_name(step)}/{MANIFEST_NAME}")
    storage.remove(step_name(step))


def _best_and_bases(seen: SeenSteps, checkpoints: Sequence[Checkpoint]) -> set[int]:
    """Return the steps that the best complete checkpoint of each kind of score needs.

    With those that would be better, but are not complete now.
    """
    kept: set[int] = set()
    decided: set[tuple[str, bool]] = set()
    for each in best_first(checkpoints):
        if each.score is None or each.score.kind in decided:
            continue
        kept.add(each.step)
        with suppress(CheckpointError):
            kept.update(needed.step for needed in load_chain(seen.storage, each.step, seen))
            decided.add(each.score.kind)
    return kept
