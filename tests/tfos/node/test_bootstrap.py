"""What the processes of a node take over from the executor that they start on."""

from __future__ import annotations

import os
import sys

import pytest

from tfos.errors import NodeStartError
from tfos.node import bootstrap
from tfos.node.bootstrap import node_env, without_spark_jar

JAR = "/opt/spark/jars/spark-core_2.13-4.3.0.jar"


def test_sparks_own_jar_is_no_place_for_modules():
    path = [".", "/opt/pyspark.zip", JAR, "/jobs/graphs-spark-core.jar", "/jobs/user.jar"]
    assert without_spark_jar(path) == (".", "/opt/pyspark.zip", *path[3:])


def test_nodes_get_the_environment_without_sparks_keys_and_jar():
    env = {"PYTHONPATH": f"/opt/pyspark.zip:{JAR}", "PYSPARK_GATEWAY_SECRET": "x", "HOME": "/h"}
    assert node_env(env) == {"PYTHONPATH": "/opt/pyspark.zip", "HOME": "/h"}
    assert node_env({"HOME": "/h"}) == {"HOME": "/h"}


@pytest.mark.parametrize(
    ("program", "text"),
    [(None, "cannot start .*No such file"), ("exec sleep 60", r"did not start tfos x within 0 s")],
)
def test_a_process_that_does_not_start_is_a_bounded_error(tmp_path, monkeypatch, program, text):
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(bootstrap, "DETACH_S", 0.1)
    document = bootstrap.document_fd("none", b"", sys_path=(), detach=True)
    with pytest.raises(NodeStartError, match=text):
        bootstrap.start_detached(document, "tfos x", inherited=())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(document)
