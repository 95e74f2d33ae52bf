"""The command `tfos`: what it lists, refuses and prints."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys

import pytest
from typer.testing import CliRunner

import tfos
from ps.cli import COMMANDS
from ps.cli.main import main as ps_main
from ps.errors import PSError
from tfos.bench import catalogue
from tfos.bench.harness import Bench, Figure
from tfos.cli import main
from tfos.watch import run_history
from tfos.watch.run_history import RunRecord

RUNNER = CliRunner()


def called(*arguments: str):
    return RUNNER.invoke(main.app, list(arguments), env={"COLUMNS": "160"})


def measure_nothing(bench: Bench) -> None:
    bench.report(Figure("P00", "a push", "GB/s", "higher"), [2.0, 3.0, 1.0], [1.0], "a socket")
    bench.report(Figure("P00", "a save", "s", "lower"), [0.5])


def replace_dense(monkeypatch, run) -> None:
    """Replace what `dense` measures."""
    module = type(sys)("tfos.bench.dense")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "tfos.bench.dense", module)


@pytest.fixture
def instant(monkeypatch):
    replace_dense(monkeypatch, measure_nothing)


def test_it_tells_its_version():
    assert called("--version").output == f"tfos {tfos.__version__}\n"


def test_without_a_name_it_lists_the_question_of_each_benchmark():
    output = called("bench").output
    for name in catalogue.NAMES:
        question = catalogue.question(name)
        assert question.endswith("?")
        assert name in output
        assert question.split()[0] in output


def test_what_a_benchmark_fails_with_steers_no_terminal(monkeypatch):
    def fail(_: Bench) -> None:
        raise PSError("it ended:\n\x1b[2Jgone")

    replace_dense(monkeypatch, fail)
    result = called("bench", "dense")
    assert (result.exit_code, result.stderr) == (2, "tfos: it ended:\n\\x1b[2Jgone\n")


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


def test_a_log_names_each_figure_as_it_is_there(instant):
    assert called("bench", "dense").stderr.splitlines() == [
        "tfos bench dense | measured a push",
        "tfos bench dense | measured a save",
    ]


def test_what_was_measured_before_a_failure_is_shown(monkeypatch):
    def run(bench: Bench) -> None:
        measure_nothing(bench)
        raise OSError("no space left")

    replace_dense(monkeypatch, run)
    result = called("bench", "dense")
    assert result.exit_code == 2
    assert "2 GB/s (1 to 3)" in result.stdout
    assert result.stderr.endswith("tfos: no space left\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["dence"], "no benchmark named 'dence'; there are dense, compression"),
        (["dense", "--servers", "h:1"], "--servers, --secret-file and --cluster-id go together"),
        (["dense", "--secret-file", "f"], "--servers, --secret-file and --cluster-id go together"),
        (["dense", "--servers", "h:0"], "'h:0' is not HOST:PORT, e.g. 127.0.0.1:40001"),
        (["dense", "--servers", "h:65536"], "'h:65536' is not HOST:PORT"),
        (["dense", "--servers", "h"], "'h' is not HOST:PORT"),
        (["dense", "--integrity", "header"], "--servers, --secret-file and --cluster-id go"),
        (["dense", "--servers", "h:1", "--integrity", "all"], "integrity must be 'auto', 'header'"),
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

    replace_dense(monkeypatch, run)
    result = called("bench", "dense", "--json")
    assert result.exit_code == 2
    assert "tensorflow, which is not installed; pip install 'tfos[cpu]'" in result.stderr


def test_a_benchmark_whose_other_processes_need_tensorflow_looks_for_it_first(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = called("bench", "peers", "--toy")
    assert result.exit_code == 2
    assert result.stderr.startswith("tfos: peers compares with tensorflow, which is not installed")


def test_no_repeats_below_one_and_a_toy_repeats_once():
    assert Bench("c").repeats(9) == 9
    assert Bench("c", given_repeats=3).repeats(9) == 3
    assert Bench("c", toy=True, given_repeats=3).repeats(9) == 1


def test_it_has_every_command_of_python_m_ps_with_its_sentence():
    names = {command.name: command.help for command in main.app.registered_commands}
    assert {name: names.get(name) for name in COMMANDS} == COMMANDS
    assert all(text.endswith(".") and ". " not in text for text in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_that_of_python_m_ps(command, capsys):
    result = called(command, "--help")
    with pytest.raises(SystemExit):
        ps_main([command, "--help"])
    assert result.exit_code == 0
    shown = capsys.readouterr().out
    options = set(re.findall(r"--[a-z-]+", shown))
    assert options == set(re.findall(r"--[a-z-]+", result.output))
    assert COMMANDS[command] in " ".join(result.output.split())


def test_options_reach_the_command_in_any_order(tmp_path):
    result = called("inspect", "--json", str(tmp_path))
    assert result.exit_code == 1
    assert json.loads(result.stdout)["steps"] == []
    result = called("export", "--npz", str(tmp_path / "x.npz"), "--step", "3", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("tfos export: step 3 has no readable manifest")


def test_an_option_that_is_none_is_refused_and_not_guessed(tmp_path):
    result = called("export", str(tmp_path), "--npz", "x", "--slot")
    assert result.exit_code == 2
    assert "unrecognized arguments: --slot" in result.stderr


def test_a_url_is_opened_by_tfos_and_named_by_python_m_ps(capsys, monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    assert "hdfs:///runs/7 names no NameNode" in called("inspect", "hdfs:///runs/7").stderr
    assert ps_main(["inspect", "hdfs:///runs/7"]) == 2
    assert "the commands `tfos inspect` and `tfos export`" in capsys.readouterr().err


def test_a_terminal_without_a_names_characters_is_shown_their_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = RunRecord("c1", "naïve → job", "app", 1.0, 2.0, "CLOSED", 1, 1.0, None, {}, "")
    run_history.add(run)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "argv", ["tfos", "history"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out.seek(0)
    assert (ended.value.code, r"na\xefve \u2192 job" in out.read()) == (0, True)
