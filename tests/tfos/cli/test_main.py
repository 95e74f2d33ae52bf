"""The command `tfos`: what it lists, refuses and prints."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import tfos
from tfos.bench import catalogue
from tfos.bench.harness import Bench, Figure
from tfos.cli import main

RUNNER = CliRunner()


def called(*arguments: str):
    return RUNNER.invoke(main.app, list(arguments), env={"COLUMNS": "160"})


def measure_nothing(bench: Bench) -> None:
    bench.report(Figure("P00", "a push", "GB/s", "higher"), [2.0, 3.0, 1.0], [1.0], "a socket")
    bench.report(Figure("P00", "a save", "s", "lower"), [0.5])


@pytest.fixture
def instant(monkeypatch):
    """Replace what `dense` measures."""
    module = type(sys)("tfos.bench.dense")
    module.__dict__["run"] = measure_nothing
    monkeypatch.setitem(sys.modules, "tfos.bench.dense", module)


def test_it_tells_its_version():
    assert called("--version").output == f"tfos {tfos.__version__}\n"


def test_without_a_name_it_lists_the_question_of_each_benchmark():
    output = called("bench").output
    for name in catalogue.NAMES:
        question = catalogue.question(name)
        assert question.endswith("?")
        assert name in output
        assert question.split()[0] in output


def test_json_is_one_line_per_figure(instant):
    result = called("bench", "dense", "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["name"], first["ours"]) == ("a push", {"median": 2.0, "min": 1.0, "max": 3.0})
    assert (first["ratio"], first["reference"]["name"]) == (2.0, "a socket")
    assert (second["ratio"], second["reference"]) == (None, None)
    assert first["versions"]["tfos"] == tfos.__version__


def test_a_table_has_both_sides_and_their_ratio(instant):
    output = called("bench", "dense").output
    assert "2 GB/s (1 to 3)" in output
    assert "a socket: 1 GB/s (1 to 1)" in output
    assert "2.00" in output
    assert "0.5 s (0.5 to 0.5)" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["dence"], "no benchmark named 'dence'; there are dense, compression"),
        (["dense", "--servers", "h:1"], "--servers, --secret-file and --cluster-id go together"),
        (["dense", "--secret-file", "f"], "--servers, --secret-file and --cluster-id go together"),
        (["dense", "--servers", "h:0"], "--servers takes HOST:PORT,HOST:PORT,... and got 'h:0'"),
        (["dense", "--servers", "h:65536"], "--servers takes HOST:PORT,HOST:PORT,... and got 'h:"),
        (["dense", "--servers", "h"], "--servers takes HOST:PORT,HOST:PORT,... and got 'h'"),
        (["apply", "--servers", "h:1"], "apply starts its own servers; with --servers there are"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, text, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 32)
    if "--servers" in arguments and "together" not in text:
        arguments = [*arguments, "--secret-file", str(secret), "--cluster-id", "c"]
    result = called("bench", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tfos: {text}")
    assert result.stderr.count("\n") == 1


def test_a_missing_package_is_named(monkeypatch):
    def run(bench: Bench) -> None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    module = type(sys)("tfos.bench.dense")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "tfos.bench.dense", module)
    result = called("bench", "dense", "--json")
    assert result.exit_code == 2
    assert "tensorflow, which is not installed; pip install 'tfos[cpu]'" in result.stderr


def test_no_repeats_below_one_and_a_toy_repeats_once():
    assert Bench("c").repeats(9) == 9
    assert Bench("c", given_repeats=3).repeats(9) == 3
    assert Bench("c", toy=True, given_repeats=3).repeats(9) == 1
