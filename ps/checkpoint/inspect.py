"""Inspection of a checkpoint directory, and export of one step to a .npz file.

Covers: a report on every step and the lease; a step's clock; tables as plain arrays, sorted by id.
Does not: print (ps.cli.checkpoints), change the directory, import numba.
Threads: none; every function stands alone.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps.checkpoint.choice import passed_over_by, steps_on_disk
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.lease import LEASE_NAME, read_holder
from ps.checkpoint.reader import (
    ChainFiles,
    Root,
    SeenSteps,
    ShardFile,
    check_sizes,
    is_there,
    load_chain,
    open_chain,
    open_shards,
    read_step,
)
from ps.checkpoint.restore import read_records, read_values, verify_files
from ps.checkpoint.score import Score
from ps.checkpoint.storage import Storage, read_small, storage_at
from ps.checkpoint.tables.format import segment_nbytes
from ps.checkpoint.tables.reader import read_rows
from ps.errors import CheckpointError
from ps.manifest.manifest import GroupLayout, Layout
from ps.manifest.table_spec import TableSpec
from ps.optim.row_rules import row_parts, row_width, rule_of_rows
from ps.optim.rules import rule_of
from ps.tables.rows import Dropped, RowBatch

Array = np.ndarray[Any, Any]


def table_arrays(
    root: Root, checkpoint: Checkpoint, *, slots: bool = False
) -> Iterator[tuple[str, Array]]:
    """Yield `tables/NAME/ids` and `tables/NAME/values` of each table; one is in memory at a time.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        slots: also `tables/NAME/values:SLOT` of each slot of the rule, [rows, 1] for what a row
            has once.

    Raises:
        CheckpointError: a file is damaged.
    """
    chain = open_chain(root, checkpoint)
    for at, spec in enumerate(checkpoint.manifest.tables):
        ids, rows = _joined(chain, at, spec)
        yield f"tables/{spec.name}/ids", ids
        for name, place in row_parts(spec).items() if slots else [("", slice(spec.dim))]:
            suffix = name and f":{name}"
            yield f"tables/{spec.name}/values{suffix}", np.ascontiguousarray(rows[:, place])


def _joined(chain: ChainFiles, at: int, spec: TableSpec) -> tuple[Array, Array]:
    """Return ids, ascending, and rows; of an id that comes several times the first is right."""
    ids: list[Array] = [np.empty(0, np.int64)]
    rows: list[Array] = [np.empty((0, row_width(spec)), spec.dtype)]
    places: list[Array] = [np.empty(0, np.int64)]  # of an id's row in `rows`; -1: it is gone
    num_rows = 0
    for _, piece in read_rows(chain, table=at):
        if not isinstance(piece, RowBatch | Dropped):
            continue
        ids.append(piece.ids)
        if isinstance(piece, RowBatch):
            rows.append(piece.rows)
            places.append(np.arange(num_rows, num_rows + piece.ids.size))
            num_rows += piece.ids.size
        else:
            places.append(np.full(piece.ids.size, -1))
    kind = np.uint64 if spec.id_kind == "uint64" else np.int64
    found, first = np.unique(np.concatenate(ids).view(kind), return_index=True)
    place = np.concatenate(places)[first]
    return found[place >= 0], np.concatenate(rows)[place[place >= 0]]


class GroupReport(msgspec.Struct, frozen=True):
    """One group of a checkpoint's parameters."""

    name: str
    dtype: str
    rule: str
    slots: tuple[str, ...]
    params: dict[str, tuple[int, ...]]
    """Shapes by name."""


class TableReport(msgspec.Struct, frozen=True):
    """One table of a checkpoint."""

    name: str
    dim: int
    dtype: str
    rule: str
    slots: tuple[str, ...]
    rows: int
    """Number of rows in this step's files; a delta has those that changed."""
    nbytes: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step that is on the disk."""

    step: int
    error: str = ""
    """Why it cannot be restored; empty: it is whole, and so is what it needs."""
    base: int | None = None
    """The step that a delta adds to."""
    job: str = ""
    clock: int = 0
    """Updates of the parameters; sync: barriers."""
    saved_at_s: float = 0.0
    """Seconds since 1970, by the first server's clock."""
    consistency: str = ""
    bucket_bytes: int = 0
    groups: tuple[GroupReport, ...] = ()
    tables: tuple[TableReport, ...] = ()
    files: dict[str, int] = {}
    """Bytes of each server's file."""
    metadata: dict[str, str] = {}
    """JSON texts by name; see ps.metadata."""
    score: Score | None = None


class DirectoryReport(msgspec.Struct, frozen=True):
    """A checkpoint directory."""

    directory: str
    lease: str
    """The job that saves there now; empty: none does."""
    newest: int | None
    """The step that a restore takes: the newest that is whole and that no later run has passed
    over."""
    steps: tuple[StepReport, ...]
    """Newest first."""


class _State(msgspec.Struct):
    """The part of a server's records (ps.server.save_restore.ShardExtra) that the report shows."""

    clock: int = 0
    saved_at_s: float = 0.0
    notes: dict[str, str] = {}


def clock_of(root: Root, step: int) -> int:
    """Return the updates of the parameters that a step has; sync: barriers. Reads no values.

    Its number may be greater: each save has one of its own, also where nothing was updated.

    Args:
        root: the checkpoint root.
        step: a complete one.

    Raises:
        CheckpointError: the step is missing or damaged, or cannot be read now.
    """
    storage = storage_at(root)
    checkpoint = read_step(storage, step)
    files = open_shards(storage, checkpoint, Layout.whole(checkpoint.manifest))
    return max(read_records(each, _State).clock for each in files)


def passed_over(root: Root, step: int) -> tuple[int, ...]:
    """Return the steps that the run of a step has skipped, whatever their numbers.

    Args:
        root: the checkpoint root.
        step: a complete one.

    Raises:
        CheckpointError: the step is missing or damaged, or cannot be read now.
    """
    return read_step(storage_at(root), step).passed_over


def inspect(root: Root) -> DirectoryReport:
    """Read every step with all its values, and compare all digests.

    Steps that newer saves remove meanwhile are left out.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    storage = storage_at(root)
    unsound: dict[int, str] = {}
    manifests: dict[int, Checkpoint] = {}
    on_disk = steps_on_disk(storage)
    for step in on_disk:
        try:
            manifests[step] = read_step(storage, step)
        except CheckpointError as error:
            unsound[step] = str(error)
    reports = [_inspect_step(storage, step, manifests, unsound) for step in on_disk[::-1]]
    still_there = steps_on_disk(storage)  # saves go on, and remove some while they are read
    reports = [each for each in reports if each.step in still_there]
    reports = [each for each in reports if not _is_going(storage, each, manifests)]
    passed_over = passed_over_by(manifests.values())
    sound = (report.step for report in reports if not report.error)
    newest = max(sound, key=lambda step: (step not in passed_over, step), default=None)
    steps = tuple(reversed(reports))
    return DirectoryReport(storage.where(), _lease(storage), newest, steps)


def _is_going(storage: Storage, report: StepReport, manifests: dict[int, Checkpoint]) -> bool:
    """Whether a step is not whole because it is being removed: its manifest goes first."""
    found = manifests.get(report.step)
    return bool(report.error and found and not is_there(storage, found.step, found.save_id))


def _inspect_step(
    storage: Storage, step: int, manifests: dict[int, Checkpoint], unsound: dict[int, str]
) -> StepReport:
    """Report on one step.

    Args:
        storage: the checkpoint root.
        step: number of the step.
        manifests: manifests of all steps that have one.
        unsound: what is wrong with the steps without one, and with older ones; gets this one.
    """
    if step not in manifests:
        return StepReport(step=step, error=unsound[step])
    checkpoint = manifests[step]
    try:
        check_sizes(storage, checkpoint)
    except CheckpointError as error:
        unsound[step] = str(error)
        return StepReport(step=step, error=str(error))
    found = ""
    state = _State()
    tables: tuple[TableReport, ...] = ()
    try:
        files = verify_files(storage, checkpoint)
        tables = tuple(_tables(checkpoint, files))
        state = read_records(files[0], _State)
        for each in load_chain(storage, step, SeenSteps(storage, manifests))[1:]:
            if each.step in unsound:
                raise CheckpointError(f"it needs step {each.step}: {unsound[each.step]}")
    except CheckpointError as error:
        found = unsound[step] = str(error)
    manifest = checkpoint.manifest
    return StepReport(
        step=step,
        error=found,
        base=checkpoint.base,
        job=checkpoint.job,
        clock=state.clock,
        saved_at_s=state.saved_at_s,
        consistency=manifest.consistency,
        bucket_bytes=manifest.bucket_bytes,
        groups=tuple(_groups(checkpoint)),
        tables=tables,
        files={shard.file_name: shard.nbytes for shard in checkpoint.shards},
        metadata=state.notes,
        score=checkpoint.score,
    )


def _groups(checkpoint: Checkpoint) -> Iterator[GroupReport]:
    for group in checkpoint.manifest.groups:
        rule = rule_of(group.rule)
        shapes = {param.name: param.shape for param in group.params}
        yield GroupReport(group.name, group.dtype, rule.name, rule.kept, shapes)


def _tables(checkpoint: Checkpoint, files: Sequence[ShardFile]) -> Iterator[TableReport]:
    for at, spec in enumerate(checkpoint.manifest.tables):
        records = [record for file in files for record in file.index.tables if record.table == at]
        pieces = [piece for record in records for piece in record.pieces if not piece.is_dropped]
        rule = rule_of_rows(spec)
        yield TableReport(
            spec.name,
            spec.dim,
            spec.dtype,
            rule.name,
            (*rule.slots, *rule.row_slots),
            rows=sum(piece.num_rows for piece in pieces),
            nbytes=sum(segment_nbytes(spec, record) for record in records),
        )


def _lease(storage: Storage) -> str:
    return str(read_holder(read_small(storage, LEASE_NAME)) or "")


def export_npz(root: Root, checkpoint: Checkpoint, out: str | Path, *, slots: bool = False) -> int:
    """Write a checkpoint's parameters and tables as arrays that numpy.load reads.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        out: the .npz file; replaced when all is written.
        slots: also the optimizer's slots, as `group/parameter:slot`.

    Returns:
        The number of arrays; the values' names are `group/parameter`, and for tables
        `tables/name/ids` and `tables/name/values`, sorted by id.

    Raises:
        CheckpointError: a file is damaged, or a name would lead out of the archive.
        OSError: the file cannot be written.
    """
    chain = open_chain(root, checkpoint)
    layout = chain.layout
    target = Path(out)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    count = 0
    try:
        with zipfile.ZipFile(unfinished, "w", allowZip64=True) as archive:
            groups = (_arrays(chain, group, slots=slots) for group in layout.groups)
            tables = table_arrays(chain.storage, checkpoint, slots=slots)
            for arrays in (*groups, tables):
                for name, array in arrays:
                    with archive.open(f"{_checked(name)}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, array, allow_pickle=False)
                    count += 1
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _arrays(chain: ChainFiles, group: GroupLayout, *, slots: bool) -> Iterator[tuple[str, Array]]:
    """Yield a group's parameters by name; one group is in memory at a time."""
    spec = chain.newest.manifest.group(group.name)
    suffixes = ["", *(f":{slot}" for slot in rule_of(spec.rule).kept)][: None if slots else 1]
    flats = [np.empty(group.num_elements, group.numpy_dtype) for _ in suffixes]
    wanted = set(range(group.first_bucket, group.first_bucket + group.num_buckets))
    for piece in read_values(chain, wanted):
        bucket = chain.layout.buckets[piece.bucket_id]
        for flat, part in zip(flats, piece.arrays, strict=False):  # without slots only values
            flat[bucket.start : bucket.stop] = part
    for start, param in zip(group.offsets, spec.params, strict=False):  # the last is the end
        for suffix, flat in zip(suffixes, flats, strict=True):
            array = flat[start : start + param.num_elements].reshape(param.shape)
            yield f"{group.name}/{param.name}{suffix}", array


def _checked(name: str) -> str:
    """Return a name that stays inside when somebody unpacks the archive."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or {"", ".", ".."} & set(parts):
        raise CheckpointError(f"the parameter {name!a} cannot be a name in an archive; rename it")
    return name
