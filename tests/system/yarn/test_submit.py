"""`tfos submit` on YARN: inputs and output on HDFS, and what each role is given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from feeding.filesystem.registry import filesystem_for
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.on_yarn import CONF, TIMEOUT_S, logs, nodes_left, told
from tests.support.programs.submitted_on_yarn import RESULT, TOLD
from tests.support.spark_submit import QUICK_JVM, ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 120, func_only=True)]
OF_PYSPARK = Path(pyspark.__file__).parent
PROGRAM = ROOT / "tests" / "support" / "programs" / "submitted_on_yarn.py"
JOB = f"""
program = "{PROGRAM}"
args = ["hdfs:///job"]
name = "submitted"
master = "yarn"
deploy_mode = "MODE"
queue = "default"
python = "{sys.executable}"
[roles]
ps = 1
workers = 2
[ps]
cores = 1
PS
[workers]
cores = 2
WORKERS
[executor]
memory = "512m"
[driver]
memory = "512m"
[inputs]
numbers = "/data/numbers"
words = {{ path = "hdfs:///data/words.txt", mode = "download", share = "all" }}
[output]
path = "hdfs:///job/out"
[env]
CUDA_VISIBLE_DEVICES = "-1"
PYTHONPATH = "{ROOT}"
[conf]
"spark.ui.enabled" = false
"spark.yarn.am.memory" = "{CONF["spark.yarn.am.memory"]}"
"spark.yarn.jars" = "local:{OF_PYSPARK}/jars/*"
"spark.driver.extraJavaOptions" = "{QUICK_JVM}"
"spark.executor.extraJavaOptions" = "{QUICK_JVM}"
"""
NUMBERS = [[1, 2, 3], [10, 20], [100], [1000, 2000, 3000, 4000]]
_GIVEN = re.compile(r"Assigned container (container_\w+) of capacity <memory:(\d+), ")


@pytest.mark.parametrize("mode", ["client", "cluster"])
@pytest.mark.parametrize("has_memory", [False, True], ids=["cores", "memory"])
def test_a_job_file_is_run_as_it_says(yarn: LocalYarn, tmp_path: Path, mode: str, has_memory: bool):
    fs = filesystem_for(yarn.url)
    for index, numbers in enumerate(NUMBERS):
        fs.write(f"{yarn.url}/data/numbers/{index}.json", json.dumps(numbers).encode())
    fs.write(f"{yarn.url}/data/words.txt", b"all of it")
    of_ps, of_workers = ('memory = "512m"', 'memory = "640m"') if has_memory else ("", "")
    job = JOB.replace("MODE", mode).replace("PS\n", f"{of_ps}\n", 1)
    (tmp_path / "job.toml").write_text(job.replace("WORKERS\n", f"{of_workers}\n", 1))
    _submit(yarn, tmp_path / "job.toml")
    found = told(f"{yarn.url}/job/{TOLD}")
    workers = found["workers"]
    assert [each["words"] for each in workers] == ["all of it"] * 2
    assert [each["numbers"] for each in workers] == [
        NUMBERS[0] + NUMBERS[2],
        NUMBERS[1] + NUMBERS[3],
    ]
    assert [each["pushes"] for each in workers] == [4, 6]
    outputs = [told(f"{yarn.url}/job/out/worker-{rank}/{RESULT}") for rank in (0, 1)]
    assert outputs == [each["numbers"] for each in workers]
    assert [each["threads"] for each in workers] == ["2", "2"]
    assert len(set(found["executors"].values())) == 3
    given = _given(yarn)
    of_workers_mib = {given[each["container"]] for each in workers}
    assert of_workers_mib == ({512 + 640} if has_memory else {512 + 384})
    assert (512 + 512 in given.values()) == has_memory  # the server's
    assert not nodes_left(yarn)


def _submit(yarn: LocalYarn, job: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfos", "submit", str(job)],
        env={
            **os.environ,
            "SPARK_HOME": str(OF_PYSPARK),
            "HADOOP_CONF_DIR": str(yarn.conf_dir),
            "JAVA_TOOL_OPTIONS": QUICK_JVM,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + logs(yarn)


def _given(yarn: LocalYarn) -> dict[str, int]:
    """Return the memory of each container in MiB, as the ResourceManager's log has it."""
    log = (yarn.directory / "logs" / "resourcemanager.log").read_text()
    return {name: int(mib) for name, mib in _GIVEN.findall(log)}
