"""What a writer and a reader of HDFS make of attempts that fail, without an HDFS."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from feeding.errors import FileChanged, StorageUnavailable
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.hdfs import client
from feeding.filesystem.hdfs.client import Requests
from feeding.filesystem.hdfs.hadoop_conf import NameNode
from feeding.filesystem.hdfs.reader import HdfsReader
from feeding.filesystem.hdfs.writer import write_whole
from feeding.filesystem.location import parse

PATH = "hdfs://here:1/a"


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


class SlowWriter:
    """Takes 1000 s for each piece; in the first attempts, the second piece fails."""

    def __init__(self, clock: Clock, *, fails: bool) -> None:
        self._clock = clock
        self._fails = fails
        self.num_bytes = 0

    def write(self, piece: bytes) -> None:
        self._clock.now_s += 1000
        if self._fails and self.num_bytes:
            raise RuntimeError("connection to the DataNode was reset")
        self.num_bytes += len(piece)

    def close(self) -> None:
        pass


class SlowFiles:
    """A client whose first `num_failing` writes fail."""

    def __init__(self, clock: Clock, num_failing: int) -> None:
        self._clock = clock
        self._num_failing = num_failing
        self.writers: list[SlowWriter] = []
        self.permissions: set[int] = set()

    def create(self, path: str, options: Any) -> SlowWriter:
        self.permissions.add(options.permission)
        fails = len(self.writers) < self._num_failing
        self.writers.append(SlowWriter(self._clock, fails=fails))
        return self.writers[-1]

    def get_file_info(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(length=self.writers[-1].num_bytes)

    def delete(self, path: str, recursive: bool) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    return clock


@pytest.fixture
def requests_to(monkeypatch) -> Callable[[object], Requests]:
    def made(native: object) -> Requests:
        requests = Requests(NameNode("hdfs://here:1", "from the path"), FileSystemConfig())
        monkeypatch.setattr(requests, "client", lambda: native)
        return requests

    return made


@pytest.mark.fault("F40")
def test_a_write_that_fails_late_is_repeated(clock, requests_to):
    files = SlowFiles(clock, num_failing=1)
    renamed: list[str] = []
    write_whole(
        requests_to(files),
        parse(PATH),
        lambda: [b"one", b"two"],
        lambda at: renamed.append(at.name),
        umask=0o027,
    )
    assert len(files.writers) == 2
    assert len(renamed) == 1
    assert files.permissions == {0o640}


@pytest.mark.fault("F40")
def test_a_write_that_fails_again_behind_its_patience_is_not_repeated(clock, requests_to):
    files = SlowFiles(clock, num_failing=9)
    with pytest.raises(StorageUnavailable, match=f"cannot write {PATH}: .* reset"):
        write_whole(
            requests_to(files), parse(PATH), lambda: [b"one", b"two"], lambda _: None, umask=0
        )
    assert len(files.writers) == 2


class Replaced:
    """A client of a file whose old content cannot be read any more once it is replaced."""

    def __init__(self) -> None:
        self.version = 1

    def get_file_info(self, path: str) -> SimpleNamespace:
        return SimpleNamespace(isdir=False, length=8, modification_time=self.version)

    def read(self, path: str) -> SimpleNamespace:
        opened = self.version

        def read_range(offset: int, length: int) -> bytes:
            if opened != self.version:
                raise RuntimeError("connection to the DataNode was reset")
            return str(opened).encode() * length

        return SimpleNamespace(read_range=read_range)


def test_no_range_of_a_file_that_replaced_an_open_one_is_read(clock, requests_to):
    files = Replaced()
    reader = HdfsReader(requests_to(files), PATH, "/a")
    assert reader.read_range(0, 3) == b"111"
    files.version = 2
    for _ in range(2):
        with pytest.raises(FileChanged, match=f"{PATH} was replaced while it was read"):
            reader.read_range(0, 3)
