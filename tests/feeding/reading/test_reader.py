"""Files read directly: every row once, full batches, the same order for the same seed and epoch."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch, EpochEnd, Ragged
from feeding.errors import DataError, FeedSettingsError, FileChanged
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading.bad_records import BadData
from feeding.reading.discover import data_files
from feeding.reading.partitions import partition_columns
from feeding.reading.positions import START, course_after
from feeding.reading.reader import DirectReader

pytestmark = pytest.mark.slow  # kernels are compiled at first
COLUMNS = {"n": Feature("int64"), "some": Feature("float32", None), "s": Feature("bytes")}


def write(path: Path, numbers: range, *, zipped: bool = False) -> Path:
    file = io.BytesIO()
    writer = RecordWriter(file, gzip=zipped)
    for n in numbers:
        row = {"n": n, "some": np.full(n % 3, n, np.float32), "s": f"row {n}"}
        writer.write(encode_example(row))
    writer.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.getvalue())
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("records")
    write(root / "part-0", range(70))
    write(root / "part-1.gz", range(70, 90), zipped=True)
    write(root / "day=1" / "part-0", range(90, 91))
    write(root / "day=1" / "unnamed", range(91, 120), zipped=True)
    write(root / "empty", range(0))
    (root / "_SUCCESS").write_bytes(b"no records")
    (root / ".part-0.crc").write_bytes(b"neither")
    return root


def epoch(reader: DirectReader, batch_size: int) -> list[Batch]:
    batches = []
    while isinstance(batch := reader.next_batch(batch_size), Batch):
        assert set(batch.columns) == set(COLUMNS)
        batches.append(batch)
    assert isinstance(batch, EpochEnd)
    assert all(each.num_rows == batch_size for each in batches[:-1])
    return batches


def numbers(batches: list[Batch]) -> list[int]:
    found: list[int] = []
    for batch in batches:
        ns, some, texts = (batch.columns[name] for name in COLUMNS)
        assert isinstance(some, Ragged)
        assert isinstance(ns, np.ndarray)
        assert isinstance(texts, np.ndarray)
        for row, (n, s) in enumerate(zip(ns, texts, strict=True)):
            assert s == f"row {n}".encode()
            values = some.values[some.offsets[row] : some.offsets[row + 1]]
            assert values.tolist() == [n] * (n % 3)
            found.append(int(n))
    return found


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 50),
    st.none() | st.integers(-(2**70), 2**70),
    st.integers(1, 60),
)
def test_the_workers_get_every_row_of_every_epoch_once(
    directory, num_workers, batch_size, seed, window
):
    source = TFRecordSource(str(directory), COLUMNS)
    window = window if seed is not None else 1
    readers = [
        DirectReader(source, worker, num_workers, seed=seed, shuffle_rows=window)
        for worker in range(num_workers)
    ]
    orders = []
    for _ in range(2):
        rows = [numbers(epoch(reader, batch_size)) for reader in readers]
        assert sorted(n for each in rows for n in each) == list(range(120))
        orders.append(rows)
    again = DirectReader(source, 0, num_workers, seed=seed, shuffle_rows=window)
    assert numbers(epoch(again, batch_size)) == orders[0][0]
    assert numbers(epoch(again, 7)) == orders[1][0]
    if seed is None:
        assert orders[0] == orders[1]


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    st.none() | st.integers(0, 9),
)
def test_other_workers_go_on_where_those_before_have_stopped(directory, stops, seed):
    """Each stop: batches that each worker has read by then."""
    source = TFRecordSource(str(directory), COLUMNS)
    shuffle = {"seed": seed, "shuffle_rows": 1 if seed is None else 20}
    course, rows = START, []
    for counts in [*stops, [9, 9]]:
        readers = [
            DirectReader(source, worker, len(counts), **shuffle, course=course)
            for worker in range(len(counts))
        ]
        for reader, count in zip(readers, counts, strict=True):
            first = reader.position.place.epoch
            batches: list[Batch] = []
            while len(batches) < count and isinstance(batch := reader.next_batch(9), Batch):
                batches.append(batch)
            rows += [(first, n) for n in numbers(batches)]
        found = [reader.position for reader in readers]
        course = course_after(course, found, source.files(), found[0])
    epochs = sorted({epoch for epoch, _ in rows})
    for epoch in epochs[:-1]:
        assert sorted(n for each, n in rows if each == epoch) == list(range(120))
    assert max(Counter(rows).values()) == 1


def test_hidden_names_are_left_out_of_patterns_too(directory, tmp_path):
    write(tmp_path / "sub" / "part-0", range(3))
    write(tmp_path / "_temporary" / "0" / "part-0", range(3))
    (tmp_path / "_committed_1").write_bytes(b"{}")
    for pattern in ("*", "**", "*/*", "{sub,no}/*"):
        assert [file.path for file in data_files(f"{tmp_path}/{pattern}", is_splittable=bool)] == [
            f"{tmp_path}/sub/part-0"
        ]
    for said in ("_temporary", "_t*/*", "{_temporary,no}/*", "_temporary/0/p*"):
        assert [file.path for file in data_files(f"{tmp_path}/{said}", is_splittable=bool)] == [
            f"{tmp_path}/_temporary/0/part-0"
        ]


def test_a_file_that_hdfs_still_writes_is_left_out(tmp_path):
    """`hdfs dfs -put` renames it at last."""
    write(tmp_path / "part-0", range(3))
    for name in ("part-1", "_part-2"):
        write(tmp_path / f"{name}._COPYING_", range(3))

    def names(place: str) -> list[str]:
        found = data_files(f"{tmp_path}{place}", is_splittable=bool)
        return [Path(file.path).name for file in found]

    for place in ("", "/*", "/part*", "/part-[01]*"):
        assert names(place) == ["part-0"]
    for place in ("/part-1._COPYING_", "/*._COPYING_", "/{part-1._COPYING_,no*}"):
        assert names(place) == ["part-1._COPYING_"]
    assert names("/_*._COPYING_") == ["_part-2._COPYING_"]
    (tmp_path / "part-0").unlink()
    with pytest.raises(FileNotFoundError, match=r"end with \._COPYING_ do not count"):
        names("")


@pytest.mark.parametrize("pattern", ["*", "_*", "[_]*", "*/part-0", "{_day=1,no}"])
def test_partitions_with_hidden_names_are_found_by_patterns_too(tmp_path, pattern):
    write(tmp_path / "_day=1" / "part-0", range(3))
    found = data_files(f"{tmp_path}/{pattern}", is_splittable=bool)
    assert [file.path for file in found] == [f"{tmp_path}/_day=1/part-0"]


@pytest.mark.parametrize("reverse", [False, True])
def test_of_paths_that_overlap_the_outer_one_tells_the_keys(tmp_path, reverse):
    for day in (1, 2):
        write(tmp_path / f"day={day}" / "part-0", range(3))
    paths = [str(tmp_path), f"{tmp_path}/day=1", f"{tmp_path}/day=2/part-0"]
    found = data_files(paths[::-1] if reverse else paths, is_splittable=bool)
    assert {file.base for file in found} == {str(tmp_path)}
    (column,) = partition_columns(found).values()
    assert [column.value(file.path) for file in found] == [1, 2]


@pytest.mark.parametrize("again", ["{}", "{}/", "file://{}"])
@pytest.mark.parametrize("name", ["part-0", "part-*", ""])
def test_a_path_that_is_named_twice_is_refused(tmp_path, name, again):
    """Spark reads it twice; here it was read once, without a word."""
    write(tmp_path / "part-0", range(3))
    path = f"{tmp_path}/{name}".rstrip("/")
    with pytest.raises(FeedSettingsError, match=r"is named twice.*name it once") as caught:
        data_files([path, again.format(path)], is_splittable=bool)
    assert str(caught.value).startswith(f"{path} ")


@pytest.mark.parametrize("paths", [[], 5, [None]])
def test_what_is_no_path_is_refused(paths):
    with pytest.raises(FeedSettingsError, match="path"):
        data_files(paths, is_splittable=bool)


def test_columns_are_inferred(directory, tmp_path):
    reader = DirectReader(TFRecordSource(str(directory / "part-*")), 0, 1)
    assert numbers(epoch(reader, 1000)) == list(range(90))
    with pytest.raises(DataError, match=r"hold no tf\.Example with a feature"):
        TFRecordSource(directory / "empty")
    file = io.BytesIO()
    RecordWriter(file).write(b"no example")
    (tmp_path / "other").write_bytes(file.getvalue())
    with pytest.raises(DataError, match=r"other: record 0 is not a tf\.Example"):
        TFRecordSource(tmp_path / "other")
    (tmp_path / "other").write_bytes(file.getvalue()[:-1] + (directory / "part-0").read_bytes())
    source = TFRecordSource(tmp_path / "other", bad=BadData("skip"))
    assert numbers(epoch(DirectReader(source, 0, 1), 100)) == list(range(1, 70))


@pytest.mark.fault("F44")
def test_an_epoch_that_failed_begins_anew(directory, tmp_path):
    good = bytearray((directory / "part-0").read_bytes())
    good[-1] ^= 1
    (tmp_path / "a").write_bytes(good)
    reader = DirectReader(TFRecordSource(tmp_path, COLUMNS), 0, 1)
    for _ in range(2):
        with pytest.raises(DataError, match="record 69 at byte"):
            epoch(reader, 32)
    good[-1] ^= 1
    then = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(good)
    os.utime(tmp_path / "a", ns=(then.st_atime_ns, then.st_mtime_ns))  # else it is another file
    assert len(numbers(epoch(reader, 32))) == 70
    for size in (len(good) + 5, 5):
        (tmp_path / "a").write_bytes(bytes(size))
        with pytest.raises(FileChanged, match=f"had {len(good)} bytes .* now {size};"):
            epoch(reader, 32)


@pytest.mark.fault("F44")
def test_a_damaged_file_fails_or_is_counted(directory, tmp_path):
    good = (directory / "part-0").read_bytes()
    (tmp_path / "a").write_bytes(good)
    (tmp_path / "b").write_bytes(good[:-3])
    with pytest.raises(DataError, match=r"b: record 69 at byte \d+: it is truncated"):
        epoch(DirectReader(TFRecordSource(str(tmp_path), COLUMNS), 0, 1), 32)
    source = TFRecordSource(str(tmp_path), COLUMNS, bad=BadData("skip", max_skipped=1))
    reader = DirectReader(source, 0, 1)
    for _ in range(3):  # what an earlier epoch has met does not count again
        assert len(numbers(epoch(reader, 32))) == 139
    assert source.num_skipped == 1
    told = 0
    for worker in (0, 1, 2):  # each damage is told by one worker
        source = TFRecordSource(str(tmp_path), COLUMNS, bad=BadData("skip"))
        epoch(DirectReader(source, worker, 3), 32)
        told += source.num_skipped
    assert told == 1


@pytest.mark.fault("F44")
def test_the_first_skipped_records_are_named_and_then_their_number(caplog):
    bad = BadData("skip", max_skipped=5000)
    for byte in range(1234):
        bad.skip("a", byte, DataError(f"byte {byte}"))
    *named, ten, hundred, thousand = caplog.messages
    assert named == [f"skipped: byte {byte}" for byte in range(10)]
    assert [text.split(";")[0] for text in (ten, hundred, thousand)] == [
        f"skipped {number} damaged records or files so far, of at most 5000"
        for number in (10, 100, 1000)
    ]


def test_nothing_to_read_and_impossible_settings_are_refused(directory, tmp_path):
    for path in (tmp_path, tmp_path / "missing", directory / "x*"):
        with pytest.raises(FileNotFoundError):
            TFRecordSource(str(path), COLUMNS)
    source = TFRecordSource(str(directory), COLUMNS)
    with pytest.raises(FeedSettingsError, match="without a seed"):
        DirectReader(source, 0, 1, shuffle_rows=2)
    with pytest.raises(FeedSettingsError, match="shuffle_rows must be an int >= 1"):
        DirectReader(source, 0, 1, seed=1, shuffle_rows=0)
    for seed in (1.5, "1", True):
        with pytest.raises(FeedSettingsError, match="seed must be an int"):
            DirectReader(source, 0, 1, seed=seed)  # type: ignore[arg-type]
