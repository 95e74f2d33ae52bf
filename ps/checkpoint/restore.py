"""Restore: the values of a committed checkpoint into a shard, or only a comparison of digests.

Covers: restoring, verifying, another model's refusal.
Does not: choose the checkpoint (ps.checkpoint.choice), fill tables (ps.checkpoint.tables), import
numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from ps import codec
from ps.checkpoint.digest import digest, refuse_nonfinite
from ps.checkpoint.format import Checkpoint, bucket_nbytes, new_arrays
from ps.checkpoint.reader import ChainFiles, Root, ShardFile, load_chain, open_shards
from ps.checkpoint.storage import Storage, storage_at, typed_errors
from ps.checkpoint.tables.reader import check_rows
from ps.errors import CheckpointError
from ps.manifest.manifest import Layout, Manifest
from ps.optim.row_rules import rule_of_rows
from ps.optim.rules import rule_of
from rpc.errors import UNREADABLE

if TYPE_CHECKING:
    from ps.dense.shard import DenseShard

Array = np.ndarray[Any, Any]
Records = TypeVar("Records")


def restore_shard(chain: ChainFiles, shard: DenseShard, *, reset_optimizer: bool = False) -> None:
    """Load all buckets that `shard` owns, whichever servers saved them.

    Args:
        chain: the files of the checkpoint.
        shard: the shard to fill.
        reset_optimizer: restore the values only; slots and steps are reset, and rules may differ.

    Raises:
        CheckpointError: another model, or a damaged file; the shard may be partly loaded then and
            must not serve.
    """
    check_same_model(chain.newest.manifest, shard.manifest, reset_optimizer=reset_optimizer)
    wanted = {*shard.bucket_ids, *(bucket.id for bucket in shard.frozen.buckets)}
    for piece in read_values(chain, wanted):
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
    verified(storage, load_chain(storage, checkpoint.step))


def verified(storage: Storage, chain: list[Checkpoint]) -> list[Checkpoint]:
    """Return a chain as it is; raises as `verify`.

    Args:
        storage: the checkpoint root.
        chain: see `load_chain`.
    """
    for each in chain:
        verify_files(storage, each)
    return chain


def verify_files(storage: Storage, checkpoint: Checkpoint) -> list[ShardFile]:
    """Like `verify`, without the checkpoints that a delta needs; returns the step's files.

    Args:
        storage: the checkpoint root.
        checkpoint: the step to read.
    """
    files = open_shards(storage, checkpoint, Layout.whole(checkpoint.manifest))
    for file in files:
        for _ in _read_buckets(file, None):
            pass
        check_rows(file)
        read_extra(file)
    return files


class SavedBucket(NamedTuple):
    """One bucket as it was saved."""

    bucket_id: int
    step: int
    arrays: list[Array]
    """Values, then the slots in the rule's order."""


def read_values(chain: ChainFiles, wanted: set[int]) -> Iterator[SavedBucket]:
    """Yield the wanted buckets, each from the newest file of the chain that has it.

    Reading ends at the step that has the last of them.

    Args:
        chain: the files of the checkpoint.
        wanted: numbers of the buckets.

    Raises:
        CheckpointError: a file is damaged, or none has a bucket.
    """
    left = set(wanted)
    # Whoever dealt the buckets otherwise left some of them in other servers' files.
    for is_own in (True, False) if chain.is_own else (False,):
        for link in range(len(chain.steps)):
            if not left:
                return
            for file in chain.files(link, is_own=is_own):
                for piece in _read_buckets(file, left):
                    yield piece
                    left.discard(piece.bucket_id)
    if left:
        step = chain.newest.step
        raise CheckpointError(f"step {step} lacks bucket {min(left)} of {len(left)}")


def _read_buckets(file: ShardFile, wanted: set[int] | None) -> Iterator[SavedBucket]:
    """Yield the wanted buckets (None: all) of one file; check digests and finiteness."""
    index, layout, manifest = file.index, file.layout, file.checkpoint.manifest
    if wanted is not None and wanted.isdisjoint(index.bucket_ids):
        return
    num_pushed = len(layout.buckets) - len(Layout.frozen(manifest).buckets)
    with typed_errors(file.storage, file.name, "read"), file.storage.open(file.name) as data:
        position = 0
        for bucket_id, step, expected in zip(
            index.bucket_ids, index.steps, index.digests, strict=True
        ):
            if wanted is None or bucket_id in wanted:
                data.seek(position)
                arrays = new_arrays(layout, manifest, bucket_id)
                where = f"bucket {bucket_id}"
                _read_bucket(data, file.path, arrays, where, expected)
                if bucket_id < num_pushed:  # a frozen weight may be a mask of -inf
                    for array in arrays:
                        refuse_nonfinite(array, f"{file.path}: {where}")
                yield SavedBucket(bucket_id, step, arrays)
            position += bucket_nbytes(layout, manifest, bucket_id)


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


def read_extra(file: ShardFile) -> bytes:
    """Return the extra bytes that the server of this file saved."""
    index, record = file.index, file.record
    with typed_errors(file.storage, file.name, "read"), file.storage.open(file.name) as data:
        data.seek(record.nbytes - record.index_nbytes - index.extra_nbytes)
        extra = data.read(index.extra_nbytes)
    if digest(extra) != index.extra_digest:
        raise CheckpointError(
            f"{file.path} is damaged: the digest of its records is {digest(extra)}, "
            f"its index says {index.extra_digest}"
        )
    return extra


def read_records(file: ShardFile, kind: type[Records]) -> Records:
    """Return the extra bytes of this file as a struct; a reader names the fields that it needs.

    Args:
        file: file of one server.
        kind: a struct with some or all fields of what the server saved.

    Raises:
        CheckpointError: they are damaged, or of another kind.
    """
    try:
        return codec.msgpack(read_extra(file), kind)
    except UNREADABLE as error:
        raise CheckpointError(f"the records of ps:{file.rank} cannot be read: {error}") from error


def check_same_model(saved: Manifest, asked: Manifest, *, reset_optimizer: bool) -> None:
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
