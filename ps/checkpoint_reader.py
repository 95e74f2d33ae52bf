"""Finding, checking and restoring committed checkpoints; the counterpart of ps.checkpoint.

Nothing is believed: sizes are compared before memory is allocated, links are refused, and every
byte is covered by a digest, so a damaged file is named and never half believed.

Covers: reading of the files that ps.checkpoint_format describes.      Does not: write, import
numba (drivers and clients read manifests too).      Threads: none; every function stands alone.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from ps.checkpoint_format import (
    FORMAT,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    ShardIndex,
    ShardRecord,
    bucket_nbytes,
    decode_manifest,
    digest,
    new_arrays,
    refuse_nonfinite,
    root_path,
    step_of,
    step_path,
    typed_errors,
)
from ps.errors import CheckpointError
from ps.optimizers import rule_of
from ps.params import UNREADABLE, Layout, Manifest

if TYPE_CHECKING:
    from ps.dense import DenseShard

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


def open_regular(path: Path) -> int:
    """Open a file for reading; links, devices and pipes are refused.

    Raises:
        OSError: it does not exist, cannot be read, or is a link.
        CheckpointError: it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    return descriptor


def load_step(root: Path, step: int) -> Checkpoint:
    """Read the manifest of a step; check that every shard file is there with its size."""
    directory = step_path(root, step)
    path = directory / MANIFEST_NAME
    try:
        if directory.is_symlink():
            raise CheckpointError(f"{directory} is a link; a checkpoint is a directory")
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, the limit is {MAX_MANIFEST_BYTES}")
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"step {step} has no readable manifest: {error}") from error
    checkpoint = decode_manifest(data, path)
    if checkpoint.step != step:
        raise CheckpointError(f"{path} says step {checkpoint.step}, its directory step {step}")
    for shard in checkpoint.shards:
        _check_size(directory / shard.file_name, step, shard)
    return checkpoint


def _check_size(path: Path, step: int, shard: ShardRecord) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"step {step} lacks {path.name} (in manifest, not on disk)") from None
    except OSError as error:
        raise CheckpointError(f"step {step}: {path} cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if status.st_size != shard.nbytes:
        raise CheckpointError(
            f"{path} has {status.st_size} bytes, the manifest says {shard.nbytes}"
        )


def load_index(
    path: Path, shard: ShardRecord, checkpoint: Checkpoint, layout: Layout
) -> ShardIndex:
    """Read and check a shard's index: digest, bucket ids, and that all sizes add up."""
    if shard.index_nbytes > shard.nbytes:
        raise CheckpointError(
            f"{path}: an index of {shard.index_nbytes} bytes in a file of {shard.nbytes}"
        )
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(shard.nbytes - shard.index_nbytes)
            data = file.read(shard.index_nbytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest(data) != shard.index_digest:
        raise CheckpointError(
            f"{path}: the digest of its index is {digest(data)}, the manifest says "
            f"{shard.index_digest}; the file is damaged or of another save"
        )
    try:
        index = msgspec.msgpack.decode(data, type=ShardIndex)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} has no index of format {FORMAT}: {error}") from error
    count = len(index.bucket_ids)
    if len(index.steps) != count or len(index.digests) != count:
        raise CheckpointError(
            f"{path}: {count} buckets, {len(index.steps)} steps, {len(index.digests)} digests"
        )
    last = max(index.bucket_ids, default=-1)
    if last >= len(layout.buckets):
        raise CheckpointError(f"{path}: bucket {last}, the manifest has {len(layout.buckets)}")
    sizes = [bucket_nbytes(layout, checkpoint.manifest, i) for i in index.bucket_ids]
    expected = sum(sizes) + index.extra_nbytes + shard.index_nbytes
    if expected != shard.nbytes:
        raise CheckpointError(f"{path}: its parts make {expected} bytes, it has {shard.nbytes}")
    return index


def steps_on_disk(root: Path) -> list[int]:
    """Return the steps that have a directory, newest first; they need not be complete."""
    try:
        names = [entry.name for entry in root.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error}") from error
    steps = (step_of(name) for name in names)
    return sorted((step for step in steps if step is not None), reverse=True)


def complete_steps(root: Path) -> Iterator[int]:
    """Yield the steps whose manifest and files are whole, newest first; log why others are not."""
    for step in steps_on_disk(root):
        try:
            load_step(root, step)
        except CheckpointError as error:
            logger.warning("checkpoint step %d in %s is skipped: %s", step, root, error)
            continue
        yield step


def latest(root: str | Path) -> int | None:
    """Return the newest complete step, or None."""
    return next(complete_steps(root_path(root)), None)


def read_manifest(root: str | Path, step: int | None = None) -> Checkpoint:
    """Return the manifest of a step, or of the newest complete one.

    Raises:
        CheckpointError: the step is missing or incomplete (the message names the newest complete
            one), or no step is complete.
    """
    base = root_path(root)
    if step is None:
        step = latest(base)
        if step is None:
            raise _none_complete(base)
        return load_step(base, step)
    try:
        return load_step(base, step)
    except CheckpointError as error:
        newest = latest(base)
        hint = "none is complete" if newest is None else f"newest complete step is {newest}"
        raise CheckpointError(f"{error}; {hint}") from error


def _none_complete(base: Path) -> CheckpointError:
    seen = ", ".join(map(str, steps_on_disk(base))) or "none"
    return CheckpointError(f"no complete checkpoint in {base}; steps on disk: {seen}")


def load_indexes(checkpoint: Checkpoint, directory: Path) -> list[tuple[Path, ShardIndex]]:
    """Read all shards' indexes; check that they hold each bucket exactly once."""
    layout = Layout.of(checkpoint.manifest)
    found: list[tuple[Path, ShardIndex]] = []
    owners: dict[int, Path] = {}
    for shard in checkpoint.shards:
        path = directory / shard.file_name
        index = load_index(path, shard, checkpoint, layout)
        for bucket_id in index.bucket_ids:
            if bucket_id in owners:
                raise CheckpointError(
                    f"bucket {bucket_id} is in {owners[bucket_id].name} and in {path.name}"
                )
            owners[bucket_id] = path
        found.append((path, index))
    missing = len(layout.buckets) - len(owners)
    if missing:
        first = min(set(range(len(layout.buckets))) - set(owners))
        raise CheckpointError(
            f"{directory} lacks {missing} of {len(layout.buckets)} buckets, the first is {first}"
        )
    return found


def restore_shard(root: str | Path, checkpoint: Checkpoint, shard: DenseShard) -> None:
    """Load all buckets that `shard` owns, whichever servers saved them.

    Raises:
        CheckpointError: another model, or a damaged file; the shard may be half loaded then and
            must not serve.
    """
    check_same_model(checkpoint.manifest, shard.manifest)
    for piece in _read_buckets(root, checkpoint, set(shard.bucket_ids)):
        shard.load(piece.bucket_id, piece.arrays[0], piece.arrays[1:], piece.step)


def verify(root: str | Path, checkpoint: Checkpoint) -> None:
    """Read everything and compare all digests, one bucket in memory at a time.

    Raises:
        CheckpointError: names the first damaged file.
    """
    for _ in _read_buckets(root, checkpoint, None):
        pass
    for shard in checkpoint.shards:
        read_extra(root, checkpoint, shard.rank)


def newest_sound(root: str | Path) -> Checkpoint:
    """Return the newest checkpoint that `verify` passes; log why newer ones are left out.

    Raises:
        CheckpointError: there is none.
    """
    base = root_path(root)
    for step in complete_steps(base):
        checkpoint = load_step(base, step)
        try:
            verify(base, checkpoint)
        except CheckpointError as error:
            logger.warning("checkpoint step %d in %s is skipped: %s", step, base, error)
            continue
        return checkpoint
    raise _none_complete(base)


class _Piece(NamedTuple):
    bucket_id: int
    step: int
    arrays: list[Array]


def _read_buckets(
    root: str | Path, checkpoint: Checkpoint, wanted: set[int] | None
) -> Iterator[_Piece]:
    """Yield the wanted buckets (None: all), each compared with its digest and finite."""
    directory = step_path(root_path(root), checkpoint.step)
    layout = Layout.of(checkpoint.manifest)
    for path, index in load_indexes(checkpoint, directory):
        if wanted is not None and wanted.isdisjoint(index.bucket_ids):
            continue
        with typed_errors(path, "read"), os.fdopen(open_regular(path), "rb") as file:
            position = 0
            rows = zip(index.bucket_ids, index.steps, index.digests, strict=True)
            for bucket_id, step, expected in rows:
                if wanted is None or bucket_id in wanted:
                    file.seek(position)
                    arrays = new_arrays(layout, checkpoint.manifest, bucket_id)
                    _read_bucket(file, path, arrays, f"bucket {bucket_id}", expected)
                    yield _Piece(bucket_id, step, arrays)
                position += bucket_nbytes(layout, checkpoint.manifest, bucket_id)


def _read_bucket(
    file: BufferedReader, path: Path, arrays: list[Array], name: str, expected: str
) -> None:
    position = file.tell()
    parts = [array.data.cast("B") for array in arrays]
    if any(file.readinto(part) != len(part) for part in parts):
        raise CheckpointError(f"{path} ends inside {name}, which starts at byte {position}")
    if digest(*parts) != expected:
        raise CheckpointError(
            f"{path} is damaged: the digest of {name} (from byte {position}) is "
            f"{digest(*parts)}, its index says {expected}"
        )
    for array in arrays:
        refuse_nonfinite(array, f"{path}: {name}")


def read_extra(root: str | Path, checkpoint: Checkpoint, rank: int) -> bytes:
    """Return the extra bytes that the server of this rank saved."""
    directory = step_path(root_path(root), checkpoint.step)
    if not 0 <= rank < len(checkpoint.shards):
        raise CheckpointError(f"{directory} has {len(checkpoint.shards)} shards, asked for {rank}")
    shard = checkpoint.shards[rank]
    path = directory / shard.file_name
    index = load_index(path, shard, checkpoint, Layout.of(checkpoint.manifest))
    with typed_errors(path, "read"), os.fdopen(open_regular(path), "rb") as file:
        file.seek(shard.nbytes - shard.index_nbytes - index.extra_nbytes)
        extra = file.read(index.extra_nbytes)
    if digest(extra) != index.extra_digest:
        raise CheckpointError(
            f"{path} is damaged: the digest of its records is {digest(extra)}, "
            f"its index says {index.extra_digest}"
        )
    return extra


def check_same_model(saved: Manifest, asked: Manifest) -> None:
    """Refuse a checkpoint of other parameters or rules; settings of a rule may differ."""
    if saved.bucket_bytes != asked.bucket_bytes:
        raise CheckpointError(
            f"saved with bucket_bytes={saved.bucket_bytes}, asked {asked.bucket_bytes}; "
            "use the saved value"
        )
    old, new = _description(saved), _description(asked)
    if old == new:
        return
    only_old = [line for line in old if line not in new][:5]
    only_new = [line for line in new if line not in old][:5]
    raise CheckpointError(
        "the checkpoint is of another model. Only saved: "
        f"{'; '.join(only_old) or 'nothing'}. Only asked: {'; '.join(only_new) or 'nothing'}"
        f"{'' if only_old or only_new else '. The order of parameters differs'}"
    )


def _description(manifest: Manifest) -> list[str]:
    lines: list[str] = []
    for group in manifest.groups:
        rule = rule_of(group.rule)
        lines.append(f"group {group.name} {rule.name}({', '.join(rule.slots)})")
        lines += [f"{group.name}/{p.name} {group.dtype}{list(p.shape)}" for p in group.params]
    return lines
