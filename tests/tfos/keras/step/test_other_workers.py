"""Other workers: who is told to wait for this one, and how an unbuilt model's workers agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.keras.step.first_batch import FirstBatch
from tfos.keras.step.other_workers import RENDEZVOUS_TIMEOUT_S, OtherWorkers


class Servers:
    """Notes what they are asked; a rendezvous has the other worker's value beside the own one."""

    def __init__(self, other: bytes = b"") -> None:
        self.asked: list[Any] = []
        self._other = other

    def join(self) -> None:
        self.asked.append("join")

    def leave(self) -> None:
        self.asked.append("leave")

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> dict[int, bytes]:
        assert timeout_s == RENDEZVOUS_TIMEOUT_S
        self.asked.append(key)
        return {1: value, 0: self._other}


def others(servers: Servers, num_workers: int = 2) -> OtherWorkers:
    ctx: Any = SimpleNamespace(num_workers=num_workers, worker_rank=1)
    return OtherWorkers(servers, ctx)


def test_servers_hear_of_a_worker_that_leaves_and_of_its_return_once_each():
    servers = Servers()
    workers = others(servers)
    workers.attached()
    for change in (workers.join, workers.leave, workers.leave, workers.join, workers.join):
        change()
    assert servers.asked == ["leave", "join"]


def test_servers_that_wait_for_nobody_hear_nothing():
    servers = Servers()
    workers = others(servers)
    workers.leave()
    workers.join()
    assert servers.asked == []


def test_a_worker_whose_return_failed_returns_at_the_next_step(monkeypatch: pytest.MonkeyPatch):
    servers = Servers()
    workers = others(servers)
    workers.attached()
    workers.leave()
    with monkeypatch.context() as broken:
        broken.setattr(servers, "join", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            workers.join()
    workers.join()
    assert servers.asked == ["leave", "join"]


def test_a_worker_that_was_interrupted_as_it_left_returns_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
):
    """The servers may know that it has left: they would refuse its next push."""
    servers = Servers()
    workers = others(servers)
    workers.attached()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(servers, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.leave()
    workers.join()
    assert servers.asked == ["join"]


def test_a_lone_worker_has_its_own_value_without_asking():
    servers = Servers()
    assert others(servers, num_workers=1).rendezvous("key", b"own") == {1: b"own"}
    assert servers.asked == []


PROCESS = b"another process."


def test_the_model_is_built_from_the_batch_of_the_lowest_rank():
    chief = Servers(PROCESS + b"of the chief")
    assert FirstBatch(others(chief)).agree(b"own") == b"of the chief"
    assert FirstBatch(others(Servers(PROCESS))).agree(b"own") == b"own"


def test_an_epoch_without_a_batch_is_told_once_and_all_rendezvous_are_numbered():
    servers = Servers(PROCESS)
    first_batch = FirstBatch(others(servers))
    for _ in range(2):
        first_batch.begin_epoch()
        assert first_batch.agree_without() is None
        assert first_batch.agree_without() is None
    first_batch.begin_epoch()
    assert first_batch.agree(b"own") == b"own"
    assert servers.asked == ["build/1", "build/2", "build/3"]


class PassedServers(Servers):
    """Two rendezvous were over, without a batch, before this worker was started again."""

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> dict[int, bytes]:
        found = super().rendezvous(key, value, timeout_s=timeout_s)
        return dict.fromkeys(found, PROCESS) if key in ("build/1", "build/2") else found


@pytest.mark.parametrize("own", [b"own", b""])
def test_a_worker_that_is_started_again_passes_the_rendezvous_that_are_over(own: bytes):
    servers = PassedServers(PROCESS)
    assert FirstBatch(others(servers)).agree(own) == (own or None)
    assert servers.asked == ["build/1", "build/2", "build/3"]
