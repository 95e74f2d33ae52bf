"""Served model: `load` an export, look up rows, predict, take in newer rows while serving.

Covers: the public calls, the dense model and its layers, atomic refreshes.
Does not: build indexes (tfos.serving.index_files), search (tfos.serving.row_index).
Threads: any. A lookup uses the rows of one state. A refresh prepares everything while readers go
on, then waits for running predicts to end: no predict mixes two states.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ps.sorted_rows.merge import merged
from ps.tables.ids import from_bits
from tfos.console.console import Console
from tfos.errors import ExportError
from tfos.serving.cache_directory import cache_directory
from tfos.serving.export_format import ExportManifest, kinds_of
from tfos.serving.export_reader import ExportFiles
from tfos.serving.index_files import IndexCache, MappedIndex, TableSource, index_key
from tfos.serving.row_index import RowIndex

Array = np.ndarray[Any, Any]

SHARE_OF_BASE = 4
"""An overlay with more than a quarter of the base's rows is merged with it. Two searches per id
are slower than one, but a merge writes the whole table again."""


PREDICT_TIMEOUT_S = 600.0
"""Longest time that a refresh waits for running predicts."""


def load(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    verify: bool = True,
    progress: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
) -> ServedModel:
    """Open an export for lookups and predictions; the first call on a host builds an index.

    The index takes the bytes of all rows, and 10 to 11 more per row, in `cache_dir`. It is mapped:
    several processes of a host share its pages. The two most recently opened unused indexes stay
    there, as long as the disk has room for the next one.

    Args:
        path: a directory or URL that ctx.export(..., tables="beside") or export_tables wrote.
        cache_dir: a directory of this user on a local disk; None: $TFOS_SERVING_CACHE, else
            `tfos/serving` below $XDG_CACHE_HOME, else the first usable of: below ~/.cache,
            directories for temporary files.
        verify: compare the digests of an existing index. The first process of a host does so, which
            reads all of it; the others trust its record until the host restarts.
        progress: show on standard error where the index is built, and the progress.
        custom_objects: classes and functions that the dense model and newer ones use, by their
            registered names, as in keras.models.load_model.
        safe_mode: refuse Lambdas in these models, which would run code from the file.

    Raises:
        ExportError: the export is incomplete or damaged, or is a delta; the disk is full.
        SettingsError: a path is refused, or other users could change `cache_dir`.
        OSError: a file system failed.
    """
    console = Console(enabled=progress)
    files = ExportFiles(os.fspath(path))
    if files.manifest.base is not None:
        raise ExportError(
            f"{files.path} is a delta of the state {files.manifest.base}. load() the whole export "
            'that it belongs to, then refresh() with the deltas in order: "state" in the previous '
            f"export's export.json is {files.manifest.base}"
        )
    cache = IndexCache(cache_directory(cache_dir), console, verify=verify)
    load_dense = partial(dense_model, custom_objects=custom_objects, safe_mode=safe_mode)
    return ServedModel(files, cache, RowIndex(_base_index(files, cache)), load_dense)


class ServedModel:
    """An export that is served; made by `load`.

    Args:
        files: the export.
        cache: cache of its indexes.
        index: index of its rows.
        load_dense: returns the dense model of an export.
    """

    def __init__(
        self,
        files: ExportFiles,
        cache: IndexCache,
        index: RowIndex,
        load_dense: Callable[[ExportFiles], Any],
    ) -> None:
        self._load_dense = load_dense
        self._files = files
        self._cache = cache
        self._index = index
        self._loaded = index.base
        """Rows of the last whole export: a running job's deltas are relative to it."""
        self._model: Any = None
        self._refreshing = threading.Lock()
        self._loading = threading.Lock()
        self._changed = threading.Condition()
        self._num_predicting = 0
        self._is_swapping = False

    @property
    def state(self) -> str:
        """Identifies the rows; see ExportManifest.state."""
        return self._index.state

    @property
    def index_dirs(self) -> tuple[Path, ...]:
        """Directories of the index."""
        return tuple(layer.directory for layer in self._index.layers)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the index."""
        return self._index.nbytes

    def num_rows(self, table: str) -> int:
        """Return the number of rows of a table; after a refresh, an upper bound.

        Args:
            table: name of the table.
        """
        self._index.table(table)
        return self._index.num_rows(table)

    def lookup(self, table: str, ids: Any, out: Array | None = None) -> Array:
        """Return the rows of ids.

        Args:
            table: name of the table.
            ids: integers of any shape; strings or bytes, for a table that was trained with them,
                are hashed as the training did.
            out: [*shape of the ids, dim] of the table's dtype to fill; None: a new array.

        Returns:
            [*shape of the ids, dim]: the unseen vector for an id that has no row.

        Raises:
            ExportError: there is no such table.
            IdError: an id is outside the table's range, not an integer, or a string for a table of
                integers.
            ShapeError: `out` does not fit.
        """
        return self._index.lookup(table, ids, out)

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array:  # noqa: ARG002
        """Return rows of the export; implements tfos.keras.embedding.sources.RowSource.

        Args:
            table: name of the table.
            keys: [n] int64; for a table of uint64 ids, the same bits.
            training: no effect: nothing is trained here.

        Returns:
            [n, dim] of the table's dtype.
        """
        index = self._index
        return index.lookup(table, from_bits(index.table(table), keys))

    def dump(self, table: str, limit_bytes: int) -> tuple[Array, Array]:
        """Return all rows, for a file or a copy of the model; see RowSource.

        Args:
            table: name of the table.
            limit_bytes: largest size of the rows.

        Returns:
            [n] int64, ascending, and [n, dim] of the table's dtype.

        Raises:
            UnsupportedModel: the rows are larger.
        """
        from tfos.keras.embedding.sources import check_size  # a model needs Keras anyway

        spec, num_bytes = self._index.table(table), 0
        keys, rows = [np.empty(0, np.int64)], [np.empty((0, spec.dim), spec.dtype)]
        for batch in self._index.batches(table):
            num_bytes += batch.rows.nbytes
            check_size(table, num_bytes, limit_bytes)
            keys.append(batch.ids)
            rows.append(batch.rows)
        found = np.concatenate(keys)
        order = np.argsort(found)
        return found[order], np.concatenate(rows)[order]

    @property
    def model(self) -> Any:
        """The dense Keras model, loaded at first use; its layers find their rows here.

        Raises:
            ExportError: the export has only tables.
        """
        with self._loading:
            if self._model is None:
                self._model = self._load_model(self._files)
            return self._model

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for one batch, all rows of one state.

        Args:
            batch: the model's input: an array, a list or a dict of arrays.

        Returns:
            numpy arrays, as from keras.Model.predict_on_batch.
        """
        if self._model is None:
            self.model  # noqa: B018 - loads it; a refresh exchanges it, and never takes it away
        with self._one_state():
            return self._model.predict_on_batch(batch)

    def refresh(self, path: str | os.PathLike[str]) -> None:
        """Take in newer rows, and the newer model if there is one, while others read.

        Args:
            path: a delta of the served state, or of the export that was loaded; or a whole export
                of the same tables.

        Raises:
            ExportError: its base is another state, its tables differ, or it is damaged; the served
                state stays.
            OSError: a file system failed.
        """
        with self._refreshing:
            files = ExportFiles(os.fspath(path))
            if self._is_here(files.manifest):
                return
            index = self._refreshed(files)
            is_newer = files.manifest.model is not None
            model = self._load_model(files) if is_newer and self._model is not None else None
            before, loaded = self._index, self._loaded
            with self._loading:  # the old model is not loaded after the exchange
                if is_newer and self._model is not None and model is None:
                    model = self._load_model(files)
                with self._no_predict():
                    self._index = index
                    if files.manifest.base is None:
                        self._loaded = index.base
                    if is_newer:
                        self._files, self._model = files, model
            if before.overlay is not None:
                self._cache.remove(before.overlay)
            if before.base is not loaded and before.base is not index.base:
                self._cache.remove(before.base)  # result of a merge: no other process uses it

    def _is_here(self, manifest: ExportManifest) -> bool:
        """Return whether an export has nothing new.

        A whole export of the served state may have a model, and deltas of it may follow.
        """
        is_loaded = index_key(manifest.digest) == self._loaded.key
        return manifest.state == self.state and (manifest.base is not None or is_loaded)

    def _refreshed(self, files: ExportFiles) -> RowIndex:
        """Return the rows with a newer export."""
        manifest, now = files.manifest, self._index
        _check_same_tables(files, now)
        if manifest.base is None:
            return RowIndex(_base_index(files, self._cache))
        if manifest.base == now.state:
            base, older = now.base, now.overlay
        elif manifest.base == self._loaded.state:
            base, older = self._loaded, None
        else:
            raise ExportError(
                f"{files.path} is a delta of the state {manifest.base}, but {now.state} is served "
                f"and {self._loaded.state} was loaded. Refresh with the deltas in their order, or "
                "load a whole export"
            )
        key = index_key(base.key, older.key if older else "", manifest.digest)
        sources = [_overlay_source(files, older, table.name) for table in manifest.tables]
        changed = sum(source.num_rows for source in sources)
        total = sum(table.num_rows for table in base.tables.values())
        if changed * SHARE_OF_BASE <= total:
            return RowIndex(base, self._cache.index(key, manifest.state, sources))
        whole = [_whole_source(base, source) for source in sources]
        return RowIndex(self._cache.index(index_key("whole", key), manifest.state, whole))

    def _load_model(self, files: ExportFiles) -> Any:
        model = self._load_dense(files)
        bind(model, self)
        return model

    @contextmanager
    def _one_state(self) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._is_swapping, "a refresh")
            self._num_predicting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_predicting -= 1
                self._changed.notify_all()

    @contextmanager
    def _no_predict(self) -> Iterator[None]:
        with self._changed:
            self._is_swapping = True
            try:
                self._wait(lambda: not self._num_predicting, "a predict")
                yield
            finally:
                self._is_swapping = False
                self._changed.notify_all()

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(is_over, PREDICT_TIMEOUT_S):
            raise ExportError(
                f"{what} of this model has not ended within {PREDICT_TIMEOUT_S:.0f} s; the served "
                "state stays"
            )


def dense_model(
    files: ExportFiles,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    safe_mode: bool = True,
) -> Any:
    """Return the Keras model of an export, whose layers have no rows yet.

    Args:
        files: the export.
        custom_objects: as in `load`.
        safe_mode: as in `load`.

    Raises:
        ExportError: it has no model, or is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="tfos-serving-") as directory:
        file = Path(directory) / "model.keras"
        files.fetch_model(file)
        from tfos.keras.export import load_model  # Keras, once the file is there

        return load_model(file, custom_objects=custom_objects, compile=False, safe_mode=safe_mode)


def bind(model: Any, rows: ServedModel) -> None:
    """Let the layers of a model find their rows in an index.

    Args:
        model: a model from `dense_model`.
        rows: has the index.
    """
    for layer in model._flatten_layers():
        if hasattr(layer, "bind"):
            layer.bind(rows)


def _base_index(files: ExportFiles, cache: IndexCache) -> MappedIndex:
    manifest = files.manifest
    sources = [
        TableSource(table, table.num_rows, partial(files.rows, table)) for table in manifest.tables
    ]
    return cache.index(index_key(manifest.digest), manifest.state, sources)


def _overlay_source(files: ExportFiles, older: MappedIndex | None, name: str) -> TableSource:
    """Return all changes to the base: a delta's, on top of the previous ones."""
    table = files.manifest.table(name)
    count = table.num_rows + table.num_removed
    if older is None:
        return TableSource(table, count, lambda: files.rows(table))
    before = older.tables[name]
    return TableSource(
        table,
        count + before.num_rows,
        lambda: merged(before.batches(), files.rows(table), keeps_removed=True),
    )


def _whole_source(base: MappedIndex, changes: TableSource) -> TableSource:
    before = base.tables[changes.table.name]
    return TableSource(
        changes.table,
        changes.num_rows + before.num_rows,
        lambda: merged(before.batches(), changes.batches(), keeps_removed=False),
    )


def _check_same_tables(files: ExportFiles, now: RowIndex) -> None:
    found = kinds_of(files.manifest.tables)
    expected = kinds_of(each.table for each in now.base.tables.values())
    if found != expected:
        raise ExportError(
            f"{files.path} has the tables {found}, but {expected} are served. It belongs to "
            "another model: use tfos.serving.load() for it"
        )
