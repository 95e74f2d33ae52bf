"""Restore: the values of a committed checkpoint into a shard, or only a comparison of digests.

Covers: restoring, verifying, falling back to an older checkpoint, another model's refusal.
Does not: find steps (ps.checkpoint.reader), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from ps.checkpoint.digest import digest, refuse_nonfinite
from ps.checkpoint.format import (
    Checkpoint,
    bucket_nbytes,
    new_arrays,
)
from ps.checkpoint.reader import (
    ChainFiles,
    Root,
    ShardFile,
    complete_chains,
    load_chain,
    log_skipped,
    logger,
    none_complete,
    open_shards,
    read_manifest,
    steps_on_disk,
)
from ps.checkpoint.storage import Storage, if_sound, storage_at, typed_errors
from ps.checkpoint.table_reader import check_rows
from ps.errors import CheckpointError
from ps.manifest.manifest import Layout, Manifest
from ps.optim.row_rules import rule_of_rows
from ps.optim.rules import rule_of
from rpc.field_texts import with_field_texts

if TYPE_CHECKING:
    from ps.dense.shard import DenseShard

Array = np.ndarray[Any, Any]
Found = TypeVar("Found")


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


def check_restorable(root: Root, step: int | None, like: RestoreOptions) -> int:
    """Refuse what `find` refuses, as far as that is seen without reading values; those may be many.

    Returns the step that `find` would return if no value is damaged.

    Args:
        root: as `find`.
        step: as `find`.
        like: as `find`.

    Raises:
        CheckpointError: there is none, or the one that `find` would return is of another model.
    """
    if step is not None:
        return find(root, step, like)[0].step
    newest = read_newest(
        root, lambda chain: chain[0], strict=like.strict, job=like.job, is_told=False
    )
    try:
        _check_fits(newest, like)
    except CheckpointError:
        return find(root, None, like)[0].step  # it may be damaged, and an older one fit
    return newest.step


def manifest_to_serve(checkpoint: Checkpoint, like: RestoreOptions) -> Manifest:
    """Return what a server trains that is restored from a checkpoint.

    Without frozen groups if the checkpoint has none, as those of versions that did not keep them:
    they come with the next seed. Tables that name no seed keep the checkpoint's: their rows that do
    not exist yet would otherwise have other first values.

    Args:
        checkpoint: the one to restore.
        like: what was asked for.
    """
    asked = (like.manifest or checkpoint.manifest).with_seeds_of(checkpoint.manifest)
    return asked if checkpoint.manifest.frozen_groups else asked.without_frozen()


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
    _verified(storage, load_chain(storage, checkpoint.step))


def _verified(storage: Storage, chain: list[Checkpoint]) -> list[Checkpoint]:
    for each in chain:
        verify_files(storage, each)
    return chain


def verify_files(storage: Storage, checkpoint: Checkpoint) -> list[ShardFile]:
    """As `verify`, without the checkpoints that a delta needs; returns the step's files.

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


def newest_sound(root: Root, *, strict: bool = False, job: str | None = None) -> Checkpoint:
    """Return the newest checkpoint that `verify` accepts; as `read_newest`.

    Args:
        root: the checkpoint directory.
        strict: as of `read_newest`.
        job: as of `read_newest`.
    """
    storage = storage_at(root)
    return read_newest(root, lambda chain: _verified(storage, chain)[0], strict=strict, job=job)


def restore_newest(
    root: Root, like: RestoreOptions, restore: Callable[[Sequence[Checkpoint]], Found]
) -> Found:
    """Return what `restore` makes of the newest checkpoint that is whole; as `read_newest`.

    Servers that begin together take the same one, so each reads all files first. A server that is
    started again in a running job has nobody to agree with: the others live and hold what is newer.
    So its own files alone have to be whole, and `restore` reads these.

    Args:
        root: the checkpoint directory.
        like: what it has to fit; its `job` is that of a running one.
        restore: fills a server from a chain, newest first; raises CheckpointError where it is
            damaged.

    Raises:
        CheckpointError: there is none, or the newest whole one is of another model.
    """
    storage = storage_at(root)

    def read(chain: list[Checkpoint]) -> Found | CheckpointError:
        misfit: CheckpointError | None = None
        try:
            _check_fits(chain[0], like)
        except CheckpointError as error:
            misfit = error
        if misfit is not None or like.job is None:
            _verified(storage, chain)  # a damaged one of another model hides no older one
        return misfit or restore(chain)

    found = read_newest(root, read, strict=like.strict, job=like.job)
    if isinstance(found, CheckpointError):
        raise found
    return found


def read_newest(
    root: Root,
    read: Callable[[list[Checkpoint]], Found],
    *,
    strict: bool = False,
    job: str | None = None,
    is_told: bool = True,
) -> Found:
    """Return what `read` makes of the newest chain that it accepts; log why newer ones are skipped.

    A save that is committed meanwhile may remove the newest step, whose missing files are no
    damage: then it looks again, a few times. Where saves are faster than each look, the last one
    takes the newest that can be read.

    Args:
        root: the checkpoint directory.
        read: gets a chain, newest first; raises CheckpointError where it is damaged.
        strict: raise the error of the newest step instead of reading an older one.
        job: accept only this job's checkpoints; None: any.
        is_told: False: log nothing; another look that does will follow.

    Raises:
        CheckpointError: there is none, or the file system does not give a newer one's files, or
            saves have replaced the newest one faster than it could be read.
    """
    storage = storage_at(root)
    first = steps = steps_on_disk(storage)
    failure: CheckpointError | None = None
    for looks_left in reversed(range(MAX_LOOKS)):
        look = _Look(storage, steps, is_last=not looks_left, is_told=is_told)
        try:
            found = look.strictly(read) if strict and steps else look.through(read, job)
        except CheckpointError as error:
            if not look.is_overtaken():
                raise
            failure, found = error, None
        if found is not None:
            return found
        logger.info("%s: looking again, as newer steps were saved meanwhile", storage.where())
        steps = steps_on_disk(storage)
    raise CheckpointError(
        f"{storage.where()}: the newest step was {first[0]} at first and is {steps[0]} now: each "
        "was replaced before it was read. Save less often, keep more checkpoints (keep=...), or "
        "restore once nothing saves there"
    ) from failure


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at a directory in which somebody may save meanwhile."""

    storage: Storage
    steps: Sequence[int]
    """On disk when it began, newest first."""
    is_last: bool
    is_told: bool

    def is_overtaken(self) -> bool:
        """Whether a newer step is there by now, whose save may have removed others."""
        return steps_on_disk(self.storage)[:1] != list(self.steps[:1])

    def strictly(self, read: Callable[[list[Checkpoint]], Found]) -> Found:
        """Read the newest step or fail."""
        return read(load_chain(self.storage, self.steps[0]))

    def through(self, read: Callable[[list[Checkpoint]], Found], job: str | None) -> Found | None:
        """Read the newest chain that can be read; None: one would be taken for a newer one."""
        for chain in complete_chains(self.storage, is_told=self.is_told):
            newest = chain[0]
            if job not in (None, newest.job):
                continue
            if not self._may_take(newest):
                return None
            tell = functools.partial(log_skipped, self.storage, newest.step)
            found = if_sound(functools.partial(read, chain), tell if self.is_told else None)
            if found is None:
                continue
            if not self._may_take(newest):
                return None
            if self.is_told:
                _tell_newer(self.storage, newest.step, self.steps)
            return found
        raise none_complete(self.storage)

    def _may_take(self, checkpoint: Checkpoint) -> bool:
        """Whether all newer ones are damaged, and none was replaced while it was read."""
        return self.is_last or [checkpoint.step] == self.steps[:1] or not self.is_overtaken()


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
