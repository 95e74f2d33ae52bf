"""`tfos submit`: the printed line, and a spark-submit that gets exactly its words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.spark_submit import ROOT
from tfos.cli import main
from tfos.cli.submit import spark_submit

RUNNER = CliRunner()
JOB = """
program = "train.py"
args = ["{nodes}", "it's"]
master = "local-cluster"
[roles]
ps = 1
workers = 2
[env]
MODE = "very fast"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def test_a_dry_run_prints_the_line_alone(job: Path, monkeypatch):
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    done = RUNNER.invoke(main.app, ["submit", str(job), "--dry-run", "--", "--more"])
    assert done.exit_code == 0
    assert done.output == (
        "env 'MODE=very fast' /opt/spark/bin/spark-submit \\\n"
        "  --master 'local-cluster[3,1,1024]' \\\n"
        "  --deploy-mode client \\\n"
        "  --conf 'spark.executorEnv.MODE=very fast' \\\n"
        f"  {job.parent}/train.py 3 'it'\"'\"'s' --more\n"
    )


def test_a_wrong_file_is_exit_status_2(job: Path):
    job.write_text(JOB.replace("workers", "worker"))
    done = RUNNER.invoke(main.app, ["submit", str(job), "--dry-run"])
    assert (done.exit_code, "did you mean roles.workers?" in done.output) == (2, True)


@pytest.mark.slow
def test_spark_submit_takes_the_process_over(job: Path, tmp_path: Path):
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    told = "print(json.dumps([sys.argv[1:], os.environ['MODE']])); sys.exit(7)"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\n{told}\n")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "tfos", "submit", str(job)],
        env={**os.environ, "SPARK_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7
    *line, answer = done.stdout.splitlines()
    assert line[0] == f"env 'MODE=very fast' {program} \\"
    words, mode = json.loads(answer)
    assert (words[:2], mode) == (["--master", "local-cluster[3,1,1024]"], "very fast")
    assert words[-2:] == ["3", "it's"]
    program.chmod(0o644)
    broken = subprocess.run(
        [sys.executable, "-m", "tfos", "submit", str(job)],
        env={**os.environ, "SPARK_HOME": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (broken.returncode, "cannot be run: No such file" in broken.stderr) == (2, True)


def test_spark_submit_is_sparks_homes_then_the_paths_then_pysparks(tmp_path: Path):
    assert spark_submit({"SPARK_HOME": "/opt/spark"}) == "/opt/spark/bin/spark-submit"
    program = tmp_path / "spark-submit"
    program.touch(0o755)
    assert spark_submit({"PATH": str(tmp_path)}) == str(program)
    assert spark_submit({"PATH": ""}).endswith("pyspark/bin/spark-submit")
