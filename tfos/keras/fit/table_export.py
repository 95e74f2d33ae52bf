"""Export of a model with tables: rows inside a plain model, or beside the dense one.

Covers: `ctx.export(model, path, tables=…)` of models with Embeddings.
Does not: copy the model (tfos.keras.embedding.plain), trace it with its rows (graph_rows), write
rows (tfos.serving) or models without tables (tfos.keras.export).
Threads: the caller's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from tfos.console.console import Console
from tfos.errors import SettingsError
from tfos.files.paths import refuse_container, user_location
from tfos.keras.embedding import row_flow
from tfos.keras.embedding.graph_rows import save_with_rows
from tfos.keras.embedding.layer import MAX_SAVED_BYTES
from tfos.keras.embedding.plain import plain_copy
from tfos.keras.export import PathContext, check_exportable, export, save_as_it_is
from tfos.keras.step.table_specs import embeddings_of, specs_of_rows
from tfos.serving.server_export import ServerExport

Array = np.ndarray[Any, np.dtype[Any]]
Place = Literal["inside", "beside"]


def export_with_tables(
    model: keras.Model,
    path: str | os.PathLike[str],
    ctx: PathContext,
    *,
    tables: Place | None = None,
    since: str | os.PathLike[str] | None = None,
    limit_bytes: int = MAX_SAVED_BYTES,
) -> str:
    """Write a model and the rows of its tables.

    Args:
        model: the built model, with or without Embeddings.
        path: as for `tfos.keras.export.export`; with "beside" a directory or URL.
        ctx: the node's context.
        tables: "inside": a plain model with the rows in it, for hosts without tfos; "beside": the
            dense model and the rows as Parquet, for `tfos.serving.load`. None: "inside".
        since: with "beside", an earlier whole export; only rows that have changed are written.
        limit_bytes: largest size of one table's rows, with "inside".

    Returns:
        The absolute path or URL.

    Raises:
        SettingsError: the arguments do not fit the model, or the path is refused.
        UnsupportedModel: "inside" is not possible, or the program gave values to single variables;
            the text names the reason.
        ExportError: as for tfos.serving.
        ServerPhaseError: servers were started again in each of several scans of a table.
        OSError: the disk or the file system failed.
    """
    check_exportable(model)
    layers = embeddings_of(model)
    if tables not in (None, "inside", "beside"):
        raise SettingsError(f'tables must be "inside" or "beside", got {tables!r}')
    if since is not None and tables != "beside":
        raise SettingsError(f'since={since!r} needs tables="beside", got tables={tables!r}')
    if not layers:
        if tables == "beside":
            raise SettingsError(
                'tables="beside": the model has no tfos.keras.Embedding; leave the argument out'
            )
        return export(model, path, ctx)
    if tables != "beside":
        trainer = vars(model).get("_tfos_trainer")
        if trainer is not None:
            trainer.pull_newest()
        spec = None if trainer is None else trainer.batch_spec

        def save(given: Any, to: Path) -> None:
            if to.name.endswith(".keras"):
                save_as_it_is(plain_copy(given, limit_bytes), to)
            else:
                save_with_rows(given, to, layers, spec, limit_bytes)

        return export(model, path, ctx, save)
    return _write_beside(model, path, ctx, since)


def _write_beside(
    model: Any,
    path: str | os.PathLike[str],
    ctx: PathContext,
    since: str | os.PathLike[str] | None,
) -> str:
    target = ctx.absolute_path(os.fspath(path))
    refuse_container(user_location(target, "the model"), "the model", os.environ)
    base = None if since is None else ctx.absolute_path(os.fspath(since))
    trainer = vars(model).get("_tfos_trainer")
    if trainer is not None:
        specs, scan = trainer.client.manifest.tables, trainer.client.tables.scan
    else:
        layers = {layer.table: layer for layer in embeddings_of(model)}
        specs = specs_of_rows(embeddings_of(model))

        def scan(name: str) -> Iterator[tuple[Array, Array]]:
            source: Any = layers[name].source
            if hasattr(source, "client"):  # a part of a distributed model: its rows are on servers
                return source.client.tables.scan(name)  # type: ignore[no-any-return]  # untyped
            found = source.dump(name, np.iinfo(np.int64).max)
            return iter(() if found is None else (found,))

    with tempfile.TemporaryDirectory(prefix="tfos-export-", dir=ctx.staging_dir) as staging:
        dense = Path(staging) / "model.keras"
        with row_flow.rows_left_out():
            model.save(dense)  # of a distributed model: pulls first
        export_of = ServerExport(scan, specs, staging, Console(enabled=True))
        export_of.write(target, model=dense, since=base)
    return target
