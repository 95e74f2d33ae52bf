"""Exports of one table of 4 numbers a row, made of dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ps.manifest.rule_spec import Add
from ps.manifest.table_spec import TableSpec
from ps.sorted_rows.sorter import RowSorter
from tfos.serving.export_format import ExportManifest, exported_table
from tfos.serving.export_writer import ExportWriter

USER = TableSpec(name="user", dim=4, rule=Add())
Rows = Mapping[int, float | None]
"""Value of all numbers of a row; None: a removed id."""


def write_export(
    path: Path,
    rows: Rows,
    *,
    state: str = "first",
    base: str | None = None,
    spec: TableSpec = USER,
    model: Path | None = None,
) -> ExportManifest:
    with (
        RowSorter(spec.dim, spec.dtype, path.parent, is_newest_first=True) as sorter,
        ExportWriter(str(path), base) as writer,
    ):
        for one, value in rows.items():
            ids = np.array([one], np.uint64).view(np.int64)
            if value is None:
                sorter.remove(ids)
            else:
                sorter.add(ids, np.full((1, spec.dim), value, spec.dtype))
        writer.add_table(exported_table(spec), sorter.batches())
        if model is not None:
            writer.add_model(model)
        return writer.commit(state=state, source="a test")


def values(rows: Any) -> list[float]:
    """One number per row, all of whose numbers are equal."""
    assert (rows == rows[..., :1]).all()
    return list(rows[..., 0].tolist())
