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


def test_a_lone_worker_has_its_own_value_without_asking():
    servers = Servers()
    assert others(servers, num_workers=1).rendezvous("key", b"own") == {1: b"own"}
    assert servers.asked == []


def test_the_model_is_built_from_the_batch_of_the_lowest_rank():
    assert FirstBatch(others(Servers(b"of the chief"))).agree(b"own") == b"of the chief"
    assert FirstBatch(others(Servers())).agree(b"own") == b"own"


def test_an_epoch_without_a_batch_is_told_once_and_each_epoch_has_its_own_key():
    servers = Servers()
    first_batch = FirstBatch(others(servers))
    for epoch in range(2):
        first_batch.begin_epoch("fit/0", epoch)
        assert first_batch.agree_without() is None
        assert first_batch.agree_without() is None
    first_batch.begin_epoch("fit/0", 2)
    assert first_batch.agree(b"own") == b"own"
    assert servers.asked == ["fit/0/0/build", "fit/0/1/build", "fit/0/2/build"]


def test_batches_outside_of_fit_have_keys_of_their_own():
    servers = Servers()
    first_batch = FirstBatch(others(servers))
    assert first_batch.agree(b"own") == b"own"
    assert servers.asked == ["apart/0/build"]


class PassedServers(Servers):
    """The others have ended the first epochs without a batch, and the lost process had none."""

    def __init__(self, *passed: str) -> None:
        super().__init__()
        self._passed = passed

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> dict[int, bytes]:
        found = super().rendezvous(key, value, timeout_s=timeout_s)
        return dict.fromkeys(found, b"") if key in self._passed else found


def test_a_worker_that_is_started_again_with_a_batch_meets_the_others_in_the_next_epoch():
    servers = PassedServers("fit/0/0/build", "fit/0/1/build")
    first_batch = FirstBatch(others(servers))
    first_batch.begin_epoch("fit/0", 1)
    assert first_batch.agree(b"own") == b"own"
    assert servers.asked == ["fit/0/1/build", "fit/0/2/build"]
