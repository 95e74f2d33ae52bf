"""A server that another process has replaced must not answer any more."""

from __future__ import annotations

import pytest

from ps.checkpoint import fencing
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.storage import storage_at
from ps.errors import ServerPhaseError


@pytest.mark.fault("F11")
def test_a_replaced_server_is_refused_at_its_next_look(tmp_path, monkeypatch):
    monkeypatch.setattr(fencing, "LOOK_S", 0.0)
    old = GenerationFence(storage_at(str(tmp_path)), "c", 0)
    old.claim()
    old.check()
    new = GenerationFence(storage_at(str(tmp_path)), "c", 0)
    new.claim()
    new.check()
    for _ in range(2):
        with pytest.raises(ServerPhaseError):
            old.check()


@pytest.mark.fault("F11")
def test_a_server_of_another_rank_or_cluster_replaces_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(fencing, "LOOK_S", 0.0)
    first = GenerationFence(storage_at(str(tmp_path)), "c", 0)
    first.claim()
    GenerationFence(storage_at(str(tmp_path)), "c", 1).claim()
    first.check()
