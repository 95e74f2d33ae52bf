"""Options of `python -m ps.server` that cannot be followed: refused before anything listens."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from ps.cli import serve


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run with such options; returns what is said, if the status is 2 and nothing was served."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"s" * 32)
    # Of the tests' own process; a server that begins nevertheless ends at once.
    monkeypatch.setattr(serve, "forbid_core_dumps", lambda: None)
    monkeypatch.setattr(serve, "_signals_caught", lambda: contextlib.nullcontext([signal.SIGTERM]))

    def run(*options: str) -> str:
        needed = ("--num-workers", "1", "--secret-file", str(secret), "--cluster-id", "c")
        try:
            status = serve.main([*needed, *options])
        except SystemExit as error:  # by the parser
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        return err

    return run


@pytest.mark.parametrize(
    ("options", "other"),
    [
        (("--step", "0"), "--restore"),
        (("--strict",), "--restore"),
        (("--metrics-host", "127.0.0.1"), "--metrics-port"),
        (("--metrics-token-file", "/token"), "--metrics-port"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(refused, options, other):
    assert f"{options[0]} without {other}: give both" in refused(*options)


def test_the_beginning_of_an_options_name_is_no_option(refused):
    assert "unrecognized arguments: --log-l info" in refused("--log-l", "info")


def test_a_level_that_is_none_is_refused_with_those_that_are(refused):
    assert "DEBUG" in refused("--log-level", "loud")


@pytest.mark.parametrize("level", ["debug", "Info", "warn", "WARNING"])
def test_a_level_is_written_in_any_case(level):
    parsed = serve._parser().parse_args(
        ["--num-workers", "1", "--secret-file", "s", "--cluster-id", "c", "--log-level", level]
    )
    assert parsed.log_level == level.upper()


@pytest.mark.socket
@pytest.mark.parametrize("options", [("--port", "99999"), ("--port", "-1")])
def test_a_port_that_is_none_is_a_sentence(refused, options):
    assert f"port {options[1]} is not valid: choose one in 0..65535" in refused(*options)
