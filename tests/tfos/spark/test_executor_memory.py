"""What Spark's settings leave for nodes, with Spark's own defaults."""

from __future__ import annotations

import pytest

from tfos.errors import ConfigError
from tfos.node_memory import NODE_MEMORY_MIB
from tfos.spark.executor_memory import mib, of_settings


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("2g", 2048),
        ("512", 512),
        ("512m", 512),
        ("1 GB", 1024),
        ("1gib", 1024),
        ("2048k", 2),
        ("1048576b", 1),
        ("1t", 1024**2),
    ],
)
def test_sizes_are_read_as_spark_reads_them(size, expected):
    assert mib(size) == expected


@pytest.mark.parametrize("size", ["", "2.5g", "-1g", "two", "1x", "1bb"])
def test_what_is_no_size_is_refused_with_itself(size):
    with pytest.raises(ConfigError, match="not a size that Spark understands"):
        mib(size)


@pytest.mark.parametrize(
    ("master", "conf", "parts"),
    [
        ("yarn", {}, (1024, 384, 0)),
        ("yarn", {"spark.executor.memory": "8g"}, (8192, 819, 0)),
        ("yarn", {"spark.executor.memoryOverhead": "3g"}, (1024, 3072, 0)),
        ("yarn", {"spark.executor.minMemoryOverhead": "1g"}, (1024, 1024, 0)),
        ("yarn", {"spark.executor.memoryOverheadFactor": "0.5"}, (1024, 512, 0)),
        ("k8s://h", {"spark.executor.memory": "4g"}, (4096, 1638, 0)),
        ("yarn", {"spark.memory.offHeap.size": "1073741824"}, (1024, 384, 0)),
        (
            "yarn",
            {"spark.memory.offHeap.enabled": "true", "spark.memory.offHeap.size": "1073741824"},
            (1024, 384, 1024),
        ),
        ("yarn", {"spark.executor.pyspark.memory": "8g"}, (1024, 384, 0, 8192)),
    ],
)
def test_a_container_is_the_sum_of_what_spark_asks_for(master, conf, parts):
    memory = of_settings(conf, master)
    found = (memory.heap_mib, memory.overhead_mib, memory.off_heap_mib, memory.python_mib)
    assert found == (*parts, 0)[:4]
    assert memory.container_mib == sum(parts)
    assert f"{sum(parts):.0f} MiB" in memory.sentence()


def test_a_shortage_names_the_sum_and_the_setting():
    memory = of_settings({"spark.executor.memory": "512m"}, "yarn")
    assert memory.shortage() == (
        "an executor's container of 896 MiB = 512 heap + 384 overhead: nodes use the overhead, and "
        "1 node needs 2048 MiB with TensorFlow, before any model. Set "
        "spark.executor.memoryOverhead=2048m or more"
    )
    assert "2 nodes need 4096 MiB" in memory.shortage(2)


def test_enough_overhead_and_hosts_without_containers_lack_nothing():
    enough = {"spark.executor.memoryOverhead": f"{NODE_MEMORY_MIB}m"}
    assert of_settings(enough, "yarn").shortage() == ""
    assert of_settings(enough, "yarn").shortage(2) != ""
    assert of_settings({}, "spark://h:7077").shortage() == ""


def test_nodes_use_the_memory_of_pythons_workers_too():
    conf = {"spark.executor.pyspark.memory": "8g", "spark.executor.cores": "2"}
    assert of_settings(conf, "yarn").room_mib == 8192 + 384
    assert of_settings(conf, "yarn").shortage(2) == ""
    assert "384 overhead + 8192 pyspark: nodes use" in of_settings(conf, "yarn").shortage(5)


def test_slots_are_cores_by_cores_of_a_task():
    conf = {"spark.executor.cores": "8", "spark.task.cpus": "2"}
    assert of_settings(conf, "yarn").slots == 4
    assert of_settings({}, "yarn").slots == 1
    with pytest.raises(ConfigError, match=r"spark.executor.cores='many'"):
        of_settings({"spark.executor.cores": "many"}, "yarn")
    with pytest.raises(ConfigError, match="memoryOverheadFactor='x'"):
        of_settings({"spark.executor.memoryOverheadFactor": "x"}, "yarn")
