"""Executors with another commit of tfos than the driver, of the same version, on real executors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.marked_processes import below
from tests.support.spark_submit import ROOT, separate, submit
from tfos.node.versions import source_digest
from tfos.version import __version__

TIMEOUT_S = 240
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 30, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "two_commits.py"
ROOMS = ("tfos", "ps", "rpc", "feeding")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The rooms of this checkout at another path."""
    for room in ROOMS:
        shutil.copytree(
            ROOT / room, tmp_path / "copy" / room, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path / "copy"


def started(copy: Path, tmp_path: Path) -> str:
    return submit(PROGRAM, str(copy), master=separate(1), cwd=tmp_path, timeout_s=TIMEOUT_S)


def test_a_changed_line_at_the_executors_is_refused_with_both_digests(copy: Path, tmp_path: Path):
    with (copy / "ps" / "errors.py").open("a") as file:
        file.write("# another commit\n")
    output = started(copy, tmp_path)
    assert "ran with" not in output
    theirs = source_digest(copy)
    assert theirs != source_digest(ROOT)
    row = rf"source of tfos +{source_digest(ROOT)} +{theirs}\b"
    assert re.search(row, output), output[-4000:]
    assert f"They are two commits of tfos {__version__}: if it has changed on disk" in output
    assert "set PYSPARK_PYTHON to the same on every host" in output
    assert "msgspec" not in output.partition("REFUSED")[2]
    assert below(tmp_path) == {}


def test_a_copy_of_the_same_commit_starts(copy: Path, tmp_path: Path):
    output = started(copy, tmp_path)
    assert f"ran with {copy / 'tfos' / '__init__.py'}" in output, output[-4000:]
    assert "two commits" not in output
