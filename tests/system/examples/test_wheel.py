"""The wheel alone runs the README's program: the checkout is not what is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfos
from scripts.smoke import cells, checks
from scripts.smoke.environment import Environment, SmokeFailed

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that scripts/build makes of this checkout, its contents checked."""
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run([ROOT / "scripts" / "build", "--outdir", directory], check=True, timeout=300)
    (wheel,) = directory.glob("tfos-*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """One with tfos from the wheel and everything else from the environment of the tests."""
    return Environment.made(cells.Cell(cells.HERE), wheel, tmp_path_factory.mktemp("here"))


def test_the_program_in_the_readme_trains(environment):
    checks.run_readme(environment)


def test_the_command_is_installed(environment):
    checks.run_commands(environment)


def test_what_is_imported_from_the_checkout_is_noticed(environment):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}){checks.PLACES}"
    output = environment.run([environment.python, "-c", code])
    with pytest.raises(SmokeFailed, match=str(ROOT)):
        checks.places(environment, output, 5)


def test_setup_py_tells_the_version():
    command = [sys.executable, "setup.py", "--version"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split()[-1] == tfos.__version__


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_empty_environment_runs_it_with_what_the_wheel_asks_for(wheel, tmp_path):
    empty = Environment.made(cells.Cell("newest"), wheel, tmp_path)
    for check in checks.ALL:
        check(empty)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_lowest_and_highest_supported_versions_work(wheel):
    command = [ROOT / "scripts" / "smoke_versions", "--wheel", wheel]
    subprocess.run(command, check=True, timeout=3600)
