"""Format of a checkpoint directory: names, records, and every check that needs no parameters.

    ROOT/step-900/manifest.json     line 1: digest of the rest; then JSON: `Checkpoint`
    ROOT/step-900/ps-0.data         per bucket its values, then its slots; the tables' segments
                                    (ps.checkpoint.tables.format); extra bytes; the index
    ROOT/.tmp-<save id>/            a save that is not committed; never read
    ROOT/lease.json                 the job that saves here; see ps.checkpoint.lease

A *full* checkpoint holds every bucket. A *delta* names an older one as its base and holds the
buckets and rows that have changed since; the base, or its base, holds the others.

The digests form a chain: the manifest file has its own and holds one of each shard's index; an
index holds one of each bucket and of each piece of a table. So any flipped byte is detected, and a
server that needs some buckets of a shard reads only these. Positions are not stored but follow from
ids and the manifest, so they can neither overlap nor point outside.

Covers: names, records and their encoding.      Does not: write (ps.checkpoint.writer) or read
(ps.checkpoint.reader) files.      Threads: none; every function stands alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import numpy as np

from ps import codec
from ps.checkpoint.digest import Count, Digest, digest
from ps.checkpoint.score import Score
from ps.checkpoint.tables.format import SegmentRecord
from ps.errors import CheckpointError
from ps.manifest.manifest import Layout, Manifest
from ps.optim.rules import rule_of
from rpc.errors import UNREADABLE

Array = np.ndarray[Any, Any]

FORMAT = 1
MANIFEST_NAME = "manifest.json"
STAGING_PREFIX = ".tmp-"
MAX_MANIFEST_BYTES = 64 << 20
MAX_INDEX_BYTES = 256 << 20
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_SAVE_ID = re.compile(r"[0-9a-z-]{1,64}")


class ShardRecord(msgspec.Struct, frozen=True):
    """The manifest's record of one server's file; small enough for a reply's meta."""

    rank: Count
    nbytes: Count
    index_nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_INDEX_BYTES)]
    index_digest: Digest

    @property
    def file_name(self) -> str:
        """Name of the file next to the manifest; derived here, so it cannot point elsewhere."""
        return f"ps-{self.rank}.data"


class ShardIndex(msgspec.Struct, frozen=True):
    """The end of a shard's file: which buckets it holds, in order. A delta may hold none."""

    save_id: str
    bucket_ids: tuple[Count, ...]
    steps: tuple[Count, ...]
    digests: tuple[Digest, ...]
    extra_nbytes: Count
    extra_digest: Digest
    tables: tuple[SegmentRecord, ...]
    """Every segment of every table, in the manifest's order."""


class _FormatNumber(msgspec.Struct, frozen=True):
    """What a manifest of every format has."""

    format: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a committed manifest."""

    format: int
    save_id: str
    step: Count
    manifest: Manifest
    shards: tuple[ShardRecord, ...]
    job: str
    """Id of the cluster that saved it."""
    base: Count | None
    """Of a delta: the older step that it adds to."""
    base_save_id: str
    """Of a delta: that step's save id; another save under the same step is not its base."""
    passed_over: tuple[Count, ...]
    """Steps that existed when its run resumed from an older one: not in this run's history, even if
    their numbers are greater."""
    score: Score | None
    """None: it was not measured."""

    @property
    def is_delta(self) -> bool:
        """Whether buckets are missing that a base has."""
        return self.base is not None


def step_name(step: int) -> str:
    """Return the name of a committed step's directory."""
    return f"step-{step}"


def staging_name(save_id: str) -> str:
    """Return the name of the directory of a save that is not committed yet."""
    if not _SAVE_ID.fullmatch(save_id):
        raise CheckpointError(f"a save id has 1 to 64 of the characters 0-9 a-z -, got {save_id!r}")
    return f"{STAGING_PREFIX}{save_id}"


def step_of(name: str) -> int | None:
    """Return the step that a directory's name means, or None."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def bucket_nbytes(layout: Layout, manifest: Manifest, bucket_id: int) -> int:
    """Return the bytes of a bucket in a shard's file: its values, slots and average.

    Args:
        layout: layout of the manifest.
        manifest: has the groups' dtypes and rules.
        bucket_id: number of the bucket.
    """
    bucket = layout.buckets[bucket_id]
    return bucket.nbytes * (1 + len(rule_of(manifest.group(bucket.group).rule).kept))


def new_arrays(layout: Layout, manifest: Manifest, bucket_id: int) -> list[Array]:
    """Return new arrays, [num_elements] each, for a bucket's values, slots and average.

    Args:
        layout: layout of the manifest.
        manifest: has the groups' dtypes and rules.
        bucket_id: number of the bucket.
    """
    bucket = layout.buckets[bucket_id]
    num_kept = len(rule_of(manifest.group(bucket.group).rule).kept)
    dtype = layout.group(bucket.group).numpy_dtype
    return [np.empty(bucket.num_elements, dtype) for _ in range(1 + num_kept)]


def encode_manifest(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of the manifest file."""
    body = msgspec.json.format(msgspec.json.encode(checkpoint), indent=1)
    return digest(body).encode() + b"\n" + body


def decode_manifest(data: bytes, path: str) -> Checkpoint:
    """Check and decode the bytes of a manifest file.

    Args:
        data: the file's content.
        path: path of the file, for messages.
    """
    first, _, body = data.partition(b"\n")
    if first != digest(body).encode():
        raise CheckpointError(
            f"{path} is damaged: its digest is {digest(body)}, its first line says {first[:64]!r}"
        )
    try:
        found = codec.json(body, _FormatNumber).format  # first: another one has other fields
        checkpoint = codec.json(body, Checkpoint) if found == FORMAT else None
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}: {error}") from error
    if checkpoint is None:
        raise CheckpointError(
            f"{path} has format {found}; this version reads {FORMAT}. Restore it with the version "
            "of tfos that saved it"
        )
    if checkpoint.base is not None and checkpoint.base >= checkpoint.step:
        raise CheckpointError(
            f"{path}: step {checkpoint.step} names step {checkpoint.base} as its base, which is "
            "not older"
        )
    ranks = [shard.rank for shard in checkpoint.shards]
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{path} lists the shards {ranks}, expected 0..{len(ranks) - 1}")
    return checkpoint
