"""Files with secrets: what is said where there is none, and that what is said works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ps.cli.credentials import read_secret
from ps.errors import PSSettingsError


def test_where_there_is_no_file_the_error_says_how_to_make_one(tmp_path: Path):
    path = tmp_path / "secret"
    with pytest.raises(PSSettingsError, match=f"no file {path}; .*make one with: ") as raised:
        read_secret(path)
    _, _, recipe = str(raised.value).partition("make one with: ")
    subprocess.run(["sh", "-ec", recipe], check=True, timeout=60)
    assert len(read_secret(path)) == 44
