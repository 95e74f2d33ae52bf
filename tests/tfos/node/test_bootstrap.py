"""What the processes of a node take over from the executor that they start on."""

from __future__ import annotations

from tfos.node.bootstrap import node_env, without_spark_jar

JAR = "/opt/spark/jars/spark-core_2.13-4.3.0.jar"


def test_sparks_own_jar_is_no_place_for_modules():
    path = [".", "/opt/pyspark.zip", JAR, "/jobs/graphs-spark-core.jar", "/jobs/user.jar"]
    assert without_spark_jar(path) == (".", "/opt/pyspark.zip", *path[3:])


def test_nodes_get_the_environment_without_sparks_keys_and_jar():
    env = {"PYTHONPATH": f"/opt/pyspark.zip:{JAR}", "PYSPARK_GATEWAY_SECRET": "x", "HOME": "/h"}
    assert node_env(env) == {"PYTHONPATH": "/opt/pyspark.zip", "HOME": "/h"}
    assert node_env({"HOME": "/h"}) == {"HOME": "/h"}
