"""`tfos pack` as users need it: the demo on a YARN whose nodes have no Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from hdfs_native import Client

from feeding.filesystem.registry import filesystem_for
from tests.support.bare_hosts import BareYarn, can_be_bare
from tests.support.marked_processes import below
from tests.support.on_yarn import local_yarn, logs
from tests.support.spark_submit import EXAMPLES, number

TIMEOUT_S = 560.0
SUBMITTER = "alice"
OF_PYSPARK = Path(pyspark.__file__).parent
OF_DEVELOPERS = ("material", "jedi", "babel", "mypy*")
"""More than half of the files: each is a process on the nodes that unpack it."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3 * TIMEOUT_S, func_only=True),
    pytest.mark.skipif(not can_be_bare(), reason="only root can hide this host's Pythons"),
]
CONF = {
    "spark.executor.instances": "3",
    "spark.executor.memory": "512m",
    "spark.executorEnv.CUDA_VISIBLE_DEVICES": "-1",
    "spark.pyspark.python": "./env/bin/python",
    "spark.ui.enabled": "false",
    "spark.yarn.am.memory": "512m",
    "spark.yarn.appMasterEnv.CUDA_VISIBLE_DEVICES": "-1",
    "spark.yarn.maxAppAttempts": "1",
    "spark.yarn.report.interval": "500",
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that every user of the host may enter."""
    with tempfile.TemporaryDirectory(prefix="tfos-packed-") as directory:
        path = Path(directory)
        path.chmod(0o755)
        # `local:` jars spare their upload; the nodes see no virtual environment
        shutil.copytree(OF_PYSPARK / "jars", path / "jars")
        yield path


@pytest.fixture(scope="module")
def archive(place: Path) -> Path:
    """This environment, without most of what users do not install."""
    path = place / "env.tar.gz"
    left_out = [f"--leave-out={name}" for name in OF_DEVELOPERS]
    _run([sys.executable, "-m", "tfos", "pack", "-o", path, "--level", "1", *left_out], {})
    return path


@pytest.fixture(scope="module")
def yarn(place: Path) -> Iterator[BareYarn]:
    with local_yarn(place / "yarn", BareYarn) as running:
        hdfs = Client(running.url)
        for path in ("/demo", f"/user/{SUBMITTER}"):
            hdfs.mkdirs(path, 0o755, create_parent=True)
            hdfs.set_owner(path, SUBMITTER)
        yield running


@pytest.fixture(scope="module")
def archive_on_hdfs(archive: Path, yarn: BareYarn) -> str:
    """The same, where every user may read it."""
    target = f"{yarn.url}/environments/{archive.name}"
    with archive.open("rb") as file:
        filesystem_for(target).write(target, file.read())
    return target


@pytest.mark.parametrize("lies", ["here", "on HDFS"])
@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_the_demo_trains_where_no_host_has_a_python(
    mode: str, lies: str, yarn: BareYarn, archive: Path, request: pytest.FixtureRequest
):
    directory = f"hdfs:///demo/{mode}-{lies.replace(' ', '-')}"
    packed = archive if lies == "here" else request.getfixturevalue("archive_on_hdfs")
    conf = {**CONF, "spark.yarn.jars": f"local:{archive.parent}/jars/*"}
    if mode == "client":
        conf["spark.pyspark.driver.python"] = sys.executable
    settings = [f"--conf={key}={value}" for key, value in conf.items()]
    command = [
        OF_PYSPARK / "bin/spark-submit",
        "--master",
        "yarn",
        "--deploy-mode",
        mode,
        *settings,
    ]
    files = ["--archives", f"{packed}#env", "--py-files", EXAMPLES / "digits.py"]
    flags = ["--cluster_size", "3", "--num_ps", "1", "--epochs", "2"]
    outputs = ["--model_dir", directory, "--export_dir", directory]
    output = _run(
        [*command, *files, EXAMPLES / "mnist_spark.py", *flags, *outputs],
        {"HADOOP_CONF_DIR": str(yarn.conf_dir), "HADOOP_USER_NAME": SUBMITTER},
        yarn,
    )
    if mode == "cluster":
        output = _drivers_output(yarn)
    assert number(output, r"test accuracy: (\d\.\d+)") > 0.85
    assert re.search(r"epoch 2 of 2: 4000 rows fed, 4000 trained, 0 dropped", output)
    found = list(Client(yarn.url).list_status(directory.removeprefix("hdfs://"), recursive=True))
    assert {each.owner for each in found} == {SUBMITTER}  # not of the containers' user
    assert not [line for line in below(yarn.directory).values() if "tfos" in line.split()[:1]]


def _drivers_output(yarn: BareYarn) -> str:
    """Return what the driver of the last application has printed, which ran in a container."""
    found = yarn.directory.glob("node-*/logs/application_*/container_*_000001/stdout")
    (*_, last) = sorted(found, key=lambda path: path.parents[1].name)
    return last.read_text()


def _run(command: list[object], places: dict[str, str], yarn: BareYarn | None = None) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    done = subprocess.run(
        list(map(str, command)),
        env={**kept, **places, "SPARK_HOME": str(OF_PYSPARK)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + (logs(yarn) if yarn else "")
    return done.stdout
