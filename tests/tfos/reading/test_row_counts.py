"""Workers that count files together: who counts what, others' files, workers that do not come."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from feeding.formats.text.source import TextSource
from feeding.reading import splits
from feeding.reading.splits import Split
from ps.client.client import PSClient
from ps.errors import RequestTimeout
from tests.support.ps_cluster import cluster, run_all, succeeded
from tfos.errors import NoServersError, SettingsError
from tfos.reading.reading import Reading
from tfos.reading.row_counts import counted
from tfos.worker.reports.seen_progress import SeenProgress

pytestmark = pytest.mark.socket


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ({"seed": 1, "window_rows": 0}, "window_rows must be an int >= 1, got 0"),
        ({"seed": 1, "window_rows": True}, "window_rows must be an int >= 1, got True"),
        ({"seed": None}, r"shuffled\(None\): pass a seed"),
        ({"seed": "1"}, "seed must be an int, got '1'"),
        ({"seed": 1, "interleave": 0}, "interleave must be an int >= 1, got 0"),
    ],
)
def test_an_order_that_cannot_work_is_refused_by_the_calls_own_names(order, text, tmp_path: Path):
    lines = tmp_path / "a.txt"
    lines.write_text("a\n")
    with pytest.raises(SettingsError, match=text):
        Reading(Worker(0, 1)).text(lines).shuffled(**order)


@dataclass
class Worker:
    """What ctx.read asks of a context."""

    rank: int
    num_workers: int
    client: PSClient | None = None

    def __post_init__(self) -> None:
        self.is_chief = self.rank == 0
        self.seen_progress = SeenProgress(lambda _: None)

    def check_servers_used(self, what: str) -> None:
        """Nothing is trained."""

    def ps_client(self) -> PSClient:
        if self.client is None:
            raise NoServersError("num_ps=0")
        return self.client

    def absolute_path(self, path: str) -> str:
        return path


class Watched(TextSource):
    """Remembers what was counted."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.counts: list[Split] = []

    def count(self, piece: Split) -> int:
        self.counts.append(piece)
        return super().count(piece)


@pytest.fixture
def lines(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(splits, "PIECE_BYTES", 100)
    for part in range(3):
        text = "".join(f"{'x' * (n % 9)}\n" for n in range(100))
        (tmp_path / f"part-{part}").write_text(text)
    return tmp_path


def rows_of(source: Any) -> int:
    return sum(sum(file.piece_rows) for file in source.files())


def test_each_piece_is_read_by_one_worker_and_all_know_all_counts(lines, caplog):
    caplog.set_level(logging.INFO, "tfos.reading.row_counts")
    sources = [Watched(lines) for _ in range(3)]
    with cluster(num_workers=3) as servers:
        workers = [Worker(rank, 3, servers.client(rank)) for rank in range(3)]
        found = succeeded(run_all(*(
            lambda at=at: counted(workers[at], sources[at], 15.0) for at in range(3)
        )))  # fmt: skip
        assert [rows_of(each) for each in found] == [300] * 3
        assert found[0].files() == found[1].files() == found[2].files()
        read = sorted(piece for source in sources for piece in source.counts)
        assert len(read) == len(set(read)) == sum(len(f.piece_rows) for f in found[0].files())
        assert all(source.counts for source in sources)
        assert f"300 rows in 3 files of 1488 bytes ({lines}/part-0, …); this worker" in caplog.text
        others = Watched(lines / "part-1")
        mixed = run_all(
            lambda: counted(workers[0], others, 15.0),
            lambda: counted(workers[1], sources[1], 15.0),
            lambda: counted(workers[2], sources[2], 15.0),
        )
        assert all(isinstance(error, SettingsError) for error in mixed)
        assert "worker 1 has found 3 files of 1488 bytes, worker 0 1 files of" in str(mixed[0])
        assert f"the first that differs is here {lines}/part-1 of" in str(mixed[0])
        assert "worker 0 has found 1 files of" in str(mixed[1])


def test_workers_that_find_other_files_do_not_begin_to_read_resumable_rows(lines):
    with cluster(num_workers=2) as servers:
        rows = [Reading(Worker(rank, 2, servers.client(rank))).text(lines) for rank in range(2)]
        (lines / "part-3").write_text("late\n")
        late = Reading(Worker(1, 2, servers.client(1))).text(lines)
        mixed = run_all(rows[0].resumable, late.resumable)
        assert all(isinstance(error, SettingsError) for error in mixed)
        assert "rows 'train': worker 1 has found 4 files of" in str(mixed[0])
        assert f"the first that differs is here {lines}/part-3 of 5 bytes" in str(mixed[1])


def test_a_worker_that_does_not_come_is_named_and_one_that_has_finished_is_replaced(lines):
    with cluster(num_workers=2) as servers:
        worker, other = Worker(0, 2, servers.client(0)), servers.client(1)
        with pytest.raises(RequestTimeout, match="still waits for worker 1"):
            counted(worker, Watched(lines), 1.0)
        other.finish()
        source = Watched(lines)
        assert rows_of(counted(worker, source, 15.0)) == 300
        assert len(source.counts) == len(set(source.counts))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_without_servers_each_worker_counts_all_and_the_shares_are_equal(lines, num_workers):
    shares = []
    for rank in range(num_workers):
        rows = Reading(Worker(rank, num_workers)).text(lines)
        batches = rows.shuffled(3, 50).equal_steps().batches(7)
        shares.append([len(batch["value"].tolist()) for batch in batches])  # type: ignore[union-attr]
    assert [sum(share) for share in shares] == [300 // num_workers] * num_workers
    assert len({len(share) for share in shares}) == 1


def test_workers_read_copies_that_each_has_in_a_directory_of_its_own(lines, tmp_path_factory):
    """SparkFiles, archives of YARN and local copies lie elsewhere on each host."""
    copies = tmp_path_factory.mktemp("elsewhere") / "copies"
    shutil.copytree(lines, copies)
    with cluster(num_workers=2) as servers:
        workers = [Worker(rank, 2, servers.client(rank)) for rank in range(2)]
        found = succeeded(run_all(
            lambda: counted(workers[0], Watched(lines), 15.0),
            lambda: counted(workers[1], Watched(copies), 15.0),
        ))  # fmt: skip
        assert [rows_of(each) for each in found] == [300] * 2
        (copies / "part-2").write_text("shorter\n")
        mixed = run_all(
            lambda: counted(workers[0], Watched(lines), 15.0),
            lambda: counted(workers[1], Watched(copies), 15.0),
        )
        assert all(isinstance(error, SettingsError) for error in mixed)
        assert f"the first that differs is here {copies}/part-2 of 8 bytes" in str(mixed[1])


def test_rows_tell_how_many_bad_ones_were_skipped(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}" / "a.csv").write_text("n\n1\nx\n2\n")
    rows = Reading(Worker(0, 1)).csv(tmp_path, {"n": "int64"}, on_bad_data="skip")
    counted_rows = rows.equal_steps().shuffled(1, 2)
    for _ in range(2):
        batches = [batch["n"].tolist() for batch in counted_rows.batches(5)]  # type: ignore[union-attr]
        assert sum(map(len, batches)) == 4
        assert (rows.num_skipped, counted_rows.num_skipped) == (2, 2)


@pytest.mark.parametrize("quoted_newlines", [False, True])
def test_a_file_that_is_skipped_has_no_rows_in_the_count(tmp_path, quoted_newlines):
    for name, text in (("a", "m\n1\n2\n3\n4\n5\n"), ("b", "n,m\n1,2\n3,4\n"), ("c", "m,n\n5,6\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    shares = []
    for rank in range(2):
        rows = Reading(Worker(rank, 2)).csv(
            str(tmp_path), {"n": "int64"}, on_bad_data="skip", quoted_newlines=quoted_newlines
        )
        batches = rows.equal_steps().batches(5)
        shares.append([n for batch in batches for n in batch["n"].tolist()])  # type: ignore[union-attr]
        assert rows.num_skipped == 1
    assert sorted(map(len, shares)) == [1, 2]
    assert sorted(shares[0] + shares[1]) == [1, 3, 6]
