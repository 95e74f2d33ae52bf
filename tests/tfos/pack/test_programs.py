"""A program that packing runs and that hangs is a sentence, and not a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tfos.cli import main
from tfos.errors import UnsupportedError
from tfos.pack import libraries, packing, python_home, warming
from tfos.pack.programs import run

HANGS = "import threading; threading.Event().wait()"


def test_the_command_and_the_time_are_told():
    with pytest.raises(UnsupportedError) as told:
        run([sys.executable, "-c", HANGS], 0.05)
    text = str(told.value)
    assert text.startswith(f"{sys.executable} -c 'import threading;")
    assert "did not end within 0.05 s and was killed" in text


@pytest.mark.parametrize(
    ("module", "limit", "hangs"),
    [
        (python_home, "ASK_TIMEOUT_S", lambda tmp: python_home._first_site(Path(sys.executable))),
        (warming, "TIMEOUT_S", lambda tmp: warming.warmed(tmp)),
        (libraries, "TIMEOUT_S", lambda tmp: libraries._where(tmp)),
        (libraries, "TIMEOUT_S", lambda tmp: libraries.Relinker(tmp).module(Path(__file__))),
    ],
    ids=["interpreter", "warming", "ldd", "patchelf"],
)
def test_every_program_is_bounded_so(module: Any, limit: str, hangs: Any, tmp_path, monkeypatch):
    monkeypatch.setattr(module, limit, 0.0)
    with pytest.raises(UnsupportedError, match="did not end within 0 s"):
        hangs(tmp_path)


def test_the_command_line_ends_with_a_sentence(tmp_path, monkeypatch):
    def pack(*_: Any) -> None:
        run([sys.executable, "-c", HANGS], 0.05)

    monkeypatch.setattr(packing, "pack", pack)
    result = CliRunner().invoke(main.app, ["pack", "-o", str(tmp_path / "env.tar.gz")])
    assert result.exit_code == 2
    assert "did not end within" in result.stderr
    assert "Traceback" not in result.stderr
