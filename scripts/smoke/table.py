"""The table of results, as lines of Markdown and in docs/guides/versions.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scripts.smoke.cells import ROOT

PAGE = ROOT / "docs" / "guides" / "versions.md"
COLUMNS = ("python", "pyspark", "numpy", "pyarrow", "keras", "tensorflow-cpu", "numba", "grpcio")
HEAD = ("cell", *COLUMNS, "install", "commands", "README", "paths", "numpy alone")


@dataclass(frozen=True, slots=True)
class Row:
    """A cell that passed."""

    name: str
    versions: dict[str, str]
    install_s: float
    run_s: tuple[float, ...]
    """Seconds of each of checks.ALL."""


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the table: a line for its head, one below it, one for each row."""
    head = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    return [*head, *map(_line, rows)]


def _line(row: Row) -> str:
    seconds = (f"{value:.0f} s" for value in (row.install_s, *row.run_s))
    cells = (row.name, *(row.versions[name] for name in COLUMNS), *seconds)
    return f"| {' | '.join(cells)} |"


def replaced(text: str, rows: Iterable[Row]) -> str:
    """Return the page with these rows instead of the earlier ones of the same cells."""
    new = {f"| {row.name} |": _line(row) for row in rows}
    kept = []
    for line in text.splitlines():
        start = "|".join(line.split("|")[:2]) + "|"
        kept.append(new.pop(start, line))
    if new:
        raise ValueError(f"{PAGE} has no rows for {sorted(new)}; add `| name |` lines")
    return "\n".join(kept) + "\n"


def write(rows: Iterable[Row]) -> None:
    """Put the rows into the page."""
    PAGE.write_text(replaced(PAGE.read_text(), rows))
