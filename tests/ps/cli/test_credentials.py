"""Files with secrets: what is said where there is none, and that what is said works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ps.cli.credentials import metrics_token, read_secret
from ps.errors import PSSettingsError


def test_where_there_is_no_file_the_error_says_how_to_make_one(tmp_path: Path):
    path = tmp_path / "secret"
    with pytest.raises(PSSettingsError, match=f"no file {path}; .*make one with: ") as raised:
        read_secret(path)
    _, _, recipe = str(raised.value).partition("make one with: ")
    subprocess.run(["sh", "-ec", recipe], check=True, timeout=60)
    assert len(read_secret(path)) == 44


def test_where_a_token_has_spaces_the_error_says_how_to_make_one(tmp_path: Path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("sixteen and more characters")
    with pytest.raises(PSSettingsError, match="visible ASCII") as raised:
        metrics_token(str(path))
    _, _, recipe = str(raised.value).partition("make one with: ")
    path.unlink()
    subprocess.run(["sh", "-ec", recipe], check=True, timeout=60)
    assert len(metrics_token(str(path))) == 44


@pytest.mark.attack("A16")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "secret"
    path.write_bytes(b"s" * 32)
    path.chmod(mode)
    with pytest.raises(PSSettingsError, match=f"mode {mode:04o}: others may read the secret"):
        read_secret(path)


@pytest.mark.parametrize("num_bytes", [0, 15, 4097])
def test_a_secret_that_is_too_short_or_too_long_is_refused(tmp_path: Path, num_bytes: int):
    path = tmp_path / "secret"
    path.write_bytes(b"s" * num_bytes)
    path.chmod(0o600)
    with pytest.raises(PSSettingsError, match=rf"has {num_bytes} bytes, it needs 16\.\.4096"):
        read_secret(path)
