"""A job file's resources, inputs and output, from `tfos submit` to the workers and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.spark_submit import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300, func_only=True)]
PROGRAM = ROOT / "tests" / "support" / "programs" / "uses_job_files.py"
JOB = """\
program = "{program}"
args = ["{{nodes}}", "{{ps}}"]
master = "local-cluster"
python = "{python}"

[roles]
ps = 1
workers = 2

[executor]
memory = "512m"

[driver]
memory = "512m"

[ps]
cores = 1

[workers]
cores = 2

[inputs]
paths = "file://{data}"
copies = {{ path = "{data}/*.txt", mode = "download" }}
words = {{ path = "{data}/b.txt", mode = "download", share = "all" }}

[output]
path = "file://{out}"

[conf]
"spark.ui.enabled" = false
"""


def submit(job: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "tfos", "submit", str(job), *flags],
        capture_output=True,
        text=True,
        cwd=job.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
        timeout=280,
        check=False,
    )


def test_workers_have_the_files_and_cores_of_the_job_file_and_their_outputs_are_kept(
    tmp_path: Path, spark_environment: None
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b", "c"):
        (data / f"{name}.txt").write_text(f"text of {name}")
    job = tmp_path / "job.toml"
    job.write_text(
        JOB.format(program=PROGRAM, python=sys.executable, data=data, out=tmp_path / "out")
    )
    shown = submit(job, "--dry-run").stdout
    assert "--master local-cluster[3,2,512]" in shown.replace("'", "")
    assert f"--conf spark.tfos.inputs.copies.path={data}/*.txt" in shown.replace("'", "")
    assert "--conf spark.tfos.workers.cores=2" in shown
    done = submit(job)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SEEN "))
    said = json.loads(line.removeprefix("SEEN "))
    assert [each["paths"]["paths"] for each in said] == [
        [str(data / "a.txt"), str(data / "c.txt")],
        [str(data / "b.txt")],
    ]
    assert [each["texts"]["copies"] for each in said] == [
        ["text of a", "text of c"],
        ["text of b"],
    ]
    assert [each["texts"]["words"] for each in said] == [["text of b"]] * 2
    assert [each["threads"] for each in said] == ["2", "2"]
    copies = [path for each in said for path in each["paths"]["copies"]]
    assert not [path for path in copies if path.startswith(str(data)) or Path(path).exists()]
    for rank in (0, 1):
        kept = tmp_path / "out" / f"worker-{rank}" / "part" / "said.json"
        assert json.loads(kept.read_text()) == said[rank]
    assert sorted(os.listdir(tmp_path / "out")) == ["worker-0", "worker-1"]
