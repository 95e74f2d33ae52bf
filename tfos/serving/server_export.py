"""Export of the tables of running servers: a worker or the driver scans them.

Training may continue meanwhile: rows then have different ages, as in every lookup. An export of a
checkpoint has one state.

Covers: whole exports, deltas relative to an earlier whole export, the dense model beside them.
Does not: connect (ps.client), write files (tfos.serving.export_writer).
Memory: bounded; beyond 128 MiB rows wait in files of `staging_dir`.
Threads: the caller's.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ps.client.retry import retry_scan
from ps.manifest.table_spec import TableSpec
from ps.sorted_rows.merge import changes
from ps.sorted_rows.sorter import RowSorter
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import ExportError
from tfos.serving.export_format import ExportManifest, exported_table, kinds_of
from tfos.serving.export_reader import ExportFiles
from tfos.serving.export_writer import ExportWriter

Array = np.ndarray[Any, Any]
Scan = Callable[[str], Iterator[tuple[Array, Array]]]
"""Gives (ids, rows) of a table by its name: `client.tables.scan`."""


class ServerExport:
    """Writes the tables of running servers.

    Args:
        scan: gives a table's rows; if an id comes twice, the later row counts.
        specs: the tables.
        staging_dir: directory of this host for rows that do not fit into memory; "": the directory
            for temporary files.
        console: shows the progress.
    """

    def __init__(
        self, scan: Scan, specs: Sequence[TableSpec], staging_dir: str, console: Console
    ) -> None:
        self._scan = scan
        self._specs = specs
        self._staging_dir = staging_dir or tempfile.gettempdir()
        self._console = console

    def write(
        self, path: str, *, model: Path | None = None, since: str | None = None
    ) -> ExportManifest:
        """Write an export.

        Args:
            path: a directory or URL; an earlier export there is replaced.
            model: a `.keras` file on this host to put beside the tables.
            since: an earlier whole export: write only the changes. Its files are read.

        Returns:
            The manifest.

        Raises:
            ExportError: `since` is a delta, is damaged, or has other tables; a row has a NaN; a
                disk is full.
            SettingsError: a path is refused, or something else is there.
            ServerPhaseError: servers restarted during each of several scans of a table.
            OSError: a file system failed.
        """
        base = None if since is None else self._base(since)
        state = None if base is None else base.manifest.state
        with ExportWriter(path, state) as writer:
            for spec in self._specs:
                self._add(writer, spec, base)
            if model is not None:
                writer.add_model(model)
            return writer.commit(state=uuid.uuid4().hex, source="running servers")

    def _add(self, writer: ExportWriter, spec: TableSpec, base: ExportFiles | None) -> None:
        with retry_scan(lambda: self._sorted(spec)) as sorter:
            found = sorter.batches()
            if base is not None:
                found = changes(base.rows(base.manifest.table(spec.name)), found)
            writer.add_table(exported_table(spec), found)

    def _sorted(self, spec: TableSpec) -> RowSorter:
        """Return all rows of one scan, in a sorter that the caller closes."""
        lines = ProgressLines(self._console)
        num_rows = 0
        with ExitStack() as stack:
            sorter = stack.enter_context(
                RowSorter(spec.dim, spec.dtype, self._staging_dir, is_newest_first=False)
            )
            for ids, rows in self._scan(spec.name):
                sorter.add(ids.view(np.int64), rows)
                num_rows += ids.size
                lines.show(f"export of {spec.name!r}: {num_rows:,} rows read")
            self._console.end_progress()
            stack.pop_all()
            return sorter

    def _base(self, since: str) -> ExportFiles:
        files = ExportFiles(since)
        manifest = files.manifest
        if manifest.base is not None:
            raise ExportError(
                f"{files.path} is a delta of the state {manifest.base}, but rows of running "
                "servers are compared with a whole export; give that export, or export from a "
                "checkpoint"
            )
        found = kinds_of(manifest.tables)
        expected = kinds_of(map(exported_table, self._specs))
        if found != expected:
            raise ExportError(
                f"no delta: {files.path} has the tables {found}, but the servers have {expected}; "
                "write a whole export"
            )
        return files
