"""What an installation may bring in: versions without known holes, and no code at install time."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXED_IN = {
    "pyarrow": (14, 0, 1),  # CVE-2023-47248: a file runs code
    "keras": (3, 12, 3),  # below it a saved model may read files and run code
    "pyspark": (3, 5, 2),
    "cryptography": (42,),  # CVE-2023-50782
}
"""By package, the first version that we may ask for."""
SETUP_WHEN_BUILT_BY_OLD_TOOLS = ["Expr", "ImportFrom", "Expr"]


def requirements() -> list[str]:
    """Return what a user's installation asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = [extras[name] for name in extras if name not in ("dev", "docs")]
    return [*project["dependencies"], *itertools.chain.from_iterable(ours)]


def least(requirement: str) -> tuple[str, tuple[int, ...]]:
    """Return a requirement's package and the lowest version that it lets in; () for any."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    floor = re.search(r">=([\d.]+)", requirement)
    return name[0].lower(), tuple(map(int, floor[1].split("."))) if floor else ()


@pytest.mark.attack("A30")
def test_no_dependency_may_be_older_than_the_version_that_closed_its_hole():
    asked = [least(requirement) for requirement in requirements()]
    too_old = [(name, floor) for name, floor in asked if floor < FIXED_IN.get(name, ())]
    assert too_old == []
    assert {name for name, _ in asked} >= FIXED_IN.keys()


@pytest.mark.attack("A30")
def test_every_dependency_is_asked_for_from_an_index_with_a_lowest_version():
    for requirement in requirements():
        assert "@" not in requirement, f"{requirement} names an address of its own"
        assert least(requirement)[1], f"{requirement} takes any version"


@pytest.mark.attack("A30")
def test_installing_runs_no_code_of_ours():
    statements = ast.parse((ROOT / "setup.py").read_text()).body
    assert [type(each).__name__ for each in statements] == SETUP_WHEN_BUILT_BY_OLD_TOOLS
    assert ast.unparse(statements[-1]) == "setup()"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == "setuptools.build_meta"
    assert "backend-path" not in project["build-system"]
    assert "cmdclass" not in project["tool"]["setuptools"]
