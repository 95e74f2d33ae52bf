"""The cells of the matrix: one environment each, with the versions that it pins.

Covers: which cells there are, and the lower bounds of `pyproject.toml` as pins.
Does not: install anything (scripts/smoke/environment.py).
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = "here"
REQUIREMENT = re.compile(r"([\w-]+)(?:\[[\w,-]+\])?>=([\w.]+)")


@dataclass(frozen=True, slots=True)
class Cell:
    """One environment: a Python, and pins beside what the wheel asks for."""

    name: str
    python: str = ""
    """Minor version, "3.12"; empty: that of this process."""
    pins: tuple[str, ...] = ()
    """Requirements of pip; what they leave open is the newest that pip finds."""


def floors(root: Path = ROOT) -> tuple[str, ...]:
    """Return the lower bound of every dependency and of the extra `cpu`, as pins.

    A bound without a patch release, `>=3.15`, is the release 3.15.0.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    matches = [REQUIREMENT.match(requirement) for requirement in asked]
    without = [text for text, match in zip(asked, matches, strict=True) if match is None]
    if without:
        raise ValueError(f"no lower bound in pyproject.toml: {without}; write one as name>=version")
    return tuple(f"{match[1]}=={match[2]}" for match in matches if match)


def _floors_of(*names: str) -> tuple[str, ...]:
    return tuple(pin for pin in floors() if pin.partition("==")[0] in names)


CELLS = (
    Cell("floors-3.11", "3.11", floors()),
    Cell("floors-3.12", "3.12", floors()),
    Cell("spark-4.0", "3.13", ("pyspark==4.0.*",)),
    Cell("spark-4.1", "3.12", ("pyspark==4.1.*",)),
    Cell("spark-4.2", "3.13", ("pyspark==4.2.*",)),
    Cell("floors-data", "3.12", _floors_of("numpy", "pyarrow")),
    Cell("newest-3.11", "3.11"),
    Cell("newest-3.12", "3.12"),
    Cell("newest-3.13", "3.13"),
)
"""Spark 4.3 is the newest: the cells that do not pin it have it."""

ALONE = (Cell(HERE), Cell("newest"))
"""Cells that only scripts/build and the tests ask for, with the Python of this process."""


def named(names: list[str]) -> list[Cell]:
    """Return the cells of these names, or all of the matrix.

    Raises:
        ValueError: a name is not a cell.
    """
    known = {cell.name: cell for cell in (*CELLS, *ALONE)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no cell is called {unknown}; there are {sorted(known)}")
    return [known[name] for name in names] or list(CELLS)
