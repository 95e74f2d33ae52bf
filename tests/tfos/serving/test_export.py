"""Exports: what other programs read, what is refused, and that nothing half-written counts."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from feeding.filesystem.fsspec_files import FsspecFileSystem
from feeding.filesystem.registry import filesystem_for
from ps.manifest.rule_spec import Add
from ps.manifest.table_spec import TableSpec
from ps.sorted_rows.order import BATCH_BYTES, SortedBatch, hashed
from tests.support.exports import USER, write_export
from tests.support.ps_cluster import run_all
from tfos.errors import ExportError, SettingsError
from tfos.serving import export_writer, read_rows
from tfos.serving.export_format import decode_export, encode_with_digest, exported_table
from tfos.serving.export_reader import ExportFiles
from tfos.serving.export_writer import ExportWriter


def read_all(path: Path, table: str = "user") -> dict[int, list[float]]:
    return {
        one: row
        for ids, rows in read_rows(str(path), table)
        for one, row in zip(ids.tolist(), rows.tolist(), strict=True)
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_other_programs_read_plain_parquet(tmp_path):
    write_export(tmp_path / "e", {7: 1.0, 8: 2.0})
    table = pq.read_table(tmp_path / "e" / "tables" / "user" / "part-00000.parquet")
    assert dict(zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True)) == {
        7: [1.0] * 4,
        8: [2.0] * 4,
    }
    assert str(table.schema.field("row").type).startswith("fixed_size_list<element: float")
    manifest = json.loads((tmp_path / "e" / "export.json").read_text())
    assert manifest["tables"][0]["num_rows"] == 2
    assert "to_hash_bucket_fast" in manifest["tables"][0]["strings"]


def test_rows_are_read_back(tmp_path):
    rows = {one: float(one) for one in range(500)}
    write_export(tmp_path / "e", rows)
    assert read_all(tmp_path / "e") == {one: [value] * 4 for one, value in rows.items()}


def test_ids_above_int64_keep_their_bits(tmp_path):
    spec = TableSpec(name="user", dim=4, rule=Add(), id_kind="uint64")
    write_export(tmp_path / "e", {2**64 - 1: 1.0}, spec=spec)
    assert read_all(tmp_path / "e") == {2**64 - 1: [1.0] * 4}


@pytest.mark.parametrize("name", ["a/b", "..", "ü ber", "x" * 200, "A%2e"])
def test_any_name_of_a_table_is_a_safe_directory(tmp_path, name):
    write_export(tmp_path / "e", {1: 1.0}, spec=TableSpec(name=name, dim=4, rule=Add()))
    assert read_all(tmp_path / "e", name) == {1: [1.0] * 4}
    assert {each.name for each in tmp_path.iterdir()} == {"e"}


def test_tables_whose_names_differ_only_in_case_are_read_back(tmp_path):
    """A program may name tables so; all places that an export goes to tell cases apart."""
    rows = {"User": 1.0, "user": 2.0}
    with ExportWriter(str(tmp_path / "e")) as writer:
        for name, value in rows.items():
            one = SortedBatch(
                np.array([7]), np.full((1, 4), value, np.float32), np.zeros(1, np.bool_)
            )
            writer.add_table(exported_table(TableSpec(name=name, dim=4, rule=Add())), [one])
        writer.commit(state="s", source="a test")
    assert {name: read_all(tmp_path / "e", name)[7][0] for name in rows} == rows


def test_large_tables_have_several_files_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("tfos.serving.export_writer.FILE_BYTES", 1)
    monkeypatch.setattr("ps.sorted_rows.order.BATCH_BYTES", 1600)
    ids = np.arange(1000)
    ids = ids[np.argsort(hashed(ids))]
    rows = np.repeat(ids[:, None], 4, 1).astype(np.float32)
    whole = SortedBatch(ids, rows, np.zeros(1000, np.bool_))
    with ExportWriter(str(tmp_path / "e")) as writer:
        parts = (whole.part(start, start + 100) for start in range(0, 1000, 100))
        writer.add_table(exported_table(USER), parts)
        (table,) = writer.commit(state="s", source="a test").tables
    assert [file.num_rows for file in table.files] == [100] * 10
    assert read_all(tmp_path / "e") == {one: [float(one)] * 4 for one in range(1000)}


def test_files_of_wide_rows_are_bounded_by_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("tfos.serving.export_writer.FILE_BYTES", 1 << 20)
    spec = TableSpec(name="user", dim=65_536, rule=Add())
    ids = np.arange(100)
    ids = ids[np.argsort(hashed(ids))]
    rows = np.repeat(ids[:, None], spec.dim, 1).astype(np.float32)
    with ExportWriter(str(tmp_path / "e")) as writer:
        whole = SortedBatch(ids, rows, np.zeros(100, np.bool_))
        writer.add_table(exported_table(spec), [whole])
        (table,) = writer.commit(state="s", source="a test").tables
    assert [file.num_rows for file in table.files] == [64, 36]
    for file in (tmp_path / "e" / "tables" / "user").iterdir():
        assert pq.ParquetFile(file).metadata.num_row_groups == 1
    found = [*read_rows(str(tmp_path / "e"), "user")]
    assert [each.size for each, _ in found] == [64, 36]
    assert all((part == each[:, None]).all() for each, part in found)


def test_a_batch_of_removed_ids_is_bounded_by_the_bytes_of_their_rows(tmp_path):
    spec = TableSpec(name="user", dim=65_536, rule=Add())
    write_export(tmp_path / "d", dict.fromkeys(range(100)), base="first", spec=spec)
    files = ExportFiles(str(tmp_path / "d"))
    batches = [*files.rows(files.manifest.table("user"))]
    assert max(batch.rows.nbytes for batch in batches) <= BATCH_BYTES
    assert sum(batch.ids.size for batch in batches) == 100


def test_a_file_that_is_too_large_is_refused_with_the_next_step(tmp_path, monkeypatch):
    write_export(tmp_path / "e", {1: 1.0})
    monkeypatch.setattr("tfos.serving.export_format.MAX_FILE_BYTES", 10)
    with pytest.raises(ExportError, match=r"a file of \d+ bytes, more than 10: .* Export again"):
        read_all(tmp_path / "e")


def test_an_export_replaces_an_export(tmp_path):
    write_export(tmp_path / "e", {1: 1.0})
    write_export(tmp_path / "e", {2: 2.0})
    assert read_all(tmp_path / "e") == {2: [2.0] * 4}
    assert [each.name for each in tmp_path.iterdir()] == ["e"]


def test_an_export_that_fails_leaves_the_old_one(tmp_path):
    write_export(tmp_path / "e", {1: 1.0})
    with pytest.raises(ExportError, match=r"id 2 of table 'user'.*NaN"):
        write_export(tmp_path / "e", {2: float("nan")})
    assert read_all(tmp_path / "e") == {1: [1.0] * 4}
    assert [each.name for each in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize("failure", ["a row", "the last rows", "the footer"])
def test_an_export_that_fails_within_a_file_leaves_nothing_open(tmp_path, monkeypatch, failure):
    """Else the file is closed while nobody looks, which writes to it once more and fails aloud."""
    monkeypatch.setattr("ps.sorted_rows.order.BATCH_BYTES", 32)  # two rows are a group
    ids = np.arange(3)
    ids = ids[np.argsort(hashed(ids))]
    rows = np.repeat(ids[:, None], 4, 1).astype(np.float32)
    files: list[export_writer._HashedFile] = []
    real = export_writer._HashedFile.write
    is_full = False

    def write(file: export_writer._HashedFile, data: Any) -> int:
        if file not in files:
            files.append(file)
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    def batches() -> Iterator[SortedBatch]:
        nonlocal is_full
        yield SortedBatch(ids[:2], rows[:2], np.zeros(2, np.bool_))
        is_full = failure != "a row"
        if failure != "the footer":
            last = np.full((1, 4), np.nan if failure == "a row" else 1, np.float32)
            yield SortedBatch(ids[2:], last, np.zeros(1, np.bool_))

    monkeypatch.setattr(export_writer._HashedFile, "write", write)
    with (
        pytest.raises(
            ExportError,
            match=r"id \d of table|to .*/e: its files have no room in .*, where [\d.]+ MB are",
        ),
        ExportWriter(str(tmp_path / "e")) as writer,
    ):
        writer.add_table(exported_table(USER), batches())
    gc.collect()
    assert [file._file.closed for file in files] == [True]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", ["thesis.txt", "tables", "model.keras"])
def test_what_is_no_export_is_never_replaced(tmp_path, content):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / content).touch()
    with pytest.raises(SettingsError, match=rf"'{content}' in it and no export"):
        ExportWriter(str(tmp_path / "e"))
    with pytest.raises(SettingsError, match="is a file"):
        ExportWriter(str(tmp_path / "e" / content))
    assert (tmp_path / "e" / content).exists()


def test_a_directory_without_manifest_is_no_export(tmp_path):
    with pytest.raises(ExportError, match=r"no complete export.*written last"):
        ExportFiles(str(tmp_path))


@pytest.mark.parametrize("at", [10, 100, 300, -20])
def test_a_damaged_manifest_is_refused(tmp_path, at):
    write_export(tmp_path / "e", {1: 1.0})
    flip(tmp_path / "e" / "export.json", at)
    with pytest.raises(ExportError, match=r"export\.json"):
        ExportFiles(str(tmp_path / "e"))


def test_any_damaged_byte_of_a_manifest_is_found(tmp_path):
    whole = encode_with_digest(write_export(tmp_path / "e", {1: 1.0}))
    assert whole == (tmp_path / "e" / "export.json").read_bytes()
    for at in range(len(whole)):
        for bit in (1, 32, 128):
            damaged = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
            with pytest.raises(ExportError, match=r"export\.json"):
                decode_export(damaged, "export.json")


def test_a_damaged_file_is_named(tmp_path):
    write_export(tmp_path / "e", {1: 1.0, 2: 2.0})
    file = tmp_path / "e" / "tables" / "user" / "part-00000.parquet"
    flip(file, 60)
    with pytest.raises(ExportError, match=r"part-00000\.parquet is damaged: its SHA-256"):
        read_all(tmp_path / "e")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ExportError, match=r"part-00000.* has \d+ bytes, but the manifest says"):
        read_all(tmp_path / "e")
    file.unlink()
    with pytest.raises(ExportError, match=r"part-00000\.parquet is missing"):
        read_all(tmp_path / "e")


def test_an_export_that_is_replaced_while_it_is_read_is_not_called_damaged(tmp_path):
    write_export(tmp_path / "e", {1: 1.0, 2: 2.0})
    files = ExportFiles(str(tmp_path / "e"))
    batches = files.rows(files.manifest.table("user"))
    write_export(tmp_path / "e", {1: 5.0, 2: 6.0}, state="second")
    with pytest.raises(
        ExportError, match=r"/e has changed .*: another export is there. Call again"
    ):
        next(batches)
    shutil.rmtree(tmp_path / "e")
    with pytest.raises(
        ExportError,
        match=r"/e has changed .*: .* has no complete export.*\.e\.<12 d.*. Call again",
    ):
        next(files.rows(files.manifest.table("user")))


def test_a_manifest_that_lies_is_refused(tmp_path):
    manifest = write_export(tmp_path / "e", {1: 1.0})
    table = manifest.tables[0]
    for lie, message in (
        ({"num_rows": 2}, "says 2 rows, but its files have 1"),
        ({"unseen": (0.0,)}, "unseen vector of 1 numbers, expected 4"),
        ({"num_removed": 1, "removed": table.files}, "names no base"),
        ({"dim": 5, "unseen": (0.0,) * 5}, "expected 5 x float"),
    ):
        changed = msgspec.structs.replace(table, **lie)
        lying = msgspec.structs.replace(manifest, tables=(changed,))
        (tmp_path / "e" / "export.json").write_bytes(encode_with_digest(lying))
        with pytest.raises(ExportError, match=message):
            read_all(tmp_path / "e")
    newer = msgspec.structs.replace(manifest, format=2)
    with pytest.raises(ExportError, match="has format 2, but this version reads 1"):
        decode_export(encode_with_digest(newer), "export.json")


@pytest.mark.attack("A12", "A20")
def test_a_forged_file_with_a_right_digest_is_read_or_named(tmp_path):
    manifest = write_export(tmp_path / "e", {1: 1.0})
    table = manifest.tables[0]
    file = tmp_path / "e" / "tables" / "user" / table.files[0].name
    whole = file.read_bytes()
    refusals: list[str] = []
    for at in range(0, len(whole), 5):
        forged = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        file.write_bytes(forged)
        record = msgspec.structs.replace(table.files[0], sha256=sha256(forged).hexdigest())
        tables = (msgspec.structs.replace(table, files=(record,)),)
        lying = msgspec.structs.replace(manifest, tables=tables)
        (tmp_path / "e" / "export.json").write_bytes(encode_with_digest(lying))
        try:
            read_all(tmp_path / "e")
        except ExportError as error:
            refusals.append(str(error))
    assert len(refusals) > len(whole) // 20
    assert all(file.name in text for text in refusals)


ROW = pa.list_(pa.float32(), 4)
GIVEN = [[1.0] * 4]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"id": pa.array([1], pa.int32()), "row": pa.array(GIVEN, ROW)}, "id is int32 with 0"),
        ({"id": pa.array([None], pa.int64()), "row": pa.array(GIVEN, ROW)}, "id .* with 1 nulls"),
        ({"id": pa.array([1]), "row": pa.array([[1.0, None, 1.0, 1.0]], ROW)}, "row has nulls"),
        ({"id": pa.array([1]), "row": pa.array([None], ROW)}, "row has nulls"),
        ({"id": pa.array([1]), "row": pa.array(GIVEN, pa.list_(pa.float32()))}, "row is list<"),
        ({"id": pa.array([1]), "row": pa.array(GIVEN, pa.list_(pa.float64(), 4))}, "row is fixed"),
        ({"row": pa.array(GIVEN, ROW), "id": pa.array([1])}, r"columns \['row', 'id'\]"),
        ({"id": pa.array([], pa.int64()), "row": pa.array([], ROW)}, "has 0 rows, .* says 1"),
    ],
)
def test_a_file_of_another_writer_is_refused_unless_it_has_the_rows_of_the_manifest(
    tmp_path, columns, text
):
    manifest = write_export(tmp_path / "e", {1: 1.0})
    table = manifest.tables[0]
    file = tmp_path / "e" / "tables" / "user" / table.files[0].name
    pq.write_table(pa.table(columns), file)
    whole = file.read_bytes()
    digest = sha256(whole).hexdigest()
    record = msgspec.structs.replace(table.files[0], sha256=digest, nbytes=len(whole))
    tables = (msgspec.structs.replace(table, files=(record,)),)
    other = msgspec.structs.replace(manifest, tables=tables)
    (tmp_path / "e" / "export.json").write_bytes(encode_with_digest(other))
    with pytest.raises(ExportError, match=rf"part-00000\.parquet.*{text}"):
        read_all(tmp_path / "e")


@pytest.mark.parametrize(
    "order",
    [range(9, -1, -1), [*range(5, 10), *range(5)], [*range(5), *range(4, 9)]],
    ids=["within a batch", "between batches", "an id twice"],
)
def test_rows_out_of_order_are_refused(tmp_path, monkeypatch, order):
    monkeypatch.setattr("ps.sorted_rows.order.BATCH_BYTES", 5 * 16)  # five rows are read at a time
    ids = np.arange(10)
    ids = ids[np.argsort(hashed(ids))][[*order]]
    whole = SortedBatch(ids, np.zeros((10, 4), np.float32), np.zeros(10, np.bool_))
    with ExportWriter(str(tmp_path / "e")) as writer:
        writer.add_table(exported_table(USER), [whole])
        writer.commit(state="s", source="a test")
    with pytest.raises(ExportError, match=r"in row [15] is not in the order"):
        read_all(tmp_path / "e")


def test_an_unknown_table_is_refused_with_the_known_ones(tmp_path):
    write_export(tmp_path / "e", {1: 1.0})
    with pytest.raises(ExportError, match="no table 'item'; the export has 'user'"):
        read_all(tmp_path / "e", "item")


def test_a_delta_is_not_read_as_a_whole_export(tmp_path):
    write_export(tmp_path / "e", {1: 1.0, 2: None}, base="first")
    with pytest.raises(ExportError, match="is a delta of the state first"):
        read_all(tmp_path / "e")


STORE_ROWS = {one: float(one) for one in range(1, 9)}


def write_to_store(path: str, rows: dict[int, float], staging: Path) -> None:
    """Write an export with a model to a store whose directories have no rename."""
    ids = np.array([*rows])
    ids = ids[np.argsort(hashed(ids))]
    found = np.repeat([[rows[one]] for one in ids.tolist()], 4, 1).astype(np.float32)
    model = staging / "dense.keras"
    model.write_bytes(json.dumps(rows).encode())
    with ExportWriter(path) as writer:
        whole = SortedBatch(ids, found, np.zeros(ids.size, np.bool_))
        writer.add_table(exported_table(USER), [whole])
        writer.add_model(model)
        writer.commit(state="s", source="a test")


def read_store(path: str, staging: Path) -> dict[int, float]:
    """Return the rows of an export, whose model says the same."""
    found = {
        one: float(row[0])
        for ids, rows in read_rows(path, "user")
        for one, row in zip(ids.tolist(), rows, strict=True)
    }
    model = staging / f"{secrets.token_hex(4)}.keras"
    ExportFiles(path).fetch_model(model)
    assert json.loads(model.read_bytes()) == {str(one): value for one, value in found.items()}
    return found


@pytest.fixture
def store() -> Iterator[str]:
    root = f"memory://{secrets.token_hex(4)}"
    yield root
    filesystem_for(root).delete(root, recursive=True)


def at_each_copy(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Look before each file that a store without a rename copies to its name, and behind it."""
    real = MemoryFileSystem.cp_file

    def copy(fs: MemoryFileSystem, *args: Any, **options: Any) -> None:
        look()
        real(fs, *args, **options)
        look()

    monkeypatch.setattr(MemoryFileSystem, "cp_file", copy)


def test_a_store_without_renames_never_shows_half_an_export(store, tmp_path, monkeypatch):
    path, seen = f"{store}/e", []

    def look() -> None:
        try:
            seen.append(read_store(path, tmp_path))
        except ExportError as error:
            assert "no complete export" in str(error)  # noqa: PT017 - each look is an assertion
            seen.append({})

    at_each_copy(monkeypatch, look)
    write_to_store(path, STORE_ROWS, tmp_path)
    newer = {one: -value for one, value in STORE_ROWS.items()}
    assert run_all(lambda: write_to_store(path, newer, tmp_path)) == [None]
    changes = [new for old, new in itertools.pairwise([{}, *seen]) if new != old]
    assert changes == [STORE_ROWS, newer]
    monkeypatch.undo()
    names = [each.name for each in filesystem_for(path).entries(path)]
    assert len(names) == 3  # what was replaced is gone


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_export_to_a_store_that_is_cut_leaves_the_old_one(store, tmp_path, monkeypatch, cut):
    path, copied = f"{store}/e", []

    def fail() -> None:
        copied.append(1)
        if len(copied) == 2 * cut - 1:
            raise OSError(errno.EIO, "the store is away")

    write_to_store(path, STORE_ROWS, tmp_path)
    with monkeypatch.context() as patched:
        at_each_copy(patched, fail)
        with pytest.raises(OSError, match="the store is away"):
            write_to_store(path, {1: 7.0}, tmp_path)
    assert read_store(path, tmp_path) == STORE_ROWS
    files = filesystem_for(path)
    left = cut == 3  # its manifest may have been written: nobody knows, so its files stay
    assert len(files.entries(path)) == 3 + left
    assert len(files.entries(f"{path}/tables/user")) == 1 + left


def test_an_export_whose_last_answer_is_lost_is_whole(store, tmp_path, monkeypatch):
    path, real = f"{store}/e", FsspecFileSystem.write
    write_to_store(path, {1: 7.0}, tmp_path)

    def write(fs: FsspecFileSystem, name: str, *args: Any, **options: Any) -> None:
        real(fs, name, *args, **options)
        if name.endswith("export.json"):
            raise TimeoutError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(FsspecFileSystem, "write", write)
        with pytest.raises(TimeoutError, match="no answer"):
            write_to_store(path, STORE_ROWS, tmp_path)
    assert run_all(lambda: read_store(path, tmp_path)) == [STORE_ROWS]


def test_what_a_killed_export_left_in_a_store_is_no_export_and_in_nobodys_way(
    store, tmp_path, monkeypatch
):
    path = f"{store}/e"
    monkeypatch.setattr(
        ExportWriter, "__exit__", lambda *_: None
    )  # a killed process cleans up nothing
    with ExportWriter(path) as writer:
        rows = SortedBatch(np.array([1]), np.ones((1, 4), np.float32), np.zeros(1, np.bool_))
        writer.add_table(exported_table(USER), [rows])
    assert filesystem_for(path).entries(f"{path}/tables/user")
    with pytest.raises(ExportError, match=r"no complete export.*written last"):
        ExportFiles(path)
    write_to_store(path, STORE_ROWS, tmp_path)
    assert read_store(path, tmp_path) == STORE_ROWS
