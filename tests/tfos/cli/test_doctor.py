"""`tfos doctor` on this host alone: table, JSON, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tfos.cli import main
from tfos.cli.doctor import _together

pytestmark = pytest.mark.socket
RUNNER = CliRunner()


def called(*arguments: str):
    environment = {"COLUMNS": "160"}
    return RUNNER.invoke(main.app, ["doctor", "--no-tensorflow", *arguments], env=environment)


def test_the_table_has_a_line_per_check(tmp_path: Path):
    shown = called("--hdfs", f"file://{tmp_path}")
    assert shown.exit_code == 0
    for text in (
        "this host",
        "python",
        "java",
        "its import was not tried",
        "written, read and removed",
    ):
        assert text in shown.output
    assert "0 problems" in shown.output


def test_a_problem_is_exit_status_1_and_has_a_next_step(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    shown = called()
    assert shown.exit_code == 1
    assert "→ install a Java 17" in shown.output
    [report] = json.loads(called("--json").stdout)
    [java] = [each for each in report["findings"] if each["check"] == "java"]
    assert (java["level"], java["next_step"][:14]) == ("problem", "install a Java")
    assert report["facts"]["python"]["version"]


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--conf", "spark.x", "'spark.x' is not KEY=VALUE"),
        ("--hdfs", "runs", "'runs' is not a URL"),
    ],
)
def test_a_wrong_option_is_exit_status_2(option: str, value: str, text: str):
    shown = called(option, value)
    assert (shown.exit_code, text in shown.output) == (2, True)


def test_places_with_the_same_finding_share_a_row():
    assert _together(["driver", "executor 0", "executor 1"]) == "driver, executor 0, 1"
    assert _together(["executor 2"]) == "executor 2"
    assert _together(["this host", "executor 2"]) == "this host, executor 2"
