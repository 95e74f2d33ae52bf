"""Every script and every command answers `--help` and `-h` with a text, and does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix
)
PROGRAMS = sorted(
    path.stem for path in (ROOT / "scripts").glob("*.py") if "__main__" in path.read_text()
)
OF_PS = ("inspect", "export", "stats", "warm")
FLAGS = ("--help", "-h")
LONGEST_S = 60.0

pytestmark = pytest.mark.slow


def helped(*command: str) -> str:
    """Run it in the checkout; returns what it has printed."""
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, ""), command
    return run.stdout


def test_there_are_scripts():
    assert {"bench", "check", "demo", "test"} <= set(SCRIPTS)
    assert {"faults_table", "mutants"} <= set(PROGRAMS)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_called(name: str, flag: str):
    text = helped(str(ROOT / "scripts" / name), flag)
    assert f"scripts/{name}" in text
    assert len(text.splitlines()) >= 3


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_scripts_says_what_it_does(name: str):
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*.md")}
    assert len(helped(sys.executable, "-m", f"scripts.{name}", "--help").splitlines()) >= 3
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*.md")} == before


def test_an_example_that_hands_flags_on_keeps_help_to_itself():
    text = helped(sys.executable, "examples/tensorflowonspark/resnet.py", "--help")
    assert "examples/tensorflowonspark/resnet.py" in text


def test_the_list_of_benchmarks_goes_where_it_was_asked_for():
    listed = helped(str(ROOT / "scripts" / "bench"), "--help")
    assert "  end_to_end    How long does a small training take" in listed
    unknown = subprocess.run(
        [ROOT / "scripts" / "bench", "nothing"],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f"no benchmark named 'nothing'\n{listed}"


@pytest.mark.parametrize("module", ["ps", "ps.server", *(f"ps {name}" for name in OF_PS)])
def test_a_command_of_the_servers_says_how_it_is_called(module: str):
    text = helped(sys.executable, "-m", *module.split(), "-h")  # argparse takes --help as well
    assert text.startswith(f"usage: python -m {module} [-h]")


@pytest.mark.parametrize("flag", FLAGS)
def test_every_command_says_how_it_is_called(flag: str):
    from tfos.cli.main import app

    names = [
        str(each.name or each.callback.__name__)
        for each in app.registered_commands
        if each.callback
    ]
    assert {"bench", "doctor", "logs", "status", "submit", *OF_PS} <= set(names)
    for name in names:
        found = CliRunner().invoke(app, [name, flag])
        assert found.exit_code == 0, name
        assert f"{name}" in found.output
        assert len(found.output.splitlines()) >= 3, name
