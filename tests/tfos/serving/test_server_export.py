"""Exports of running servers: whole ones and deltas, from any scan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.manifest.rule_spec import Add
from ps.manifest.table_spec import TableSpec
from tests.support.exports import USER, values
from tests.tfos.serving.test_checkpoint_export import rows_at
from tfos.console.console import Console
from tfos.errors import ExportError, SettingsError
from tfos.serving import load
from tfos.serving.server_export import ServerExport


class Table:
    """What a scan gives: the rows in batches of 3, the first one twice, newer later."""

    def __init__(self, rows: dict[int, float]) -> None:
        self.rows = rows

    def scan(self, name: str) -> Iterator[tuple[Any, Any]]:
        assert name == "user"
        everything = [(one, -1.0) for one in [*self.rows][:1]] + [*self.rows.items()]
        for start in range(0, len(everything), 3):
            ids, numbers = zip(*everything[start : start + 3], strict=True)
            yield np.array(ids), np.repeat(np.array(numbers, np.float32)[:, None], 4, 1)


def export(table: Table, path: Path, spec: TableSpec = USER, **options: Any) -> Any:
    writer = ServerExport(table.scan, [spec], "", Console(enabled=False))
    return writer.write(str(path), **options)


def test_rows_of_a_scan_are_exported_each_once(tmp_path):
    table = Table({one: float(one) for one in range(10)})
    (tmp_path / "model").write_bytes(b"weights")
    manifest = export(table, tmp_path / "e", model=tmp_path / "model")
    assert rows_at(tmp_path / "e") == table.rows
    assert (tmp_path / "e" / "model.keras").read_bytes() == b"weights"
    assert manifest.model.nbytes == 7
    assert manifest.tables[0].num_rows == 10


def test_a_delta_has_what_is_different_now(tmp_path, cache):
    table = Table({one: float(one) for one in range(1, 10)})
    export(table, tmp_path / "e")
    served = load(tmp_path / "e", cache, progress=False)
    table.rows = {**table.rows, 3: 33.0, 50: 5.0}
    del table.rows[4]
    manifest = export(table, tmp_path / "d", since=str(tmp_path / "e"))
    assert (manifest.tables[0].num_rows, manifest.tables[0].num_removed) == (2, 1)
    served.refresh(tmp_path / "d")
    assert values(served.lookup("user", [2, 3, 4, 50])) == [2.0, 33.0, 0.0, 5.0]
    with pytest.raises(ExportError, match="is a delta of the state"):
        export(table, tmp_path / "d2", since=str(tmp_path / "d"))
    wide = TableSpec(name="user", dim=5, rule=Add())
    with pytest.raises(ExportError, match=r"'user' .float32.4.*servers have 'user' .float32.5"):
        export(table, tmp_path / "d2", wide, since=str(tmp_path / "e"))


def test_a_delta_does_not_replace_the_export_that_it_adds_to(tmp_path, cache):
    table = Table({1: 1.0, 2: 2.0})
    export(table, tmp_path / "e")
    with pytest.raises(SettingsError, match=r"/e is the whole export that this delta adds to"):
        export(Table({1: 5.0}), tmp_path / "e", since=str(tmp_path / "e"))
    assert values(load(tmp_path / "e", cache, progress=False).lookup("user", [1, 2])) == [1.0, 2.0]
    for value in (5.0, 6.0):  # a delta may replace an earlier one
        export(Table({1: value}), tmp_path / "d", since=str(tmp_path / "e"))


def test_a_vector_for_unseen_ids_is_exported(tmp_path, cache):
    spec = TableSpec(name="user", dim=4, rule=Add(), unseen=(7.0,) * 4)
    export(Table({1: 1.0}), tmp_path / "e", spec)
    assert values(load(tmp_path / "e", cache, progress=False).lookup("user", [1, 2])) == [1.0, 7.0]
