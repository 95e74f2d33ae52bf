"""Reader of a committed checkpoint: its manifest, its indexes and the steps that it needs.

The reader trusts no file: it compares sizes before it allocates memory, refuses links, and checks a
digest of every byte. So an error names a damaged file, and no part of it is used.

Covers: manifests, indexes, sizes, the chain from a delta to its full checkpoint.
Does not: choose the step (ps.checkpoint.choice), read values (ps.checkpoint.restore), write, import
numba (drivers and clients read manifests too).
Threads: none; every function is independent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ps import codec
from ps.checkpoint.digest import digest
from ps.checkpoint.format import (
    FORMAT,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    ShardIndex,
    ShardRecord,
    bucket_nbytes,
    decode_manifest,
    step_name,
    step_of,
)
from ps.checkpoint.storage import Storage, if_sound, storage_at
from ps.checkpoint.tables.format import check_segments, segment_nbytes
from ps.config import ServerSettings
from ps.errors import CheckpointError
from ps.manifest.manifest import Layout
from rpc.errors import UNREADABLE

MAX_CHAIN = 10_000
"""Deltas up to their full checkpoint; a save starts a new chain long before."""

Root = str | Path | Storage


def _check_size(storage: Storage, directory: str, shard: ShardRecord) -> None:
    name, step = f"{directory}/{shard.file_name}", step_of(directory)
    try:
        size = storage.size(name)
    except FileNotFoundError:
        raise CheckpointError(
            f"step {step} lacks {shard.file_name} (in manifest, not on disk)"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"step {step}: {storage.where(name)} cannot be read: {error}"
        ) from error
    if size != shard.nbytes:
        raise CheckpointError(
            f"{storage.where(name)} has {size} bytes, the manifest says {shard.nbytes}"
        )


def check_sizes(
    storage: Storage,
    checkpoint: Checkpoint,
    directory: str = "",
    refuse: Callable[[Storage, str, ShardRecord], None] = _check_size,
) -> None:
    """Check by one listing that every shard file of a step exists with its size.

    Args:
        storage: the checkpoint root.
        checkpoint: the step.
        directory: the directory with its files; by default that of a committed step.
        refuse: asks for one file that the listing does not have so, and says what is wrong with it.
    """
    directory = directory or step_name(checkpoint.step)
    try:
        listed = storage.sizes(directory)
    except OSError:
        listed = {}  # asking for each file tells why
    for shard in checkpoint.shards:
        if listed.get(shard.file_name) != shard.nbytes:
            refuse(storage, directory, shard)


def read_step(storage: Storage, step: int) -> Checkpoint:
    """Read the manifest of a step alone.

    Args:
        storage: the checkpoint root.
        step: number of the step.
    """
    name = f"{step_name(step)}/{MANIFEST_NAME}"
    path = storage.where(name)
    try:
        if storage.names(step_name(step)) and not storage.is_directory(step_name(step)):
            raise CheckpointError(
                f"{storage.where(step_name(step))} is a link; a checkpoint is a directory"
            )
        size = storage.size(name)
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, the limit is {MAX_MANIFEST_BYTES}")
        with storage.open(name) as file:
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"step {step} has no readable manifest: {error}") from error
    checkpoint = decode_manifest(data, path)
    if checkpoint.step != step:
        raise CheckpointError(f"{path} says step {checkpoint.step}, its directory step {step}")
    return checkpoint


class SeenSteps:
    """The steps of a directory as one look finds them: each is read once.

    What is damaged, or cannot be read now, is asked for again.

    Args:
        storage: the checkpoint root.
        known: steps that are not read, nor the sizes of their files.
    """

    def __init__(self, storage: Storage, known: Mapping[int, Checkpoint] | None = None) -> None:
        self.storage = storage
        self._whole = dict(known or {})
        self._read = dict(self._whole)

    def read(self, step: int) -> Checkpoint:
        """Return the manifest of a step. Raises as `read_step`."""
        if step not in self._read:
            self._read[step] = read_step(self.storage, step)
        return self._read[step]

    def whole(self, step: int) -> Checkpoint:
        """Return the manifest of a step whose files have their sizes."""
        if step not in self._whole:
            found = self.read(step)
            check_sizes(self.storage, found)
            self._whole[step] = found
        return self._whole[step]

    def readable(self, steps: Iterable[int]) -> list[Checkpoint]:
        """Return the manifests of steps; those that are missing or damaged are left out.

        Raises:
            CheckpointError: a manifest is there, and the file system does not give it. It may be
                the best one's, or say which steps a run has skipped.
        """
        found = (if_sound(functools.partial(self.read, step)) for step in steps)
        return [each for each in found if each is not None]


def load_chain(storage: Storage, step: int, seen: SeenSteps | None = None) -> list[Checkpoint]:
    """Return a step's checkpoint, then its base, and so on down to the full one.

    Args:
        storage: the checkpoint root.
        step: number of the step.
        seen: what this look has read so far; gets these steps.

    Raises:
        CheckpointError: one of them is missing, incomplete, or of another save or model.
    """
    load = (seen or SeenSteps(storage)).whole
    chain = [load(step)]
    while (base := chain[-1].base) is not None:  # ends: `decode_manifest` wants older bases
        above = chain[-1]
        if len(chain) >= MAX_CHAIN:
            raise CheckpointError(f"step {step} needs more than {MAX_CHAIN} older steps")
        try:
            below = load(base)
        except CheckpointError as error:
            raise CheckpointError(f"step {above.step} needs step {base}: {error}") from error
        if below.save_id != above.base_save_id:
            raise CheckpointError(
                f"step {above.step} needs save {above.base_save_id} of step {base}, found is "
                f"save {below.save_id}"
            )
        if below.manifest.with_limits_of(above.manifest) != above.manifest:
            raise CheckpointError(f"step {above.step} and its base {base} are of different models")
        chain.append(below)
    return chain


@contextmanager
def telling_removed(root: Root, checkpoint: Checkpoint) -> Iterator[None]:
    """Tell a step that is removed while the block reads it from a damaged one.

    Args:
        root: the checkpoint root.
        checkpoint: the step.

    Raises:
        CheckpointError: as the block, or the step is gone since it was found.
    """
    try:
        yield
    except CheckpointError as error:
        storage, step = storage_at(root), checkpoint.step
        if is_there(storage, step, checkpoint.save_id):
            raise
        raise CheckpointError(
            f"step {step} of {storage.where()} was removed while it was read, as newer steps were "
            "saved. Keep more steps (keep=...), save less often, or read when nothing saves there"
        ) from error


def is_there(storage: Storage, step: int, save_id: str) -> bool:
    """Whether a step that was found is still the same save; damaged, or unread now, it is.

    Args:
        storage: the checkpoint root.
        step: number of the step.
        save_id: the save that it was.
    """
    try:
        return read_step(storage, step).save_id == save_id
    except CheckpointError as error:
        return not isinstance(error.__cause__, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One server's file of a step, opened with its index, which was checked."""

    storage: Storage
    checkpoint: Checkpoint
    layout: Layout
    """Layout of the checkpoint's manifest."""
    rank: int
    name: str
    """Below the root."""
    index: ShardIndex

    @property
    def path(self) -> str:
        """The whole path or URL, for messages."""
        return self.storage.where(self.name)

    @property
    def record(self) -> ShardRecord:
        """The manifest's entry."""
        return self.checkpoint.shards[self.rank]


def open_shard(
    storage: Storage, checkpoint: Checkpoint, rank: int, layout: Layout, directory: str = ""
) -> ShardFile:
    """Read and check a shard's index: digest, bucket ids, and that all sizes add up.

    Args:
        storage: the checkpoint root.
        checkpoint: the step that it belongs to.
        rank: rank of the server that saved it.
        layout: of the checkpoint's manifest.
        directory: directory of the step, below the root; by default that of a committed one.
    """
    directory = directory or step_name(checkpoint.step)
    if not 0 <= rank < len(checkpoint.shards):
        raise CheckpointError(
            f"{storage.where(directory)} has {len(checkpoint.shards)} shards, asked for {rank}"
        )
    shard = checkpoint.shards[rank]
    name = f"{directory}/{shard.file_name}"
    index = _read_index(storage, shard, name)
    _check_index(storage.where(name), shard, checkpoint, layout, index)
    return ShardFile(storage, checkpoint, layout, rank, name, index)


def _read_index(storage: Storage, shard: ShardRecord, name: str) -> ShardIndex:
    path = storage.where(name)
    if shard.index_nbytes > shard.nbytes:
        raise CheckpointError(
            f"{path}: an index of {shard.index_nbytes} bytes in a file of {shard.nbytes}"
        )
    try:
        with storage.open(name) as file:
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
        return codec.msgpack(data, ShardIndex)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} has no index of format {FORMAT}: {error}") from error


def _check_index(
    path: str, shard: ShardRecord, checkpoint: Checkpoint, layout: Layout, index: ShardIndex
) -> None:
    count = len(index.bucket_ids)
    if len(index.steps) != count or len(index.digests) != count:
        raise CheckpointError(
            f"{path}: {count} buckets, {len(index.steps)} steps, {len(index.digests)} digests"
        )
    last = max(index.bucket_ids, default=-1)
    if last >= len(layout.buckets):
        raise CheckpointError(f"{path}: bucket {last}, the manifest has {len(layout.buckets)}")
    manifest = checkpoint.manifest
    check_segments(path, manifest, index.tables, is_delta=checkpoint.is_delta)
    sizes = [bucket_nbytes(layout, manifest, i) for i in index.bucket_ids]
    sizes += [segment_nbytes(manifest.tables[each.table], each) for each in index.tables]
    expected = sum(sizes) + index.extra_nbytes + shard.index_nbytes
    if expected != shard.nbytes:
        raise CheckpointError(f"{path}: its parts make {expected} bytes, it has {shard.nbytes}")


def open_shards(
    storage: Storage, checkpoint: Checkpoint, layout: Layout, directory: str = ""
) -> list[ShardFile]:
    """Open all shards' files; check that they hold each bucket once (a delta: at most once).

    Args:
        storage: the checkpoint root.
        checkpoint: the checkpoint.
        layout: layout of its manifest.
        directory: its directory; by default that of a committed step.
    """
    found: list[ShardFile] = []
    owners: dict[int, str] = {}
    for rank, shard in enumerate(checkpoint.shards):
        file = open_shard(storage, checkpoint, rank, layout, directory)
        for bucket_id in file.index.bucket_ids:
            if bucket_id in owners:
                raise CheckpointError(
                    f"bucket {bucket_id} is in {owners[bucket_id]} and in {shard.file_name}"
                )
            owners[bucket_id] = shard.file_name
        found.append(file)
    missing = len(layout.buckets) - len(owners)
    if missing and not checkpoint.is_delta:
        first = min(set(range(len(layout.buckets))) - set(owners))
        raise CheckpointError(
            f"{storage.where(directory or step_name(checkpoint.step))} lacks {missing} of "
            f"{len(layout.buckets)} buckets, the first is {first}"
        )
    return found


class ChainFiles:
    """The files of a step and of those that it needs, newest first, as a reader passes them.

    A server of as many as had saved finds all of its share in its own file of each step: it reads
    no other one, and its own index once. Else the indexes of one step are in memory at a time.

    Args:
        storage: the checkpoint root.
        steps: the chain, as of `load_chain`.
        settings: settings of the server that reads its share; None: the reader takes all.
    """

    def __init__(
        self, storage: Storage, steps: Sequence[Checkpoint], settings: ServerSettings | None
    ) -> None:
        self.storage = storage
        self.steps = tuple(steps)
        self.layout = Layout.whole(steps[0].manifest)
        """Layout of all of them: a chain is of one model."""
        self._own: tuple[ShardFile, ...] | None = None
        self.rank = settings.rank if settings is not None else 0
        """Rank of the server that reads its share; 0 if the reader takes all."""
        self.is_own = settings is not None and all(
            len(each.shards) == settings.num_servers for each in steps
        )
        """Whether the share is what the server of this rank had saved."""

    @property
    def newest(self) -> Checkpoint:
        """The step that is read."""
        return self.steps[0]

    def own(self) -> tuple[ShardFile, ...]:
        """Return the file of each step that the server of this rank had saved."""
        if self._own is None:
            self._own = tuple(
                open_shard(self.storage, each, self.rank, self.layout) for each in self.steps
            )
        return self._own

    def files(self, link: int, *, is_own: bool) -> Sequence[ShardFile]:
        """Open the files of one step.

        Args:
            link: which step, from the newest on.
            is_own: only that of the server of this rank.
        """
        if is_own:
            return self.own()[link : link + 1]
        return open_shards(self.storage, self.steps[link], self.layout)


def open_chain(
    root: Root, checkpoint: Checkpoint, settings: ServerSettings | None = None
) -> ChainFiles:
    """Return the files of a step and of those that it needs.

    Args:
        root: the checkpoint root.
        checkpoint: the step.
        settings: see ChainFiles.

    Raises:
        CheckpointError: one of the steps is missing or incomplete.
    """
    storage = storage_at(root)
    return ChainFiles(storage, load_chain(storage, checkpoint.step), settings)
