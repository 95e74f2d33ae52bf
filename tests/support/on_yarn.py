"""Programs that tests submit to a local YARN, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.marked_processes import below
from tests.support.spark_submit import QUICK_JVM, ROOT

TIMEOUT_S = 400.0
CONF = {
    "spark.yarn.am.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.yarn.appMasterEnv.PYTHONPATH": str(ROOT),
    "spark.yarn.appMasterEnv.PYSPARK_PYTHON": sys.executable,
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.extraJavaOptions": QUICK_JVM,
}


def submitted(
    yarn: LocalYarn,
    program: Path,
    *arguments: str,
    mode: str = "client",
    executors: int = 3,
) -> str:
    """Run a program to its end; return what spark-submit printed.

    Args:
        yarn: where.
        program: of the tests, or a file that a test has written.
        arguments: of the program.
        mode: Spark's deploy mode; in cluster mode the program's own output is in its container.
        executors: how many YARN is asked for.
    """
    of_pyspark = Path(pyspark.__file__).parent
    own = {"spark.yarn.jars": f"local:{of_pyspark}/jars/*", "spark.executor.instances": executors}
    settings = {**CONF, **own}
    flags = [f"--conf={key}={value}" for key, value in settings.items()]
    # Not the tests' SPARK_HOME: YARN is sent pyspark.zip, which is a directory there.
    places = {"SPARK_HOME": str(of_pyspark), "HADOOP_CONF_DIR": str(yarn.conf_dir)}
    python = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    command = [f"{of_pyspark}/bin/spark-submit", "--master=yarn", f"--deploy-mode={mode}"]
    done = subprocess.run(
        [*command, *flags, str(program), *arguments],
        env={**os.environ, **places, **python, "JAVA_TOOL_OPTIONS": QUICK_JVM},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + logs(yarn)
    return done.stdout


def logs(yarn: LocalYarn) -> str:
    """Return the ends of the containers' output."""
    found = sorted(yarn.directory.glob("node-*/logs/*/*/std*"))
    return "".join(
        f"\n== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found
    )


def nodes_left(yarn: LocalYarn) -> list[str]:
    """Return the command lines of tfos' processes below YARN's directory."""
    return [line for line in below(yarn.directory).values() if "tfos" in line.split()[:1]]
