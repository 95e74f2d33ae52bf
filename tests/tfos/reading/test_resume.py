"""What the chief makes of the saved positions: too many files to list, a second call, junk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from feeding.errors import FileChanged
from feeding.formats.csv.options import CsvRequest
from feeding.formats.csv.source import CsvSource
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.positions import (
    EpochPosition,
    Front,
    Position,
    choice,
    fingerprint,
    versions,
)
from feeding.reading.splits import SourceFile
from ps.client.client import PSClient
from ps.manifest.manifest import Hyper, WorkerRank
from ps.metadata import pushed, text_of
from ps.server.rendezvous import Rendezvous
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tfos.errors import SettingsError
from tfos.reading.resume import (
    RENDEZVOUS_TIMEOUT_S,
    course_of,
    files_metadata,
    position_name,
)


class Servers:
    """Keep metadata as JSON, and the values of rendezvous, as ps:0 does."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.rendezvous = Rendezvous(1)

    def metadata(self) -> dict[str, Any]:
        return {name: msgspec.json.decode(text) for name, text in self.texts.items()}

    def set_metadata(self, name: str, value: Any, *, of_run: bool = False) -> None:
        self.texts.pop(name, None)
        if value is not None:
            self.texts[name] = text_of(name, value).encode()


class Chief:
    """A process of the one worker: it counts its uses of a key anew, as PSClient does."""

    is_chief = True
    rank = 0
    num_workers = 1
    restore_s = 3600.0

    def __init__(self, servers: Servers | PSClient) -> None:
        self.metadata, self.set_metadata = servers.metadata, servers.set_metadata
        self._rendezvous = servers.rendezvous if isinstance(servers, Servers) else Rendezvous(1)
        self._uses: Counter[str] = Counter()
        self.limits_s: dict[str, float] = {}

    def absolute_path(self, path: str) -> str:
        return path

    def ps_client(self) -> Chief:
        return self

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> Any:
        self.limits_s[key] = timeout_s
        name = f"{key}#{self._uses[key]}"
        self._uses[key] += 1
        self._rendezvous.arrive(name, WorkerRank(0), value)
        return self._rendezvous.result(name)


def new_run(servers: Servers) -> Chief:
    """Return the chief of a run that goes on from what the servers keep."""
    servers.rendezvous = Rendezvous(1)
    return Chief(servers)


def files_of(count: int, size_bytes: int = 1000) -> tuple[SourceFile, ...]:
    root = "hdfs://namenode:8020/some/directory"
    return tuple(SourceFile(f"{root}/part-{n:05d}.tfrecord", size_bytes) for n in range(count))


def stand(
    servers: Servers | PSClient, files: tuple[SourceFile, ...], row: int, run_number: int = 0
) -> Position:
    """Let the one worker note that it has handed out so many rows."""
    place = EpochPosition(0, 0, Front(((0, row),), 1)) if row else EpochPosition(0)
    told = versions(files), choice(files)
    at = Position(fingerprint(files), None, 1, run_number, 0, 1, place, *told)
    if row:
        servers.set_metadata(*files_metadata("train", files))
        servers.set_metadata(position_name("train", 0), at)
    return at


def test_runs_that_were_stopped_too_often_are_told_how_to_go_on(monkeypatch):
    files, servers = files_of(1), Servers()
    own = stand(servers, files, row=3)
    monkeypatch.setattr("ps.metadata.MAX_ENTRY_BYTES", 20)
    text = r"stopped 1 times within .* all their 1 workers .* Use another name"
    with pytest.raises(SettingsError, match=text):
        course_of(new_run(servers), "train", files, own)


def test_files_too_many_to_be_listed_go_on_and_are_still_compared():
    files, servers = files_of(10_000), Servers()
    assert files_metadata("train", files)[1] is None
    stand(servers, files, row=3)
    own = stand(servers, files, row=0)
    others = files_of(10_000, size_bytes=999)
    with pytest.raises(FileChanged, match="fingerprint"):
        course_of(new_run(servers), "train", others, stand(servers, others, row=0))
    assert course_of(new_run(servers), "train", files, own).stops == (
        (EpochPosition(0, 0, Front(((0, 3),), 1)),),
    )


def test_a_run_does_not_go_on_with_another_choice_of_rows(tmp_path):
    """Its place counts rows that the filter, or the CSV format, has left."""
    words = [f"word {n}" for n in range(10)]
    pq.write_table(pa.table({"x": range(10), "w": words}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("x\n" + "1\n" * 9)

    def parquet(filters: Any) -> ParquetSource:
        return ParquetSource(str(tmp_path / "a.parquet"), ParquetRequest(filters=filters))

    def csv(**options: Any) -> CsvSource:
        return CsvSource(str(tmp_path / "a.csv"), CsvRequest(**options))

    same = [("w", "in", pa.array(words)), ("x", "=", 5)]
    alike = [[["x", "==", np.int64(5)], ["w", "in", {*words}]]]
    for first, again, other in (
        (parquet(same), parquet(alike), parquet([("w", "in", words[1:]), ("x", "=", 5)])),
        (parquet(None), parquet(pc.field("x") >= 0), parquet([("x", ">=", 0)])),
        (csv(), csv(), csv(header=["x"])),
        (csv(header=False), csv(header=False, escape="\\"), csv()),
        (csv(quoted_newlines=True), csv(quoted_newlines=True), csv()),
    ):
        servers = Servers()
        files = tuple(first.files())
        stand(servers, files, row=3)
        own = stand(servers, files, row=0)
        with pytest.raises(FileChanged, match="another filter, CSV header or quoting"):
            course_of(new_run(servers), "train", files, stand(servers, tuple(other.files()), row=0))
        own = stand(servers, tuple(again.files()), row=0)
        assert course_of(new_run(servers), "train", files, own).stops
        stand(servers, files, row=3)  # of a release that has noted no choice of rows
        name = position_name("train", 0)
        servers.set_metadata(name, {**servers.metadata()[name], "choice": ""})
        own = stand(servers, tuple(other.files()), row=0)
        assert course_of(new_run(servers), "train", files, own).stops


def test_the_others_wait_as_long_as_the_chief_may_restore_before_it_reads():
    chief, files = new_run(Servers()), files_of(2)
    course_of(chief, "train", files, stand(Servers(), files, row=0))
    assert chief.limits_s["reading/train/arrivals"] == RENDEZVOUS_TIMEOUT_S + chief.restore_s


def test_a_second_call_in_the_same_run_goes_on_where_the_rows_are_then():
    files, servers = files_of(2), Servers()
    chief, own = Chief(servers), stand(servers, files, row=0)
    assert course_of(chief, "train", files, own).run_number == 0
    stand(servers, files, row=3)
    again = course_of(chief, "train", files, own)
    assert (again.run_number, again.stops) == (1, ((EpochPosition(0, 0, Front(((0, 3),), 1)),),))
    stand(servers, files, row=5, run_number=1)
    assert len(course_of(chief, "train", files, own).stops) == 2


@pytest.mark.parametrize("calls", [1, 2])
def test_a_chief_that_is_started_again_leaves_the_positions_of_its_run(calls: int):
    files, servers = files_of(2), Servers()
    chief, own = Chief(servers), stand(servers, files, row=0)
    agreed = []
    for call in range(calls):
        agreed.append(course_of(chief, "train", files, own))
        stand(servers, files, row=3 + call, run_number=call)
    before = dict(servers.texts)
    chief = Chief(servers)
    assert [course_of(chief, "train", files, own) for _ in range(calls)] == agreed
    assert servers.texts == before
    stand(servers, files, row=9, run_number=calls - 1)
    resumed = course_of(new_run(servers), "train", files, own)
    assert resumed.run_number == calls
    assert resumed.stops[-1] == (EpochPosition(0, 0, Front(((0, 9),), 1)),)


@pytest.mark.socket
@pytest.mark.fault("F08")
def test_a_course_is_not_lost_with_ps_0(tmp_path: Path):
    """Else the next run would go on from where the one before this one began."""
    manifest = make_manifest(rule=ADD)
    hyper, files = Hyper(1.0), files_of(2)
    with cluster("inproc") as bed:
        client = bed.workers(manifest, filled(manifest))[0]
        at = stand(client, files, row=3)
        client.save(tmp_path, 0)
        chief = Chief(client)
        course = course_of(chief, "train", files, at)
        assert course.run_number == 1
        bed.restart(0, tmp_path)
        later = msgspec.structs.replace(at, run_number=1, place=EpochPosition(1))
        noted = pushed(position_name("train", 0), later)
        client.push(filled(manifest, 1.0), hyper=hyper, rows=1, metadata=noted)
        client.push(filled(manifest, 1.0), hyper=hyper, rows=1)
        resumed = course_of(Chief(client), "train", files, at)
        assert (resumed.run_number, resumed.first_epoch) == (2, 1)


@pytest.mark.parametrize("what", ["course", "worker/0", "files"])
def test_notes_that_are_no_positions_are_named(what):
    files, servers = files_of(2), Servers()
    own = stand(servers, files, row=3)
    servers.set_metadata(f"reading/train/{what}", ["elsewhere"])
    with pytest.raises(SettingsError, match=r"reading/train/\.\.\. are not positions"):
        course_of(new_run(servers), "train", files, own)


def test_a_run_goes_on_with_copies_in_another_directory():
    """SparkFiles are in another directory in each executor and application."""

    def copied(to: str, size_bytes: int = 10) -> tuple[SourceFile, ...]:
        return tuple(SourceFile(f"/tmp/{to}/{name}", size_bytes) for name in ("a.csv", "b.csv"))

    servers = Servers()
    stand(servers, copied("spark-1"), row=3)
    found = copied("spark-2")
    course = course_of(new_run(servers), "train", found, stand(servers, found, row=0))
    assert (course.run_number, course.stops) == (1, ((EpochPosition(0, 0, Front(((0, 3),), 1)),),))
    stand(servers, copied("spark-2"), row=4, run_number=1)
    found = copied("spark-3", size_bytes=11)
    with pytest.raises(FileChanged, match=r"a\.csv had 10 bytes, now 11; b\.csv had 10"):
        course_of(new_run(servers), "train", found, stand(servers, found, row=0))


def written(version: str, *, count: int = 2, root: str = "s3://bucket/some") -> list[SourceFile]:
    return [SourceFile(f"{root}/part-{n:05d}", 10, version=version) for n in range(count)]


def resumed(servers: Servers, files: list[SourceFile]) -> int:
    own = stand(servers, tuple(files), row=0)
    return course_of(new_run(servers), "train", files, own).run_number


@pytest.mark.parametrize("count", [2, 20_000])
def test_files_that_were_written_anew_in_equal_sizes_are_refused(count: int):
    servers = Servers()
    stand(servers, tuple(written("etag a", count=count)), row=3)
    told = "part-00000 was etag a, now etag b" if count == 2 else "files were written again"
    with pytest.raises(FileChanged, match=told):
        resumed(servers, written("etag b", count=count))
    assert resumed(servers, written("etag a", count=count)) == 1


def test_versions_of_another_kind_and_copies_of_a_host_are_not_compared():
    for root, before, now in (
        ("s3://bucket/some", "etag a", "changed 7"),
        ("s3://bucket/some", "etag a", ""),
        ("/mnt/some", "changed 7", "changed 8"),
        ("some", "changed 7", "changed 8"),
    ):
        servers = Servers()
        stand(servers, tuple(written(before, root=root)), row=3)
        assert resumed(servers, written(now, root=root)) == 1


def test_the_position_in_a_thousand_pieces_side_by_side_comes_with_a_push():
    front = Front(tuple((piece, 9_999_999) for piece in range(9000, 10_000)), 10_000)
    place = EpochPosition(99, front=front, taken=1, rows=65_536, end=front, width=1000)
    own = Position("f" * 24, 2**31, 65_536, 9, 999, 1000, place, "v" * 60, "c" * 24)
    assert json.loads(pushed(position_name("rows", 999), own).text)["place"][5][1] == 10_000
