"""The numbers of a server's processes: the newest is found, whatever is lost of its record."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from ps.checkpoint import fencing, storage
from ps.checkpoint.fencing import Generation, GenerationFence
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.errors import CheckpointError
from ps.manifest.manifest import Hyper
from ps.server.server import PSServer
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest

COPIES = ("ps-0.epoch", ".ps-0.epoch.copy")


def guard(root: Path) -> GenerationFence:
    return GenerationFence(storage_at(root), "c", 0)


def look(fence: GenerationFence) -> Generation | None:
    """As a server looks, again and again."""
    newer = fence.successor()
    if newer is None:
        fence.repair()
    return newer


def claimed(root: Path, number: int) -> GenerationFence:
    """The server that is start `number`, at work."""
    starts = []
    for _ in range(number):
        starts.append(guard(root))
        starts[-1].claim()
    assert starts[-1].number == number
    return starts[-1]


@pytest.mark.fault("F11")
@pytest.mark.parametrize("name", COPIES)
def test_a_damaged_copy_ends_no_healthy_server_and_loses_no_number(tmp_path: Path, name: str):
    server = claimed(tmp_path, 3)
    path = tmp_path / name
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    for content in [*damaged, b"", b"{", whole[:-40], whole * 2, whole.replace(b":3,", b":9,")]:
        path.write_bytes(content)
        assert server.successor() is None, content
        assert guard(tmp_path).number == 4, content


@pytest.mark.fault("F11")
@pytest.mark.parametrize("lost", [COPIES[:1], COPIES[1:]])
def test_a_restarted_server_outnumbers_its_predecessor_though_a_copy_is_lost(tmp_path: Path, lost):
    claimed(tmp_path, 3)
    for name in lost:
        (tmp_path / name).unlink()
    assert guard(tmp_path).number == 4


@pytest.mark.fault("F11")
def test_a_server_writes_again_what_was_lost_of_its_record(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(fencing, "REPAIR_S", 0.0)
    server = claimed(tmp_path, 3)
    before = {name: (tmp_path / name).read_bytes() for name in COPIES}
    (tmp_path / "step-1").mkdir()
    for content in (None, b"{", before[COPIES[0]].replace(b":3,", b":9,")):
        for name in COPIES:
            (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(
                content
            )
        assert look(server) is None
        assert {name: (tmp_path / name).read_bytes() for name in COPIES} == before
        assert guard(tmp_path).number == 4
    assert "was lost or damaged; ps:0 has written it again" in caplog.text


def test_a_server_writes_nothing_where_the_disk_is_away(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fencing, "REPAIR_S", 0.0)
    root = tmp_path / "mounted"
    server = claimed(root, 1)
    shutil.rmtree(root)
    assert look(server) is None
    assert not root.exists()
    root.mkdir()
    assert look(server) is None
    assert not list(root.iterdir())


def test_what_another_cluster_or_a_successor_has_written_stays(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fencing, "REPAIR_S", 0.0)
    first, other = claimed(tmp_path, 1), GenerationFence(storage_at(tmp_path), "other", 0)
    other.claim()
    assert look(first) is look(other) is None
    assert GenerationFence(storage_at(tmp_path), "other", 0).number == 2
    second = guard(tmp_path / "2")
    second.claim()
    third = guard(tmp_path / "2")
    third.claim()
    assert look(second) == third._mine
    assert look(third) is None


@pytest.mark.fault("F11")
def test_of_two_processes_with_one_number_the_later_one_is_the_server(tmp_path: Path):
    """Both copies are lost while a frozen server cannot write them again."""
    frozen = claimed(tmp_path, 1)
    for name in COPIES:
        (tmp_path / name).unlink()
    later = claimed(tmp_path, 1)
    assert look(frozen) == later._mine
    assert look(later) is None


LOST = {
    "lost": None,
    "empty": b"",
    "cut": b'{"cluster_id":"c","number":3,"ho',
    "without its digest": b'{"cluster_id":"c","number":1,"host":"h","pid":1,"token":"ab"}',
    "noise": bytes(range(256)),
}


@pytest.mark.fault("F11", "F41")
@pytest.mark.parametrize("second", LOST)
@pytest.mark.parametrize("first", LOST)
def test_a_start_outnumbers_all_before_it_though_both_copies_are_gone(
    tmp_path: Path, first: str, second: str
):
    """The server was killed, so nobody writes them again; its predecessor is frozen."""
    frozen = claimed(tmp_path, 3)
    (tmp_path / "step-1").mkdir()
    for name, how in zip(COPIES, (first, second), strict=True):
        content = LOST[how]
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    for number in range(2):
        later = guard(tmp_path)
        assert later.number > 3 + number
        later.claim()
        assert look(later) is None
        assert look(frozen) == later._mine


@pytest.mark.fault("F11", "F41")
def test_any_damaged_bytes_of_both_copies_leave_a_start_above_those_before(tmp_path: Path):
    claimed(tmp_path, 3)
    whole = (tmp_path / COPIES[0]).read_bytes()
    dice = random.Random(7)
    for _ in range(200):
        for name in COPIES:
            content = bytearray(whole)
            for _ in range(dice.randint(1, 4)):
                content[dice.randrange(len(whole))] ^= dice.randint(1, 255)
            (tmp_path / name).write_bytes(content[: dice.choice([None, dice.randrange(80)])])
        assert guard(tmp_path).number > 3, [(tmp_path / name).read_bytes() for name in COPIES]


@pytest.mark.fault("F11")
def test_the_first_server_of_an_empty_directory_is_start_1(tmp_path: Path):
    assert guard(tmp_path / "new").number == 1


class Failing(LocalStorage):
    """A file system that fails this often before it answers."""

    def __init__(self, root: Path, *, opens: int = 0, lists: int = 0) -> None:
        super().__init__(root)
        self.opens, self.lists = opens, lists

    def open(self, name: str) -> BinaryIO:
        self.opens -= 1
        if self.opens >= 0:
            raise OSError(errno.EIO, "it fails over")
        return super().open(name)

    def names(self, directory: str = "") -> list[str]:
        self.lists -= 1
        if self.lists >= 0:
            raise OSError(errno.EIO, "it fails over")
        return super().names(directory)


@pytest.mark.fault("F11")
@pytest.mark.parametrize(
    ("is_lost", "failures"), [(False, {"opens": 1}), (True, {"lists": 1}), (True, {"opens": 3})]
)
def test_a_failed_read_does_not_count_as_no_number(tmp_path: Path, is_lost, failures):
    """It began as start 1, which its own predecessor's file and the workers then refused."""
    claimed(tmp_path, 3)
    (tmp_path / "step-1").mkdir()
    for name in COPIES if is_lost else ():
        (tmp_path / name).unlink()
    later = GenerationFence(Failing(tmp_path, **failures), "c", 0)
    assert later.number > 3
    later.claim()


@pytest.mark.fault("F11")
def test_a_start_that_cannot_read_its_number_ends(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)
    claimed(tmp_path, 3)
    with pytest.raises(
        CheckpointError, match=r"cannot read .*ps-0.epoch: it fails over.*not start without"
    ):
        GenerationFence(Failing(tmp_path, opens=1000), "c", 0)


@pytest.mark.socket
@pytest.mark.fault("F11", "F30")
def test_live_workers_go_on_with_a_server_whose_predecessors_numbers_are_lost(tmp_path: Path):
    manifest = make_manifest(600, rule=ADD)
    ones = filled(manifest, 1.0)
    with cluster("tcp", num_servers=1) as bed:
        place = bed.servers[0].settings
        bed.servers[0].close()

        def start(port: int) -> PSServer:
            fence = GenerationFence(storage_at(tmp_path), bed.credentials.cluster_id, 0)
            bed.servers[0] = PSServer(place, bed.credentials, guard=fence)
            bed.servers[0].bind_tcp("127.0.0.1", port)
            if port:
                bed.servers[0].start_restoring(tmp_path)
            else:
                bed.servers[0].start()
            return bed.servers[0]

        for _ in range(2):
            start(0).close()  # the next ones are start 2 and 3
        endpoint = start(0).endpoint
        worker = bed.client(endpoints=[endpoint])
        worker.seed(manifest, filled(manifest))
        worker.push(ones, hyper=Hyper(1.0), rows=1)
        worker.save(tmp_path, 1)
        bed.servers[0].close(0.5)
        for name in COPIES:
            (tmp_path / name).unlink()
        start(endpoint.port)
        worker.push(ones, hyper=Hyper(1.0), rows=1)
        assert set(bed.pulled(worker)["trainable"].tolist()) == {2.0}
