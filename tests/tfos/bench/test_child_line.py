"""A benchmark waits for what its child processes write, but not without end."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ps.errors import PSError
from tfos.bench import servers
from tfos.bench.reference import tensorflow_ps
from tfos.bench.reference.child_line import child_line

SILENT = "import sys; sys.stdin.read()"

pytestmark = pytest.mark.slow  # starts processes


@contextlib.contextmanager
def child(program: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_lines_come_one_by_one():
    with child("import sys\nfor line in sys.stdin: print(line.strip() * 2, flush=True)") as echo:
        assert echo.stdin is not None
        for text in ("a", "b"):
            echo.stdin.write(f"{text}\n")
            echo.stdin.flush()
            assert child_line(echo, "an echo", 60.0) == f"{text}{text}\n"


def test_a_child_that_has_ended_is_told_with_its_status():
    with child("raise SystemExit(3)") as ended, pytest.raises(PSError) as told:
        child_line(ended, "a server to listen", 60.0)
    assert f"a server to listen; pid {ended.pid} ended with status 3" in str(told.value)


def test_a_child_that_says_nothing_is_not_awaited_without_end():
    with child(SILENT) as silent, pytest.raises(PSError) as told:
        child_line(silent, "a server to listen", 0.01)
    assert f"waited 0.01 s for a server to listen (pid {silent.pid})" in str(told.value)


@pytest.mark.timeout(60)
def test_servers_and_references_are_awaited_so(monkeypatch):
    for module in (servers, tensorflow_ps):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)
    with child(SILENT) as silent:
        with pytest.raises(PSError, match="for a server to listen"):
            servers._announced(silent)
        peer = tensorflow_ps.TensorFlowPeer([silent], io.BytesIO(b"its last words"))
        with pytest.raises(PSError, match="for TensorFlow's coordinator to answer") as told:
            peer.read()
    assert str(told.value).endswith("its last words")
