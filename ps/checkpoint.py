"""Saving: `write_shard` on every server, then `commit` once.

A save becomes a checkpoint by one rename, after all files and the manifest are on the disk, so
whatever is found under `step-<n>` was complete; a crash before it leaves a `.tmp-` directory that
nobody reads.

Covers: writing (format: ps.checkpoint_format).      Does not: read (ps.checkpoint_reader), open
sockets, decide who saves and when, or import numba (clients commit).
Threads: any; a shard is copied one bucket at a time under that bucket's lock, so updates wait for
one bucket's copy at most. In async mode a file therefore is a cut per bucket, torn by the pushes in
flight; in sync mode call it at a clock boundary.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np

from ps.checkpoint_format import (
    FORMAT,
    MANIFEST_NAME,
    Checkpoint,
    ShardIndex,
    ShardRecord,
    digest,
    encode_manifest,
    new_arrays,
    refuse_nonfinite,
    root_path,
    staging_path,
    step_path,
    typed_errors,
)
from ps.checkpoint_reader import load_indexes, load_step
from ps.errors import CheckpointError
from ps.params import Bucket, Layout, Manifest

Array = np.ndarray[Any, Any]


_CREATE_ATTEMPTS = 10


class ShardSource(Protocol):
    """What is saved: a ps.dense.DenseShard, or something that copies like one."""

    manifest: Manifest
    layout: Layout
    buckets: tuple[Bucket, ...]

    @property
    def bucket_ids(self) -> tuple[int, ...]:
        """Ids of the buckets, ascending."""

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket's values, then its slots, to `out`; return its step."""


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def _create_in(staging: Path, path: Path) -> BinaryIO:
    """Create the file and its directory, which a server whose own part fails may remove."""
    for _ in range(_CREATE_ATTEMPTS):
        with suppress(FileNotFoundError, FileExistsError):
            staging.mkdir(parents=True, exist_ok=True)
            return _create(path)
    return _create(path)


def write_shard(
    root: str | Path,
    save_id: str,
    *,
    rank: int,
    shard: ShardSource,
    extra: bytes | Callable[[], bytes] = b"",
) -> ShardRecord:
    """Write one server's file into the staging directory of a save; retrying overwrites it.

    Args:
        root: the checkpoint directory, the same for all servers.
        save_id: 1 to 64 of the characters 0-9 a-z -, new for each save; its shards and its commit
            share it.
        rank: this server.
        shard: what to save.
        extra: the server's own records (exactly-once, clocks), returned by `read_extra`. A callable
            is asked after the last bucket was copied.

    Raises:
        CheckpointError: disk full, no permission, or a parameter is not finite; nothing is left.
    """
    staging = staging_path(root_path(root), save_id)
    path = staging / f"ps-{rank}.data"
    with typed_errors(path, "write"):
        try:
            with _create_in(staging, path) as file:
                record = _write(file, save_id, rank, shard, extra)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # other servers' files keep it; `abort` removes those
                staging.rmdir()
            raise
    return record


def _write(
    file: BinaryIO,
    save_id: str,
    rank: int,
    shard: ShardSource,
    records: bytes | Callable[[], bytes],
) -> ShardRecord:
    steps: list[int] = []
    digests: list[str] = []
    num_bytes = 0
    for bucket in shard.buckets:
        copies = new_arrays(shard.layout, shard.manifest, bucket.id)
        steps.append(shard.dump(bucket.id, copies))
        for array in copies:
            refuse_nonfinite(array, f"not saved: bucket {bucket.id} of group {bucket.group!r}")
        parts = [array.data.cast("B") for array in copies]
        digests.append(digest(*parts))
        for part in parts:
            num_bytes += file.write(part)
    extra = records() if callable(records) else records
    index = ShardIndex(
        save_id, shard.bucket_ids, tuple(steps), tuple(digests), len(extra), digest(extra)
    )
    encoded = msgspec.msgpack.encode(index)
    num_bytes += file.write(extra) + file.write(encoded)
    return ShardRecord(rank, num_bytes, len(encoded), digest(encoded))


def commit(
    root: str | Path,
    save_id: str,
    *,
    step: int,
    manifest: Manifest,
    shards: Sequence[ShardRecord],
) -> Path:
    """Make a save the checkpoint of `step`; repeating a commit is harmless.

    Raises:
        CheckpointError: a shard's file is missing or of another size, the step exists already, or
            the disk fails. The save is not visible then; `abort` removes it.
    """
    base = root_path(root)
    staging, target = staging_path(base, save_id), step_path(base, step)
    if target.exists() or target.is_symlink():
        other = load_step(base, step).save_id
        if other == save_id:
            return target
        raise CheckpointError(
            f"step {step} exists in {base} (save {other}); remove {target} or save another step"
        )
    ordered = tuple(sorted(shards, key=lambda shard: shard.rank))
    checkpoint = Checkpoint(
        format=FORMAT, save_id=save_id, step=step, manifest=manifest, shards=ordered
    )
    path = staging / MANIFEST_NAME
    with typed_errors(path, "commit"):
        check_whole(checkpoint, staging)
        with _create(path) as file:  # last: its rename with the directory is the commit
            file.write(encode_manifest(checkpoint))
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(staging)
        staging.rename(target)
        _sync_directory(base)
    return target


def abort(root: str | Path, save_id: str) -> None:
    """Remove what a failed save left; does nothing after its commit."""
    shutil.rmtree(staging_path(root_path(root), save_id), ignore_errors=True)


def check_whole(checkpoint: Checkpoint, directory: Path) -> None:
    """Check that the files hold each bucket exactly once; reads the indexes, not the values."""
    for shard in checkpoint.shards:
        path = directory / shard.file_name
        size = path.stat().st_size
        if size != shard.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, its server wrote {shard.nbytes}")
    load_indexes(checkpoint, directory)
