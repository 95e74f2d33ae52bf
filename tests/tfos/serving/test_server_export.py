"""Exports of running servers: whole ones and deltas, from any scan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client.retry import MAX_SCANS
from ps.manifest.rule_spec import Add
from ps.manifest.table_spec import TableSpec
from tests.support.exports import USER, values
from tests.support.tables import with_tables
from tests.tfos.serving.test_checkpoint_export import rows_at
from tfos.console.console import Console
from tfos.errors import ExportError, ServerPhaseError, SettingsError, UnsupportedModel
from tfos.keras.step.tables import ServerRows
from tfos.serving import load
from tfos.serving.server_export import ServerExport


class Table:
    """What a scan gives: the rows in batches of 3, the first one twice, newer later.

    Args:
        rows: by id.
        num_cuts: that many scans end behind a row that the later ones no longer have.
    """

    def __init__(self, rows: dict[int, float], num_cuts: int = 0) -> None:
        self.rows, self.num_cuts = rows, num_cuts
        self.manifest = with_tables(USER)
        self.tables = self

    def scan(self, name: str) -> Iterator[tuple[Any, Any]]:
        assert name == "user"
        if self.num_cuts:
            self.num_cuts -= 1
            yield np.array([1_000]), np.full((1, 4), 7.0, np.float32)
            raise ServerPhaseError("ps:0 was started again while table 'user' was scanned")
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


@pytest.mark.fault("F30")
def test_a_scan_that_a_restart_cuts_is_begun_again(tmp_path, caplog):
    rows = {one: float(one) for one in range(10)}
    with pytest.raises(ServerPhaseError, match="ps:0 was started again"):
        export(Table(rows, num_cuts=MAX_SCANS), tmp_path / "f")
    with pytest.raises(ServerPhaseError, match="ps:0 was started again"):
        ServerRows(Table(rows, num_cuts=MAX_SCANS), None).dump("user", 1 << 20)
    assert caplog.text.count("rows are read again from the start: ps:0 was started") == 4
    caplog.clear()
    export(Table(rows, num_cuts=MAX_SCANS - 1), tmp_path / "e")
    assert rows_at(tmp_path / "e") == rows
    client = Table(rows, num_cuts=MAX_SCANS - 1)
    keys, found = ServerRows(client, None).dump("user", 1 << 20)
    assert dict(zip(keys.tolist(), found[:, 0].tolist(), strict=True)) == rows
    assert caplog.text.count("rows are read again from the start: ps:0 was started") == 4


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


def test_a_delta_replaces_no_whole_export(tmp_path, cache):
    """Also the second delta of a chain took the place of the export that both go back to."""
    export(Table({1: 1.0, 2: 2.0}), tmp_path / "e")
    export(Table({1: 3.0}), tmp_path / "newer")
    for since in ("e", "newer"):
        with pytest.raises(SettingsError, match=r"/e is a whole export, .* name another path"):
            export(Table({1: 5.0}), tmp_path / "e", since=str(tmp_path / since))
    assert values(load(tmp_path / "e", cache, progress=False).lookup("user", [1, 2])) == [1.0, 2.0]
    for value in (5.0, 6.0):  # a delta may replace an earlier one
        export(Table({1: value}), tmp_path / "d", since=str(tmp_path / "e"))


def test_a_vector_for_unseen_ids_is_exported(tmp_path, cache):
    spec = TableSpec(name="user", dim=4, rule=Add(), unseen=(7.0,) * 4)
    export(Table({1: 1.0}), tmp_path / "e", spec)
    assert values(load(tmp_path / "e", cache, progress=False).lookup("user", [1, 2])) == [1.0, 7.0]


def test_a_file_of_a_served_model_has_the_rows_that_are_served(tmp_path, cache):
    """Whether deltas lie over the rows or were merged with them, ascending by key."""
    table = Table({one: float(one) for one in range(1, 101)})
    export(table, tmp_path / "e")
    served = load(tmp_path / "e", cache, progress=False)
    for number, gone in enumerate([[2], [*range(3, 61)]]):
        table.rows = {one: value for one, value in table.rows.items() if one not in gone}
        table.rows[1] = -float(number)
        export(table, tmp_path / f"d{number}", since=str(tmp_path / "e"))
        served.refresh(tmp_path / f"d{number}")
        assert len(served.index_dirs) == 2 - number
        keys, found = served.dump("user", 1 << 20)
        assert (keys.tolist(), values(found)) == ([*table.rows], [*table.rows.values()])
    with pytest.raises(UnsupportedModel, match=r"has 656 bytes of rows or more.*limit .* 655"):
        served.dump("user", 655)
