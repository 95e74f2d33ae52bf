"""Reading ahead: how much is asked for, and when."""

from __future__ import annotations

import pytest

from feeding.errors import FileChanged
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.local import LocalReader
from feeding.filesystem.readahead import ReadAhead

CONFIG = FileSystemConfig(range_bytes=100, ranges_in_flight=3)


class Watched:
    """A file that is somewhere else, and notes what was begun and what was taken."""

    def __init__(self, path):
        self._file = LocalReader(path)
        self.path, self.size_bytes = self._file.path, self._file.size_bytes
        self.version = self._file.version
        self.begun: list[tuple[int, int]] = []
        self.taken: list[int] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def read_range(self, offset, length):
        return self._file.read_range(offset, length)

    def start_range(self, offset, length):
        self.begun.append((offset, length))

        def take():
            self.taken.append(offset)
            return self.read_range(offset, length)

        return take

    def close(self):
        self._file.close()


@pytest.fixture
def watched(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 4)
    return Watched(path)


def test_so_many_ranges_are_under_way_and_no_more(watched):
    with ReadAhead(watched, CONFIG) as file:
        assert watched.begun == []
        file.read(1)
        assert [offset for offset, _ in watched.begun] == [0, 100, 200, 300]
        assert watched.taken == [0]
        file.read(99)
        assert len(watched.begun) == 4
        file.read(1)
        assert [offset for offset, _ in watched.begun] == [0, 100, 200, 300, 400]
        assert watched.taken == [0, 100]


def test_ranges_are_whole_multiples_but_for_the_first_and_last(watched):
    with ReadAhead(watched, FileSystemConfig(range_bytes=300), begin=130) as file:
        assert len(file.read()) == 870
    assert watched.begun == [(130, 170), (300, 300), (600, 300), (900, 100)]


@pytest.mark.parametrize(
    ("begin", "until", "alone"),
    [(0, 0, [0]), (0, 300, [0, 100, 200, 300]), (130, 250, [130, 200, 300])],
)
def test_little_is_fetched_ahead_from_where_it_is_unlikely_to_be_read(watched, begin, until, alone):
    with ReadAhead(watched, CONFIG, begin=begin, ahead_until=until) as file:
        file.read(1)
        assert [offset for offset, _ in watched.begun] == [at for at in alone if at <= until]
        file.read(alone[-1] + 99 - begin)
        assert [offset for offset, _ in watched.begun] == alone
        file.read(1)  # it is read on
        assert len(watched.begun) == len(alone) + 4
        assert len(file.read()) == 1000 - alone[-1] - 101


def test_closing_closes_the_file_and_reading_on_is_refused(watched):
    file = ReadAhead(watched, CONFIG)
    file.read(150)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        watched.read_range(0, 1)


@pytest.mark.parametrize("begin", [-1, 1001])
def test_a_byte_that_the_file_does_not_have_is_refused(watched, begin):
    with pytest.raises(ValueError, match="which has 1000 bytes"):
        ReadAhead(watched, CONFIG, begin=begin)
    watched.close()


def test_a_file_of_this_host_is_read_in_place_and_then_range_by_range(watched, tmp_path):
    with ReadAhead(LocalReader(tmp_path / "file"), CONFIG, begin=445) as file:
        block = bytearray(55)
        assert file.readinto(block) == 55
        assert [len(part) for part in file.ranges()] == [100] * 5
        assert file.tell() == 1000
        assert file.readinto(block) == 0
    watched.close()


@pytest.mark.fault("F46")
@pytest.mark.parametrize("how", ["in place", "range by range"])
def test_a_file_that_shrinks_is_refused_and_not_taken_as_over(tmp_path, how):
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with ReadAhead(LocalReader(path), CONFIG) as file:
        assert len(file.read(100)) == 100
        path.write_bytes(bytes(450))
        read_on = file.readall if how == "in place" else lambda: list(file.ranges())
        with pytest.raises(
            FileChanged, match=r"file now has no byte after 450.*it had 1000 bytes when"
        ):
            read_on()
