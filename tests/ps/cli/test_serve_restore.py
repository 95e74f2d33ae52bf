"""The end of a hand-started server that restores."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ps.cli import serve
from ps.server.handlers import Service
from tests.support.ps_cluster import ADD, WAIT_S, cluster, filled, make_manifest
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.socket, pytest.mark.fault("F08")]


class Left(BaseException):
    """The process has ended."""


def saved(root: Path) -> str:
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.save(root, 1)
    return str(root)


def test_a_signal_ends_a_server_while_it_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To compile and to read a large checkpoint takes minutes."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"s" * 32)
    checkpoints = saved(tmp_path / "saves")
    caught: list[int] = []
    goes_on = threading.Event()

    def held(service: Service, manifest: Any) -> Any:
        caught.append(signal.SIGTERM)
        assert goes_on.wait(WAIT_S / 2), "it restores to its end"
        raise RuntimeError("the process has ended meanwhile")

    def leave(status: int) -> None:
        assert status == 0
        raise Left

    # Of the tests' own process.
    monkeypatch.setattr(serve, "forbid_core_dumps", lambda: None)
    monkeypatch.setattr(serve, "_signals_caught", lambda: contextlib.nullcontext(caught))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(Service, "_new_dense", held)
    needed = ["--num-workers", "1", "--secret-file", str(secret), "--cluster-id", "c"]
    with pytest.raises(Left):
        serve.main([*needed, "--restore", checkpoints])
    goes_on.set()
    wait_until(
        lambda: "ps-restore" not in {each.name for each in threading.enumerate()}, "the thread"
    )
