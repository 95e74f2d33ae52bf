"""Damaged, hostile and unlike Parquet files: typed errors that name the place, or left out."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.arrow.arrays import PYARROW_FLOOR, check_pyarrow
from feeding.columnar.batch import Batch
from feeding.config import MIB
from feeding.errors import DataError, FeedSettingsError, FileChanged, MissingPackage
from feeding.filesystem import ordered_reads
from feeding.filesystem.local import LocalReader
from feeding.formats.parquet import footer
from feeding.formats.parquet.footer import ColumnChunk, ParquetLimits
from feeding.formats.parquet.page_headers import check_pages
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.bad_records import BadData
from feeding.reading.discover import data_files
from feeding.reading.reader import DirectReader
from tests.support.footer_flips import footer_bits

ROWS = 1000
GROUP = 250
WORDS = ["some", "words", "that", "repeat"]


def table(rows: int = ROWS) -> pa.Table:
    dice = np.random.default_rng(1)
    return pa.table(
        {
            "n": np.arange(rows),
            "x": dice.random(rows, np.float32),
            "s": [WORDS[n % 4] for n in range(rows)],
            "l": [[n, n] for n in range(rows)],
        }
    )


def stored(path: Path, rows: pa.Table | None = None, **options: Any) -> Path:
    options = {"row_group_size": GROUP, "write_page_checksum": True, **options}
    pq.write_table(table() if rows is None else rows, path, **options)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return stored(tmp_path_factory.mktemp("good") / "good.parquet")


def rows_of(source: ParquetSource) -> int:
    reader = DirectReader(source, 0, 1)
    found = 0
    while isinstance(batch := reader.next_batch(64), Batch):
        found += batch.num_rows
    return found


def footer_start(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def flipped(data: bytes, at: int, count: int = 1) -> bytes:
    return data[:at] + bytes(byte ^ 255 for byte in data[at : at + count]) + data[at + count :]


def in_group(data: bytes, group: int, column: int, at: int) -> bytes:
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(group).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    return flipped(data, start + at % chunk.total_compressed_size, 2)


def zeroed(data: bytes, group: int, column: int) -> bytes:
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(group).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    size = chunk.total_compressed_size
    return data[:start] + bytes(size) + data[start + size :]


Damage = Callable[[bytes], bytes]
WHOLE_FILE: dict[str, tuple[Damage, str]] = {
    "empty": (lambda data: b"", "has 0 bytes: too few"),
    "only magic": (lambda data: b"PAR1", "has 4 bytes: too few"),
    "nothing inside": (lambda data: b"PAR1\0\0\0\0PAR1", "a footer of 0 bytes"),
    "cut in the footer": (lambda data: data[:-9], "truncated or of another format"),
    "cut in the pages": (lambda data: data[: len(data) // 3], "truncated or of another format"),
    "cut at the front": (lambda data: data[len(data) // 2 :], "(row group 0|damaged|footer of)"),
    "other magic": (lambda data: data[:-4] + b"ORC1", r"last 4 bytes are b'ORC1'"),
    "encrypted": (lambda data: data[:-4] + b"PARE", "is an encrypted Parquet file"),
    "csv": (lambda data: b"n,x\n" * 500, "truncated or of another format"),
    "gzip": (lambda data: b"\x1f\x8b" + data, r"row group 0: \w"),
    "footer length too long": (
        lambda data: data[:-8] + (1 << 31).to_bytes(4, "little") + b"PAR1",
        "a footer of 2147483648 bytes in a file of",
    ),
    "footer length zero": (lambda data: data[:-8] + bytes(4) + b"PAR1", "a footer of 0 bytes"),
    "footer too short": (
        lambda data: data[:-8] + (9).to_bytes(4, "little") + b"PAR1",
        "its footer is damaged",
    ),
    "footer of noise": (
        lambda data: (
            data[: footer_start(data)] + bytes(len(data) - footer_start(data) - 8) + data[-8:]
        ),
        "its footer is damaged",
    ),
    "footer begins damaged": (
        lambda data: flipped(data, footer_start(data), 8),
        "footer is damaged",
    ),
}
IN_A_GROUP: dict[str, tuple[Damage, str]] = {
    "numbers": (lambda data: in_group(data, 2, 0, 300), "row group 2: "),
    "floats": (lambda data: in_group(data, 2, 1, 200), "row group 2: "),
    "text": (lambda data: in_group(data, 2, 2, 60), "row group 2: "),
    "lists": (lambda data: in_group(data, 2, 3, 500), "row group 2: "),
    "page header": (lambda data: in_group(data, 2, 0, 0), "row group 2: "),
    "zeros": (lambda data: zeroed(data, 2, 1), "row group 2: "),
}
CORPUS = WHOLE_FILE | IN_A_GROUP


@pytest.mark.fault("F45")
@pytest.mark.parametrize("name", CORPUS)
def test_a_damaged_file_is_named_or_left_out(good, tmp_path, name, caplog):
    damage, expected = CORPUS[name]
    (tmp_path / "a.parquet").write_bytes(damage(good.read_bytes()))
    shutil.copy(good, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet.*{expected}"):
        rows_of(ParquetSource(str(tmp_path)))
    bad = BadData("skip", max_skipped=4)
    caplog.set_level(logging.WARNING)
    source = ParquetSource(str(tmp_path), bad=bad)
    found = rows_of(source)
    if name in IN_A_GROUP:
        assert source.num_skipped == 1
        assert 2 * ROWS - GROUP <= found < 2 * ROWS
    else:
        assert found == ROWS
        assert 1 <= source.num_skipped <= 4  # every row group, where the footer is whole
    assert "skipped" in caplog.text
    assert rows_of(source) == found
    with pytest.raises(DataError, match="max_skipped is 0"):
        rows_of(ParquetSource(str(tmp_path), bad=BadData("skip", max_skipped=0)))


@pytest.mark.fault("F45")
def test_row_groups_refused_by_the_footer_and_by_their_pages_count_each_once(tmp_path, caplog):
    rows = pa.table({"n": pa.array([None if n == 250 else n for n in range(300)], pa.int64())})
    path = stored(tmp_path / "file", rows, row_group_size=100)
    path.write_bytes(zeroed(path.read_bytes(), 1, 0))  # the statistics tell of the null in group 2
    with pytest.raises(DataError, match="2 damaged records or files, max_skipped is 1"):
        rows_of(ParquetSource(str(path), bad=BadData("skip", max_skipped=1)))
    caplog.set_level(logging.WARNING)
    caplog.clear()
    source = ParquetSource(str(path), bad=BadData("skip", max_skipped=2))
    assert (rows_of(source), source.num_skipped) == (100, 2)
    assert all(f"row group {group}" in caplog.text for group in (1, 2))


@pytest.mark.fault("F45")
def test_a_directory_in_the_place_of_a_file_and_a_file_that_changes(good, tmp_path):
    (tmp_path / "part.parquet").mkdir()
    with pytest.raises(FileNotFoundError, match="no data file at"):
        ParquetSource(str(tmp_path))
    path = Path(shutil.copy(good, tmp_path / "f"))
    source = ParquetSource(str(path))
    stored(path, table(ROWS + 1))
    with pytest.raises(FileChanged, match="read only files that are no longer written"):
        rows_of(source)


@pytest.mark.fault("F45")
@pytest.mark.slow
def test_a_name_in_the_footer_that_is_no_text_ends_typed(good, tmp_path):
    whole = good.read_bytes()
    letters = "".join(table().column_names).encode()
    places = [at for at in range(footer_start(whole), len(whole) - 8) if whole[at] in letters]
    assert len(places) > len(letters)
    path = tmp_path / "broken.parquet"
    refused = 0
    for at in places:
        path.write_bytes(whole[:at] + b"\x80" + whole[at + 1 :])
        try:
            rows_of(ParquetSource(str(path)))
        except (DataError, FeedSettingsError):
            refused += 1
    assert refused > len(letters)


@pytest.mark.fault("F45")
@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path, every: int):
    """A child per share of the bits, because a C++ exception aborts the process."""
    path = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"n": np.arange(4)}), path, store_schema=False, write_statistics=["n"])
    bits = list(footer_bits(path.read_bytes()))
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.footer_flips",
                str(path),
                str(first),
                str(2 * every),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first in (0, every)
    ]
    ends = [(child.communicate(timeout=100), child.returncode) for child in children]
    for (out, errors), code in ends:
        assert code == 0, f"bit {out.splitlines()[-1]}: {errors[-300:]}"
    lines = [line.split(" ", 1) for (out, _), _ in ends for line in out.splitlines()]
    assert sorted(int(bit) for bit, _ in lines) == bits[::every]
    outcomes = [found for _, found in lines]
    assert set(outcomes) == {"read", "refused"}
    assert outcomes.count("refused") > len(outcomes) // 4


@pytest.mark.fault("F45")
@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_whatever_is_wrong_ends_typed(good, tmp_path_factory, data):
    whole = good.read_bytes()
    broken = bytearray(whole)
    first = data.draw(st.sampled_from([0, footer_start(whole)]))
    for _ in range(data.draw(st.integers(1, 8))):
        broken[data.draw(st.integers(first, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "broken.parquet"
    path.write_bytes(bytes(broken))
    with contextlib.suppress(DataError, FeedSettingsError):
        rows_of(ParquetSource(str(path)))


@pytest.mark.fault("F46")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda rows: rows.drop_columns(["x"]),
            "column 'x': expected float, as in .*a[.]parquet, found no such",
        ),
        (
            lambda rows: rows.set_column(0, "n", rows["n"].cast("int32")),
            "column 'n': expected int64, .* found int32",
        ),
        (
            lambda rows: rows.set_column(2, "s", [np.arange(ROWS)]),
            "column 's': expected string, .* found int64",
        ),
        (
            lambda rows: rows.set_column(
                0, "n", [pa.array([*range(ROWS - 2), None, None], pa.int64())]
            ),
            r"row group 3: column 'n' has 2 nulls; pass nulls={'n': value}",
        ),
    ],
)
def test_a_file_unlike_the_first_is_named_before_the_first_row(good, tmp_path, change, expected):
    shutil.copy(good, tmp_path / "a.parquet")
    stored(tmp_path / "b.parquet", change(table()))
    with pytest.raises(DataError, match=rf"b\.parquet: .*{expected}"):
        ParquetSource(str(tmp_path))
    source = ParquetSource(str(tmp_path), bad=BadData("skip"))
    assert source.num_skipped == 1
    assert rows_of(source) == sum(map(sum, (file.piece_rows or () for file in source.files())))
    ParquetSource(str(tmp_path), ParquetRequest(columns=["l"]))  # other columns do not matter


@pytest.mark.fault("F46")
def test_lists_of_another_length_and_wider_columns_elsewhere(good, tmp_path):
    shutil.copy(good, tmp_path / "a.parquet")
    odd = table().set_column(3, "l", [[[n] * 2 for n in range(ROWS - 1)] + [[1, 2, 3]]])
    stored(tmp_path / "b.parquet", odd.append_column("more", [np.arange(ROWS)]))
    named = ParquetRequest(columns=table().column_names)
    source = ParquetSource(str(tmp_path), named)  # 2001 numbers in 1000 rows: not of one length
    assert source.schema.columns[3].kind == "ragged"
    asked = ParquetRequest(columns=["l"], shapes={"l": (2,)})
    with pytest.raises(DataError, match=r"b\.parquet: row group 3, row 249: column 'l': 3 values"):
        rows_of(ParquetSource(str(tmp_path), asked))


def test_few_footers_are_read_ahead_of_a_slow_consumer(tmp_path, monkeypatch):
    """Wide footers have a MiB each: those of 80,000 files fill no worker's memory."""
    submitted = []

    class Noted(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            submitted.append(args)
            return super().submit(*args, **options)

    monkeypatch.setattr(ordered_reads, "ThreadPoolExecutor", Noted)
    for number in range(100):
        stored(tmp_path / f"{number:03}.parquet", pa.table({"n": [number]}))
    files = data_files(str(tmp_path), is_splittable=bool)
    found = []
    cache = footer.FooterCache(ParquetLimits())
    for file, each in footer.read_footers(files, cache, BadData()):
        assert file.path == each.path
        found.append(file)
        assert len(submitted) <= len(found) + 32
    assert found == files


def test_columns_of_a_footer_are_compared_once_however_often_it_is_read(tmp_path, monkeypatch):
    """To compare 10,000 columns takes half a second, and each piece of a file reads its footer."""
    compared: list[str] = []

    def noted(path: str, data: bytes, metadata: pq.FileMetaData) -> None:
        compared.append(Path(path).name)
        if b"damaged" in data:
            raise DataError("its columns do not fit")

    monkeypatch.setattr(footer, "check_column_metadata", noted)
    monkeypatch.setattr(footer, "_CACHE_BYTES", 0)  # the last one alone stays
    stored(tmp_path / "a", pa.table({"fitting": [1]}))
    stored(tmp_path / "b", pa.table({"other": [1]}))
    cache = footer.FooterCache(ParquetLimits())

    def read(name: str) -> footer.Footer:
        with LocalReader(tmp_path / name) as file:
            return cache.footer(file)

    for name in ("a", "b", "a", "b", "a"):
        read(name)
    assert compared == ["a", "b"]
    stored(tmp_path / "b", pa.table({"damaged": [1]}))
    for _ in range(2):
        with pytest.raises(DataError, match="its columns do not fit"):
            read("b")


class Canary(pa.ExtensionType):  # type: ignore[misc]  # pyarrow has no types
    """An extension type of another library, which trusts what the file brings."""

    sung = 0

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.canary")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"code"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Canary:
        cls.sung += 1
        return cls()


@pytest.mark.attack("A20")
def test_an_extension_type_is_read_as_its_storage_and_never_called(tmp_path):
    pa.register_extension_type(Canary())
    try:
        rows = pa.table({"n": pa.ExtensionArray.from_storage(Canary(), pa.array([1, 2, 3]))})
        path = stored(tmp_path / "file", rows)
        Canary.sung = 0
        source = ParquetSource(str(path), ParquetRequest(filters=[("n", ">", 1)]))
        assert rows_of(source) == 2
        assert Canary.sung == 0
        assert pq.read_table(path).num_rows == 3
        assert Canary.sung > 0  # as others read it
    finally:
        pa.unregister_extension_type("tests.canary")


@pytest.mark.attack("A20")
def test_a_pyarrow_that_runs_code_of_files_is_refused():
    check_pyarrow()
    check_pyarrow("18.0.0.dev1")
    for old in ("14.0.0", "17.0.0", "1.2"):
        with pytest.raises(
            MissingPackage, match=rf"pyarrow {old} is installed, .* 18\.0\.0 or newer"
        ):
            check_pyarrow(old)
    pyproject = Path(__file__).parents[4] / "pyproject.toml"
    assert f'"pyarrow>={PYARROW_FLOOR[0]}"' in pyproject.read_text()


@pytest.mark.attack("A20")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_footer_bytes": 100}, r"a footer of \d+ bytes, max_footer_bytes is 100"),
        (
            {"max_row_group_bytes": 1 << 18},
            "row group 0: the requested columns have .* max_row_group_bytes is",
        ),
        ({"max_page_bytes": 1 << 18}, "row group 0: the page at byte 4 has .* max_page_bytes is"),
    ],
)
def test_what_would_grow_too_large_is_refused_before_it_does(tmp_path, limits, expected):
    rows = pa.table({"n": np.zeros(1 << 18)})
    path = stored(
        tmp_path / "bomb",
        rows,
        row_group_size=1 << 18,
        compression="zstd",
        use_dictionary=False,
        data_page_size=1 << 30,
        max_rows_per_page=1 << 18,
    )
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match=expected):
        rows_of(ParquetSource(str(path), limits=ParquetLimits(**limits)))
    assert rows_of(ParquetSource(str(path))) == 1 << 18


@pytest.mark.attack("A20")
def test_a_long_text_that_stands_in_all_rows_is_held_once(tmp_path):
    """8 GB if each row had its own copy."""
    path = stored(
        tmp_path / "bomb",
        pa.table(
            {"s": pa.DictionaryArray.from_arrays(np.zeros(8_000, np.int32), ["x" * 1_000_000])}
        ),
        row_group_size=8_000,
    )
    assert path.stat().st_size < 100_000
    reader = DirectReader(ParquetSource(str(path)), 0, 1)
    batch = reader.next_batch(32_768)
    assert isinstance(batch, Batch)
    (column,) = batch.arrays
    assert len({id(text) for text in np.asarray(column)}) <= 8


COUNTING_POOLS: list[pa.MemoryPool] = []
"""They live as long as the process: buffers that they gave return to them."""


def peak_of(work: Callable[[], object]) -> int:
    """Return the bytes that pyarrow held at most during `work`."""
    before = pa.default_memory_pool()
    COUNTING_POOLS.append(pa.proxy_memory_pool(before))
    pa.set_memory_pool(COUNTING_POOLS[-1])
    try:
        work()
    finally:
        pa.set_memory_pool(before)
    return int(COUNTING_POOLS[-1].max_memory())


SMALL = ParquetLimits(max_row_group_bytes=MIB, max_page_bytes=MIB)


@pytest.mark.attack("A20")
def test_a_list_whose_codes_expand_is_refused_before_it_does(tmp_path):
    """One row of 4 million numbers in 300 bytes; 32 MiB if it is decoded."""
    values = pa.array(np.zeros(1 << 22, np.int64))
    rows = pa.table({"l": pa.ListArray.from_arrays(pa.array([0, 1 << 22], pa.int32()), values)})
    path = stored(
        tmp_path / "bomb", rows, compression="zstd", store_schema=False, max_rows_per_page=1 << 30
    )
    assert path.stat().st_size < 2000

    def read() -> None:
        with pytest.raises(DataError, match=r"bomb: row group 0: .*'l[.].*4194304 values.*1048576"):
            rows_of(ParquetSource(str(path), limits=SMALL))

    assert peak_of(read) < 4 * MIB


@pytest.mark.attack("A20")
@pytest.mark.parametrize(("width", "num_rows"), [(MIB // 4, 512), (2 * MIB, 64)])
def test_wide_values_that_are_null_take_small_batches(tmp_path, width, num_rows):
    """128 MiB of nulls in 300 bytes: pyarrow makes room for each of a batch, and doubles it."""
    path = stored(
        tmp_path / "bomb", pa.table({"b": pa.array([None] * num_rows, pa.binary(width))}),
        compression="zstd", store_schema=False, write_statistics=False,
    )  # fmt: skip
    assert path.stat().st_size < 1000

    def read() -> None:
        with pytest.raises(DataError, match=r"bomb: row group 0.*'b'"):
            rows_of(ParquetSource(str(path), limits=SMALL))

    assert peak_of(read) < 96 * MIB


def prefixed(path: Path) -> int:
    """Store 300 texts that are the one before, by their prefix; return the rows."""
    rows = pa.table({"s": ["x" * (MIB // 4)] * 300})
    text = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
    stored(path, rows, row_group_size=300, compression="zstd", write_statistics=False, **text)
    return 300


def half_coded(path: Path) -> int:
    """Store 300 codes of a long text, and pages without codes behind them; return the rows."""
    once = [chr(65 + n) * (MIB // 4) for n in range(2)]
    parts = [pa.array(part) for part in (["x" * (MIB // 4)] * 300, once, ["z"] * 1024)]
    stored(
        path, pa.table({"s": pa.chunked_array(parts)}), row_group_size=4096, compression="zstd",
        write_statistics=False, dictionary_pagesize_limit=MIB // 2, write_batch_size=1,
    )  # fmt: skip
    encodings = pq.read_metadata(path).row_group(0).column(0).encodings
    assert {"PLAIN", "RLE_DICTIONARY"} <= set(encodings)
    return 1326


@pytest.mark.attack("A20")
@pytest.mark.parametrize("write", [prefixed, half_coded])
def test_text_that_expands_takes_small_batches(tmp_path: Path, write: Callable[[Path], int]):
    """75 MiB in 2 KB if it is decoded at once."""
    num_rows = write(tmp_path / "bomb")
    assert (tmp_path / "bomb").stat().st_size < 3000

    def read() -> None:
        reader = DirectReader(ParquetSource(str(tmp_path / "bomb"), limits=SMALL), 0, 1)
        found = 0
        while isinstance(batch := reader.next_batch(8), Batch):
            found += batch.num_rows
        assert found == num_rows

    assert peak_of(read) < 32 * MIB


@pytest.mark.attack("A20")
@pytest.mark.parametrize("first", [[], ["a"]], ids=["an empty list first", "a list first"])
def test_a_list_of_codes_of_a_long_text_is_refused_before_it_expands(tmp_path: Path, first):
    """75 MiB in one row of 400 bytes; lists of short texts with large dictionaries are read."""
    rows = pa.table({"l": [first, ["x" * (MIB // 4)] * 300]})
    stored(tmp_path / "bomb", rows, compression="zstd", write_statistics=False)
    short = pa.table({"l": [first, *([f"{n}" * 9, "b"] for n in range(5000))]})
    stored(tmp_path / "short", short, row_group_size=9999)
    assert rows_of(ParquetSource(str(tmp_path / "short"), limits=SMALL)) == 5001

    def read() -> None:
        with pytest.raises(DataError, match=r"bomb: row group 0: column 'l.*30[01] codes.*1048576"):
            rows_of(ParquetSource(str(tmp_path / "bomb"), limits=SMALL))

    assert peak_of(read) < 8 * MIB


@pytest.mark.attack("A20")
def test_a_code_beyond_the_dictionary_names_file_row_group_and_column(tmp_path):
    rows = pa.table({"n": np.arange(240), "s": ["some", "words", "that"] * 80})
    path = stored(tmp_path / "file", rows, compression="none", write_page_checksum=False)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(0).column(1)
    stop = chunk.dictionary_page_offset + chunk.total_compressed_size
    data[stop - 20 : stop] = b"\xff" * 20  # the code 3 of two bits, and the entries are 0 to 2
    path.write_bytes(data)
    # IndexError is what pyarrow says, if it says anything.
    expected = r"file: row group 0: column 's': .* 3, .* 3 entries"
    with pytest.raises((DataError, IndexError), match=expected) as raised:
        rows_of(ParquetSource(str(path)))
    assert raised.type is DataError
    found = ParquetSource(str(path), ParquetRequest(nulls={"s": "?"}, filters=[("s", "!=", "x")]))
    with pytest.raises(DataError, match=r"file: row group 0: column 's'"):
        rows_of(found)
    source = ParquetSource(str(path), bad=BadData("skip", max_skipped=1))
    assert (rows_of(source), source.num_skipped) == (0, 1)


@pytest.mark.attack("A20")
@pytest.mark.parametrize("name", ["max_footer_bytes", "max_row_group_bytes", "max_page_bytes"])
def test_limits_are_whole_numbers(name):
    value: Any
    for value in (0, -1, 1.5, True):
        with pytest.raises(FeedSettingsError, match=name):
            ParquetLimits(**{name: value})


@pytest.mark.attack("A20")
@settings(max_examples=100)
@given(st.binary(max_size=60), st.integers(0, 2**60))
def test_page_headers_of_noise_end_typed(data, num_values):
    chunk = ColumnChunk(4, 4 + len(data), 0, num_values, 4, is_repeated=False)
    try:
        check_pages(memoryview(data), chunk, ParquetLimits())
    except DataError:
        return
    assert num_values == 0 or data
