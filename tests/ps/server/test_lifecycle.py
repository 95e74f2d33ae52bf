"""A shard is published with all that is known of its workers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ps.config import ServerSettings
from ps.errors import ServerPhaseError
from ps.manifest.manifest import WorkerRank
from ps.protocol.permissions import ServerPhase
from ps.server.lifecycle import Lifecycle

ZERO, ONE = WorkerRank(0), WorkerRank(1)


class Gate:
    """Notes what it is told, and whether anybody could have pushed by then."""

    def __init__(self, life: Lifecycle) -> None:
        self.life = life
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any) -> bool:
            assert self.life.shard is None, f"{name}{arguments} came after the shard was published"
            self.told.append((name, *arguments))
            if self.told[-1] == ("fence", 0, 3):  # meanwhile
                self.life.fence(ONE, 7)
                self.life.lose(ZERO, 3)
            return True

        return note


class Shard:
    def __init__(self, life: Lifecycle) -> None:
        self.gate = Gate(life)


@pytest.mark.fault("F11")
def test_fences_and_losses_are_at_the_gate_before_anybody_can_push():
    life = Lifecycle(ServerSettings(rank=0, num_servers=1, num_workers=2))
    life.fence(ZERO, 3)
    life.finish_unfilled(ONE)
    life.lose(ONE, None)
    shard: Any = Shard(life)
    assert life.install(shard)
    assert shard.gate.told == [
        ("fence", 0, 3),
        ("finished", 1),
        ("lose", 1, 0),
        ("fence", 1, 7),
        ("lose", 0, 3),
    ]
    assert life.shard is shard
    other: Any = Shard(life)
    assert not life.install(other)
    assert other.gate.told == []


@pytest.mark.fault("F08")
def test_a_push_that_sees_a_restored_server_serve_finds_its_shard(monkeypatch):
    life = Lifecycle(ServerSettings(rank=0, num_servers=1, num_workers=1))
    life.begin_restore()
    shard: Any = Shard(life)
    found: list[Any] = []

    def push() -> None:
        try:
            found.append(life.loaded())
        except ServerPhaseError as error:
            found.append(error)

    pushing = threading.Thread(target=push)
    move = life._move

    def move_and_be_seen(to: ServerPhase, reason: str = "") -> None:
        move(to, reason)
        pushing.start()
        pushing.join(0.2)

    monkeypatch.setattr(life, "_move", move_and_be_seen)
    assert life.install(shard)
    pushing.join()
    assert found == [shard]
