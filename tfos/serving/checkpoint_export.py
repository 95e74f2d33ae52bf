"""Export of tables from a checkpoint directory, without servers: `export_tables`.

Covers: whole exports and deltas, rows of any complete step, the base of a delta.
Does not: write files (tfos.serving.export_writer), read the dense parameters.
Memory: bounded; beyond 128 MiB rows wait in files of `staging_dir`.
Threads: the caller's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.reader import open_chain, read_step, telling_removed
from ps.checkpoint.storage import Storage
from ps.checkpoint.tables.reader import adds_changes_only, read_rows
from ps.errors import CheckpointError
from ps.sorted_rows.merge import changes, present
from ps.sorted_rows.order import SortedBatch
from ps.sorted_rows.sorter import DEFAULT_MEMORY_BYTES, RowSorter
from ps.tables.rows import Dropped, RowBatch
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import ExportError
from tfos.files.checkpoint_storage import Storages
from tfos.serving.export_format import ExportManifest, exported_table, kinds_of
from tfos.serving.export_reader import ExportFiles
from tfos.serving.export_writer import ExportWriter


def export_tables(
    checkpoint_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int | None = None,
    since: int | str | os.PathLike[str] | None = None,
    *,
    staging_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> ExportManifest:
    """Write the tables of a checkpoint as Parquet (id, row), for `load` and for other programs.

    Args:
        checkpoint_dir: a directory or URL with checkpoints; servers may go on saving there.
        path: a directory or URL; an earlier export there is replaced.
        step: which checkpoint; None: the newest complete one.
        since: write a delta: the changes since this step, or since the step of the export at this
            path. None: write all rows.
        staging_dir: directory of this host for rows that do not fit into memory; None: the
            directory for temporary files.
        progress: show the progress on standard error.

    Returns:
        The manifest: rows and files per table.

    Raises:
        CheckpointError: there is no such step, it is damaged, or newer saves have removed it
            meanwhile.
        ExportError: the step of `since` is gone, or has other tables; a disk is full.
        SettingsError: a path is refused, or something else is there.
        OSError: a file system failed.
    """
    storage = Storages()(os.fspath(checkpoint_dir))
    newest = read_manifest(storage, step)
    if not newest.manifest.tables:
        raise ExportError(
            f"step {newest.step} in {storage.where()} has no tables; ctx.export(model, path) "
            "writes a dense model"
        )
    base = None if since is None else _base_of(storage, since)
    if base is not None:
        _check_base(newest, base)
    reading = _Reading(
        storage, os.fspath(staging_dir or tempfile.gettempdir()), Console(enabled=progress)
    )
    with ExitStack() as stack:
        for each in (newest, base and base.checkpoint):
            if each is not None:
                stack.enter_context(telling_removed(storage, each))
        state = None if base is None else base.state
        writer = stack.enter_context(ExportWriter(os.fspath(path), state))
        rows_of = reading.opened(newest, base, stack)
        for spec in newest.manifest.tables:
            writer.add_table(exported_table(spec), rows_of(spec.name))
        return writer.commit(
            state=_state_of(newest),
            source=f"step {newest.step} of {storage.where()}",
            save_id=newest.save_id,
            step=newest.step,
        )


class _Base(NamedTuple):
    """The base of a delta: a checkpoint, or the rows of an export."""

    state: str
    kinds: str
    """Of its tables; see kinds_of."""
    checkpoint: Checkpoint | None = None
    files: ExportFiles | None = None


def _base_of(storage: Storage, since: int | str | os.PathLike[str]) -> _Base:
    if isinstance(since, int):
        return _checkpoint_base(storage, since)
    files = ExportFiles(os.fspath(since))
    manifest = files.manifest
    if manifest.step is not None:
        try:
            found = _checkpoint_base(storage, manifest.step)
        except ExportError:
            if manifest.base is not None:
                raise
        else:
            if found.state == manifest.state:
                return found
    if manifest.base is not None:
        raise ExportError(
            f"{files.path} is a delta, and its base step {manifest.step} "
            f"(save {manifest.save_id or 'unknown'}) is not in {storage.where()}. Give the whole "
            "export that it belongs to, or write a whole export"
        )
    return _Base(manifest.state, kinds_of(manifest.tables), files=files)


def _checkpoint_base(storage: Storage, step: int) -> _Base:
    try:
        checkpoint = read_manifest(storage, read_step(storage, step).step)
    except CheckpointError as error:
        raise ExportError(
            f"no delta since step {step}: it is gone from {storage.where()} ({error}). Keep more "
            "steps (Checkpoints.keep), give an export that exists, or write a whole export"
        ) from error
    return _Base(_state_of(checkpoint), _kinds_in(checkpoint), checkpoint)


def _state_of(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.save_id}-{checkpoint.step}"


def _kinds_in(checkpoint: Checkpoint) -> str:
    return kinds_of(map(exported_table, checkpoint.manifest.tables))


def _check_base(newest: Checkpoint, base: _Base) -> None:
    """Refuse a base with other tables."""
    expected = _kinds_in(newest)
    if base.kinds != expected:
        raise ExportError(
            f"no delta: the base has the tables {base.kinds}, but step {newest.step} has "
            f"{expected}; write a whole export"
        )


class _Reading:
    """Reads checkpoints into sorters."""

    def __init__(self, storage: Storage, staging_dir: str, console: Console) -> None:
        self._storage = storage
        self._staging_dir = staging_dir
        self._console = console

    def opened(
        self, newest: Checkpoint, base: _Base | None, stack: ExitStack
    ) -> Callable[[str], Iterator[SortedBatch]]:
        """Read a step; return a function that gives a table's rows, or its changes since the base.

        Args:
            newest: the step.
            base: base of a delta; None: a whole export.
            stack: closes the files that rows wait in.
        """
        if base is not None and base.checkpoint is not None:
            if adds_changes_only(self._storage, newest, base.checkpoint):
                above = base.checkpoint.step
                changed = stack.enter_context(self._sorted_tables(newest, above=above))
                return lambda name: changed[name].batches()
            older = stack.enter_context(self._sorted_tables(base.checkpoint))
        newer = stack.enter_context(self._sorted_tables(newest))

        def rows_of(name: str) -> Iterator[SortedBatch]:
            rows = present(newer[name].batches())
            if base is None:
                return rows
            if base.files is not None:
                return changes(base.files.rows(base.files.manifest.table(name)), rows)
            return changes(present(older[name].batches()), rows)

        return rows_of

    @contextmanager
    def _sorted_tables(
        self, checkpoint: Checkpoint, *, above: int | None = None
    ) -> Iterator[Mapping[str, RowSorter]]:
        """Give the rows of a step by table; with a base, the changes since it."""
        specs = checkpoint.manifest.tables
        lines = ProgressLines(self._console)
        num_rows = 0
        with ExitStack() as stack:
            sorters = [
                stack.enter_context(
                    RowSorter(
                        spec.dim,
                        spec.dtype,
                        self._staging_dir,
                        is_newest_first=True,
                        memory_bytes=DEFAULT_MEMORY_BYTES // len(specs),
                    )
                )
                for spec in specs
            ]
            for saved, piece in read_rows(open_chain(self._storage, checkpoint), above=above):
                at = saved.record.table
                if isinstance(piece, RowBatch):
                    sorters[at].add(piece.ids, piece.rows[:, : specs[at].dim])
                elif isinstance(piece, Dropped):
                    sorters[at].remove(piece.ids)
                else:
                    continue
                num_rows += piece.ids.size
                lines.show(f"step {checkpoint.step}: {num_rows:,} rows read")
            self._console.end_progress()
            yield {spec.name: sorter for spec, sorter in zip(specs, sorters, strict=True)}
