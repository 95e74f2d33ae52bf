"""Counted files: equal shares to the row, every row once, whatever the format and whoever stops."""

from __future__ import annotations

import csv as csv_format
import gzip
import io
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch
from feeding.errors import DataError, FileChanged
from feeding.formats.csv.options import CsvRequest
from feeding.formats.csv.source import CsvSource
from feeding.formats.text.lines import LineLimits
from feeding.formats.text.source import TextSource
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordLimits, RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading import splits
from feeding.reading.bad_records import BadData
from feeding.reading.positions import START, Course, course_after
from feeding.reading.reader import DirectReader
from feeding.reading.row_counts import Countable, CountedSource, counting_share, pieces_of
from feeding.reading.runs import Source
from feeding.reading.splits import Split

pytestmark = pytest.mark.slow  # kernels are compiled at first
FORMATS = ["tfrecord", "text", "csv", "headless", "quoted"]
SMALL = LineLimits(block_bytes=64)


def data_of(kind: str, rows: Sequence[int], *, blank: bool) -> bytes:
    """Return a file of rows that have several lengths, with lines between that are none."""
    file = io.BytesIO()
    if kind == "tfrecord":
        writer = RecordWriter(file)
        for n in rows:
            writer.write(encode_example({"n": n, "pad": "x" * (n % 40)}))
        return file.getvalue()
    if kind == "text":
        return b"".join(b"%d\n" % n for n in rows)
    text = io.StringIO(newline="")
    writer_ = csv_format.writer(text, lineterminator="\n")
    if kind != "headless":
        text.write("n,pad\n")
    for n in rows:
        pad = "a\nb" if kind == "quoted" and n % 3 == 0 else "x" * (n % 40)
        writer_.writerow([n, pad])
        text.write("\r\n\n\n" * (blank and n < 10))
    return text.getvalue().encode()


def source_of(kind: str, path: Path | str, **options: Any) -> Any:
    if kind == "tfrecord":
        small = RecordLimits(block_bytes=64)
        return TFRecordSource(str(path), {"n": Feature("int64")}, limits=small, **options)
    if kind == "text":
        return TextSource(str(path), limits=SMALL, **options)
    header = ["n", "pad"] if kind == "headless" else True
    request = CsvRequest(columns={"n": "int64"}, header=header, quoted_newlines=kind == "quoted")
    limits = LineLimits(block_bytes=128) if kind == "quoted" else SMALL
    return CsvSource(str(path), request, limits=limits, **options)


def counted(source: Countable) -> CountedSource:
    return CountedSource(source, [source.count(piece) for piece in pieces_of(source.files())])


@contextmanager
def pieces_of_bytes(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "PIECE_BYTES", size)
        yield


def numbers(batch: Batch) -> list[int]:
    return list(map(int, batch.columns["n" if "n" in batch.columns else "value"]))  # type: ignore[arg-type]


def epoch_of(reader: DirectReader, batch_size: int = 5) -> list[int]:
    found: list[int] = []
    while isinstance(batch := reader.next_batch(batch_size), Batch):
        found += numbers(batch)
    return found


def readers_of(
    source: Source, num_workers: int, shuffle: Any, course: Course
) -> list[DirectReader]:
    return [
        DirectReader(source, worker, num_workers, **shuffle, course=course)
        for worker in range(num_workers)
    ]


def one_batch(reader: DirectReader, batch_size: int) -> list[tuple[int, int]]:
    """Return epoch and row."""
    epoch = reader.position.place.epoch
    found = reader.next_batch(batch_size)
    return [(epoch, n) for n in numbers(found)] if isinstance(found, Batch) else []


SIZES = st.lists(st.tuples(st.integers(0, 25), st.sampled_from(["", ".gz", "unnamed"])), max_size=4)
STOPS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7)), max_size=3
)


@settings(max_examples=40)
@given(
    st.sampled_from(FORMATS), SIZES, STOPS, st.integers(1, 4), st.none() | st.integers(-5, 5),
    st.integers(1, 12), st.integers(20, 300), st.booleans(),
)  # fmt: skip
def test_shares_are_equal_and_rows_are_read_once_whoever_stops_where(
    tmp_path_factory, kind, sizes, stops, num_workers, seed, window, piece_bytes, blank
):
    """Each stop: batches that each worker has read by then, and their size."""
    root = tmp_path_factory.mktemp("files")
    rows = range(sum(count for count, _ in sizes))
    assume(rows or kind != "headless")  # without a line there are no columns
    ends = list(itertools.accumulate((count for count, _ in sizes), initial=0))
    (root / "empty").write_bytes(data_of(kind, (), blank=blank) or b"")
    for place, (_, how) in enumerate(sizes):
        data = data_of(kind, rows[ends[place] : ends[place + 1]], blank=blank)
        name = f"part-{place}{how if how == '.gz' else ''}"
        (root / name).write_bytes(gzip.compress(data) if how else data)
    with pieces_of_bytes(piece_bytes):
        source = counted(source_of(kind, root))
        shuffle = {"seed": seed, "shuffle_rows": 1 if seed is None else window}
        shares = [
            epoch_of(DirectReader(source, worker, num_workers, **shuffle))
            for worker in range(num_workers)
        ]
        assert sorted(itertools.chain(*shares)) == list(rows)
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        course, seen = START, []
        for counts, batch_size in stops:
            readers = readers_of(source, len(counts), shuffle, course)
            for reader, count in zip(readers, counts, strict=True):
                for _ in range(count):
                    seen += one_batch(reader, batch_size)
            positions = [reader.position for reader in readers]
            course = course_after(course, positions, source.files(), positions[0])
        last = max((epoch for epoch, _ in seen), default=0)
        for reader in readers_of(source, 2, shuffle, course):
            while reader.position.place.epoch <= last:
                seen += one_batch(reader, 4)
        expected = Counter((epoch, n) for epoch in range(last + 1) for n in rows)
        assert Counter(seen) == expected


@settings(max_examples=150)
@given(
    st.sampled_from(["text", "csv", "headless"]),
    st.text(st.sampled_from('ab\n\n\r"'), max_size=40),
    st.booleans(),
    st.integers(1, 12),
    st.booleans(),
)
def test_lines_are_counted_as_they_are_read(
    tmp_path_factory, kind, text, marked, piece_bytes, zipped
):
    path = tmp_path_factory.getbasetemp() / "any-lines.txt"
    data = ("\ufeff" * marked + "n\n" * (kind == "csv") + text).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)

    def source() -> Any:
        bad = BadData("skip", 1000)
        if kind == "text":
            return TextSource(str(path), bad=bad, limits=SMALL)
        header = ["n"] if kind == "headless" else True
        columns = {"n": "str"}
        return CsvSource(str(path), CsvRequest(columns=columns, header=header), bad=bad)

    def rows(of: Source) -> list[str]:
        reader, found = DirectReader(of, 0, 1), []
        while isinstance(batch := reader.next_batch(7), Batch):
            found += batch.arrays[0].tolist()  # type: ignore[union-attr]
        return found

    with pieces_of_bytes(piece_bytes):
        try:
            plain = source()
        except DataError:
            return
        expected = rows(plain)
        each = source()
        found = rows(counted(each))
        ends_within = any("\r" in line for line in text.split("\n"))
        assert found == expected or (kind != "text" and ends_within)
        if kind == "text":
            counts = [each.count(piece) for piece in pieces_of(each.files())]
            assert sum(counts) == len(expected)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255)), max_size=4),
    st.none() | st.integers(0, 900),
    st.integers(1, 4),
    st.integers(40, 400),
)
def test_damaged_records_change_nothing_of_who_reads_the_others(
    tmp_path_factory, damage, cut, num_workers, piece_bytes
):
    data = bytearray(data_of("tfrecord", range(15), blank=False))
    for place, value in damage:
        data[place % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.tfrecord"
    path.write_bytes(data[:cut] or b"")
    if not path.stat().st_size:
        return
    with pieces_of_bytes(piece_bytes):
        expected = epoch_of(DirectReader(source_of("tfrecord", path, bad=skipping()), 0, 1))
        source = counted(source_of("tfrecord", path, bad=skipping()))
        shares = [epoch_of(DirectReader(source, w, num_workers)) for w in range(num_workers)]
        assert list(itertools.chain(*shares)) == expected


@pytest.mark.parametrize("kind", ["tfrecord", "text", "csv", "headless"])
@pytest.mark.parametrize("kept", [0.3, 0.8])
def test_what_a_damaged_gzip_file_still_gives_is_read_once(tmp_path, kind, kept):
    dice = random.Random(3)
    rows = [dice.randrange(10**9) for _ in range(400)]
    data = gzip.compress(data_of(kind, rows, blank=True))
    path = tmp_path / "part-0.gz"
    path.write_bytes(data[: int(len(data) * kept)])
    plain = source_of(kind, path, bad=skipping())
    expected = epoch_of(DirectReader(plain, 0, 1))
    assert 50 < len(expected) < 400
    source = counted(source_of(kind, path, bad=skipping()))
    shares = [epoch_of(DirectReader(source, worker, 3)) for worker in range(3)]
    assert list(itertools.chain(*shares)) == expected
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    with pytest.raises(DataError, match=r"part-0\.gz"):
        counted(source_of(kind, path))


def skipping() -> BadData:
    return BadData("skip", 10**6)


def with_one_row_less(kind: str, data: bytes) -> bytes:
    """Return as many bytes, with the second row in the place of two."""
    if kind != "tfrecord":
        return data.replace(b"\n11", b"000").replace(b"000,", b"0000")
    head, rest = data_of(kind, [10], blank=False), data_of(kind, [11, 13], blank=False)
    for length in range(len(rest)):
        file = io.BytesIO()
        RecordWriter(file).write(encode_example({"n": 11, "pad": "x" * length}))
        if len(file.getvalue()) == len(rest):
            return head + file.getvalue() + data_of(kind, [14], blank=False)
    raise AssertionError("no record has that length")


def write_unseen(path: Path, data: bytes) -> None:
    """Write a file of equal size anew where its time does not tell."""
    then = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_with_other_rows_than_were_counted_is_named_with_both_numbers(tmp_path, kind):
    path = tmp_path / "part-0"
    data = data_of(kind, [10, 11, 13, 14], blank=False)
    path.write_bytes(data)
    source = counted(source_of(kind, path))
    now = with_one_row_less(kind, data)
    assert len(now) == len(data)
    write_unseen(path, now)
    with pytest.raises(FileChanged, match=r"part-0.*4 rows were counted, now it has 3;"):
        epoch_of(DirectReader(source, 0, 1), 3)


def test_rows_that_were_added_are_noticed_by_whoever_reads_the_last_ones(tmp_path):
    path = tmp_path / "part-0"
    path.write_bytes(b"1111111\n" * 4)
    source = counted(source_of("text", path))
    write_unseen(path, b"11\n1111\n" * 4)
    assert epoch_of(DirectReader(source, 0, 2)) == [11, 1111]
    with pytest.raises(FileChanged, match="4 rows were counted, now it has 8"):
        epoch_of(DirectReader(source, 1, 2))


def test_a_line_that_ends_within_is_refused_where_rows_are_counted(tmp_path):
    path = tmp_path / "part-0"
    path.write_bytes(b"1,a\n2,b\r3,c\n4,d\n")
    with pytest.raises(DataError, match="lines end in LF or CR LF"):
        epoch_of(DirectReader(counted(source_of("headless", path)), 0, 1))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 6))
def test_every_piece_is_counted_by_one_worker_and_about_as_many_bytes_by_each(sizes, num_workers):
    pieces = [Split("f", 0, size) for size in sizes]
    shares = [counting_share(pieces, worker, num_workers) for worker in range(num_workers)]
    assert list(itertools.chain(*shares)) == list(range(len(sizes)))
    for share in shares:
        fair = sum(sizes) / num_workers
        assert abs(sum(sizes[n] for n in share) - fair) <= max(sizes, default=0)
