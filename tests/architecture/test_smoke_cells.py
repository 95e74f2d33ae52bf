"""The cells of scripts/smoke_versions: pins from pyproject.toml, and the table of results."""

from __future__ import annotations

import re

import pytest

from scripts.smoke import cells, table
from scripts.smoke.checks import ALL, readme_program

ROW = table.Row("one", dict.fromkeys(table.COLUMNS, "1.0"), 60.4, (1.0,) * len(ALL))


def test_the_lowest_versions_are_those_of_the_project(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy>=2.0,<3"]\n'
        '[project.optional-dependencies]\ncpu = ["tensorflow[and-cuda]>=2.21,<2.22"]\n'
    )
    assert cells.floors(tmp_path) == ("numpy==2.0", "tensorflow==2.21")


def test_a_dependency_without_a_lower_bound_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy"]\n[project.optional-dependencies]\ncpu = []\n'
    )
    with pytest.raises(ValueError, match=r"no lower bound.*\['numpy'\]"):
        cells.floors(tmp_path)


def test_cells_are_chosen_by_name():
    assert [cell.name for cell in cells.named(["here"])] == ["here"]
    assert cells.named([]) == list(cells.CELLS)
    with pytest.raises(ValueError, match="no cell is called"):
        cells.named(["nowhere"])


def test_the_page_of_versions_has_a_row_for_every_cell():
    results, _, _ = table.PAGE.read_text().partition("\n## ")
    rows = re.findall(r"^\| ([\w.-]+) \|", results, re.MULTILINE)
    assert [row for row in rows if row != table.HEAD[0]] == [cell.name for cell in cells.CELLS]


def test_results_take_the_place_of_earlier_ones():
    page = "text\n| cell | python |\n|---|---|\n| one | 0.9 |\n| two | 0.9 |\n"
    written = table.replaced(page, [ROW])
    assert written.splitlines()[3] == table.lines([ROW])[2]
    assert "| two | 0.9 |" in written
    assert "60 s" in written


def test_a_result_without_a_row_is_refused():
    with pytest.raises(ValueError, match="no rows for"):
        table.replaced("text\n", [ROW])


def test_every_check_has_a_column():
    assert len(table.HEAD) == 2 + len(table.COLUMNS) + len(ALL)
    assert table.lines([ROW])[2].count("|") == len(table.HEAD) + 1


def test_the_program_of_the_readme_is_found_whole():
    assert readme_program(
        "```python\nx = 1\n```\n```python\nimport a\nTFCluster.reserve\n```\n"
    ) == ("import a\nTFCluster.reserve\n")
