"""The end of a hand-started server that restores."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.storage import storage_at
from ps.cli import serve
from ps.errors import ServerPhaseError
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


def restore_until_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[Service, list[int]], None],
) -> int:
    """Tell a server to end while it restores; return its exit status."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"s" * 32)
    checkpoints = saved(tmp_path / "saves")
    caught: list[int] = []
    goes_on = threading.Event()

    def held(service: Service, manifest: Any) -> Any:
        tell(service, caught)
        assert goes_on.wait(WAIT_S / 2), "it restores to its end"
        raise RuntimeError("the process has ended meanwhile")

    def leave(status: int) -> None:
        raise Left(status)

    # Of the tests' own process.
    monkeypatch.setattr(serve, "forbid_core_dumps", lambda: None)
    monkeypatch.setattr(serve, "_signals_caught", lambda: contextlib.nullcontext(caught))
    ended: list[str] = []
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: ended.append("handlers"))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(Service, "_new_dense", held)
    needed = ["--num-workers", "1", "--secret-file", str(secret), "--cluster-id", "c"]
    with pytest.raises(Left) as left:
        serve.main([*needed, "--restore", checkpoints])
    goes_on.set()
    wait_until(
        lambda: "ps-restore" not in {each.name for each in threading.enumerate()}, "the thread"
    )
    assert ended == ["handlers"], "of a temporary directory of kernels"
    return int(left.value.args[0])


def test_a_signal_ends_a_server_while_it_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To compile and to read a large checkpoint takes minutes."""

    def tell(_service: Service, caught: list[int]) -> None:
        caught.append(signal.SIGTERM)

    assert restore_until_told(tmp_path, monkeypatch, tell) == 0


@pytest.mark.fault("F11")
def test_a_server_that_is_replaced_while_it_restores_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def is_refused(service: Service) -> bool:
        assert service._refuse_if_replaced is not None
        try:
            service._refuse_if_replaced()  # as before each request
        except ServerPhaseError:
            return True
        return False

    def tell(service: Service, _caught: list[int]) -> None:
        GenerationFence(storage_at(tmp_path / "saves"), "c", 0).claim()
        wait_until(lambda: is_refused(service), "a look at the directory")

    assert restore_until_told(tmp_path, monkeypatch, tell) == serve.REPLACED_STATUS
    assert "was replaced by start" in capsys.readouterr().err
