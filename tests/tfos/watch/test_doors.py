"""What a driver shows where its ticket and its record cannot be left for the user's commands."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rpc.auth.certificates import TlsCredentials
from tests.support.watched_job import WatchedJob
from tfos.cli import main
from tfos.console.console import Console
from tfos.watch import doors


def shown(*, details: bool = False) -> str:
    """Return what a job shows from its start to its end."""
    bed, stream = WatchedJob(), io.StringIO()
    console = Console(details=details, stream=stream)
    keys = TlsCredentials(b"c", b"k", b"a")
    doors.open_doors(bed.job, doors.PageRequest(), lambda: b"", "127.0.0.1:1", keys, console)
    bed.coordinator.close()
    return stream.getvalue()


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a login without a runtime directory has its tickets and records."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name))
    return tmp_path / "home"


def test_a_login_of_its_own_sees_nothing(homes):
    assert shown() == ""
    assert len(list(homes.rglob("*.json"))) == 1


def test_a_home_that_others_write_is_told_with_what_to_do(homes):
    """In the log too: a driver in a container may be seen nowhere else."""
    homes.mkdir()
    homes.chmod(0o775)
    (line,) = shown().splitlines()
    assert line.startswith("tfos | `tfos status`, `tfos save` and `tfos stop` cannot find this")
    told = [CliRunner().invoke(main.app, [each]).output for each in ("status", "history")]
    for text in (*told, line, *shown(details=True).splitlines()):
        assert f"others can write {homes} (mode 0775); let only its owner" in text
        assert "XDG_CACHE_HOME to a" not in text


def test_a_container_without_a_home_is_told_how_to_be_found(homes):
    homes.touch()  # no directory
    (line,) = shown().splitlines()
    assert "cannot find this driver: [Errno 20] Not a directory" in line
    assert line.endswith(
        "; set XDG_CACHE_HOME to a directory of this user, for the driver and for them"
    )
    assert "`tfos history` will not have this run" in shown(details=True)
