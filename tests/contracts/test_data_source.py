"""One suite of direct reads for each place that files can be in: local, HDFS, an fsspec scheme."""

from __future__ import annotations

import gzip
import io
import itertools
import secrets

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feeding.columnar.batch import Batch
from feeding.errors import FileChanged
from feeding.filesystem.interface import is_other
from feeding.filesystem.registry import filesystem_for
from feeding.formats.csv.options import CsvRequest
from feeding.formats.csv.source import CsvSource
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.source import ParquetSource
from feeding.formats.text.source import TextSource
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading import splits
from feeding.reading.reader import DirectReader
from feeding.reading.row_counts import Countable, CountedSource, pieces_of
from feeding.reading.runs import Source
from scripts.local_hdfs.cluster import LocalHdfs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # kernels are compiled at first
ON_HDFS = pytest.param("hdfs", marks=pytest.mark.hdfs)

ROWS = 30_000


@pytest.fixture(params=["local", ON_HDFS, "memory"])
def directory(request, tmp_path) -> str:
    if request.param == "hdfs":
        hdfs: LocalHdfs = request.getfixturevalue("hdfs")
        return f"{hdfs.url}/{secrets.token_hex(4)}"
    return str(tmp_path) if request.param == "local" else f"memory://{secrets.token_hex(4)}"


def numbers(source: Source, *, num_workers: int = 2, seed: int | None = None) -> list[list[int]]:
    """Return what each worker gets of the first column."""
    shares = []
    for worker in range(num_workers):
        reader = DirectReader(source, worker, num_workers, seed=seed)
        found: list[int] = []
        while isinstance(batch := reader.next_batch(512), Batch):
            found += np.asarray(batch.arrays[0]).tolist()
        shares.append(found)
    return shares


@pytest.mark.parametrize("kind", ["tfrecord", "csv", "text"])
def test_counted_files_are_shared_to_the_row(directory, kind, monkeypatch):
    monkeypatch.setattr(splits, "PIECE_BYTES", 20_000)
    bounds = [0, 100, 4000, 4000, 5001]
    for part, (first, stop) in enumerate(itertools.pairwise(bounds)):
        file = io.BytesIO()
        if kind == "tfrecord":
            writer = RecordWriter(file)
            for n in range(first, stop):
                writer.write(encode_example({"n": n, "pad": "x" * (n // 50)}))
        else:
            file.write(b"n,pad\n" * (kind == "csv"))
            for n in range(first, stop):
                file.write(b"%d%s\n" % (n, b"," + b"x" * (n // 50) if kind == "csv" else b""))
        data = gzip.compress(file.getvalue()) if part == 3 else file.getvalue()
        name = f"{directory}/part-{part}{'.gz' * (part == 3)}"
        filesystem_for(directory).write(name, data)
    source: Countable
    if kind == "tfrecord":
        source = TFRecordSource(directory, {"n": Feature("int64")})
    else:
        request = CsvRequest(columns=["n"])
        source = CsvSource(directory, request) if kind == "csv" else TextSource(directory)
    pieces = pieces_of(source.files())
    counted = CountedSource(source, [source.count(piece) for piece in pieces])
    assert len(pieces) > 4 or kind == "text"
    for seed in (None, 3):
        shares = numbers(counted, num_workers=3, seed=seed)
        assert [len(share) for share in shares] == [1667] * 3
        assert sorted(map(int, itertools.chain(*shares))) == list(range(5001))


def test_parquet(directory):
    dice = np.random.default_rng(1)
    for part in range(3):
        count = ROWS // 3
        rows = pa.table(
            {
                "unread": [dice.bytes(100) for _ in range(count)],
                "n": np.arange(count) + part * count,
                "x": dice.random((count, 20)).tolist(),
            }
        )
        file = io.BytesIO()
        pq.write_table(rows, file, row_group_size=4000)
        filesystem_for(directory).write(f"{directory}/key={part}/f.parquet", file.getvalue())
    source = ParquetSource(directory, ParquetRequest(columns=["n", "x", "key"]))
    for seed in (None, 3):
        shares = numbers(source, seed=seed)
        assert [len(share) for share in shares] == [ROWS // 2, ROWS // 2]
        assert sorted(itertools.chain(*shares)) == list(range(ROWS))
    wanted = ParquetRequest(columns=["n"], filters=[("key", "=", 1), ("n", "<", 10_010)])
    assert numbers(ParquetSource(directory, wanted), num_workers=1) == [list(range(10_000, 10_010))]


@pytest.mark.parametrize("zipped", [False, True])
def test_lines(directory, zipped):
    text = "n,s\n" + "".join(f"{n},{'x' * (n % 70)}\n" for n in range(ROWS))
    data = gzip.compress(text.encode()) if zipped else text.encode()
    filesystem_for(directory).write(f"{directory}/f.csv{'.gz' * zipped}", data)
    shares = numbers(CsvSource(directory))
    assert sorted(itertools.chain(*shares)) == list(range(ROWS))
    assert all(shares) is not zipped
    lines = numbers(TextSource(directory), num_workers=3)
    assert sum(map(len, lines)) == ROWS + 1


@pytest.mark.parametrize("kind", ["text", "tfrecord", "parquet"])
def test_files_that_are_written_anew_in_equal_sizes_are_refused(directory, kind):
    """An epoch would read the rows of another file at the places of this one."""
    fs, path = filesystem_for(directory), f"{directory}/f.{kind}"

    def write(rows: range) -> None:
        file = io.BytesIO()
        if kind == "parquet":
            pq.write_table(pa.table({"n": np.array(rows)}), file, compression="none")
        elif kind == "tfrecord":
            writer = RecordWriter(file)
            for n in rows:
                writer.write(encode_example({"n": n}))
        else:
            file.write(b"".join(b"%d\n" % n for n in rows))
        fs.write(path, file.getvalue())

    write(range(100, 120))
    source: Source
    if kind == "parquet":
        source = ParquetSource(path, ParquetRequest(columns=["n"]))
    else:
        source = TFRecordSource(path) if kind == "tfrecord" else TextSource(path)
    assert [int(n) for n in numbers(source, num_workers=1)[0]] == [*range(100, 120)]
    before = fs.status(path)

    def is_seen() -> bool:
        write(range(119, 99, -1))
        return is_other(before.version, fs.status(path).version)

    wait_until(is_seen, "another version")
    assert fs.status(path).size_bytes == before.size_bytes
    with pytest.raises(FileChanged, match=f"{path} was [a-z]+ .* when it was listed, now [a-z]+ "):
        numbers(source, num_workers=1)
