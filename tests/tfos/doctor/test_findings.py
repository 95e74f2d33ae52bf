"""Facts in, findings out: what is in order, what is not, and the step after each problem."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tfos.doctor.findings import Beside, Finding, Level, of_offer, of_place, of_settings, of_silence
from tfos.node import versions
from tfos.slots.offer import ExecutorSlots, Offer
from tfos.spark.facts import SparkFacts

PACKAGES = {"python": "3.11.7", "tfos": "0.1.0", "numpy": "2.4.6", "tensorflow": "2.21.0"}
NAMES = {
    "resolved": {"h1": "10.0.0.1"},
    "failed": {},
    "misled": [],
    "driver": "d:1",
    "unreached": "",
    "untried": [],
}
GOOD: dict[str, dict[str, Any]] = {
    "place": {"host": "10.0.0.2", "executor_id": "3", "hostname": "h2"},
    "python": {"version": "3.11.7", "executable": "/env/bin/python", "lacks": ""},
    "packages": PACKAGES,
    "java": {"major": 17, "program": "/java/bin/java"},
    "memory": {
        "total_mib": 16384,
        "available_mib": 8192,
        "limit_mib": None,
        "address_space_mib": None,
    },
    "/dev/shm": {"total_mib": 1024, "free_mib": 1024, "is_writable": True, "unshared": ""},
    "gpus": {"gpus": ["0 NVIDIA H100, 512 of 81559 MB used"], "held": []},
    "ports": {"listened": {"127.0.0.1": 1, "10.0.0.2": 2}, "hidden": ""},
    "names": NAMES,
    "kernels": {
        "ps": {"path": "/cache/kernels-1", "is_kept": True, "num_kernels": 40},
        "feeding": {"path": "/cache/kernels-2", "is_kept": True, "num_kernels": 0},
    },
    "tensorflow": {"compiled_again": "", "import_s": 4.1, "peak_mib": 568},
    "hdfs": {"url": "hdfs://nn/x", "took_s": 0.2},
    "clock": {"ahead_at_least_s": -0.1, "ahead_at_most_s": 0.2},
}
DRIVER = {name: GOOD[name] for name in ("python", "packages", "java")}
BESIDE = Beside(driver=DRIVER, nodes_on_host=2)


def of(**changed: Any) -> dict[str, list[Finding]]:
    """Return the findings by check, of the good facts with these changed."""
    facts = copy.deepcopy(GOOD)
    for name, fact in changed.items():
        facts[name.replace("shm", "/dev/shm")] = fact
    found: dict[str, list[Finding]] = {}
    for each in of_place(facts, BESIDE):
        found.setdefault(each.check, []).append(each)
    return found


def test_a_place_in_order_has_one_finding_per_check():
    found = of_place(GOOD, BESIDE)
    assert [each.level for each in found] == [Level.OK] * len(GOOD)
    assert not any(each.next_step for each in found)
    assert "2 nodes with TensorFlow here need 4.0 GiB" in str(found)
    assert "imported in 4.1 s" in str(found)
    assert "h2, for others 10.0.0.2" in str(found)
    assert "'h1; the driver is reached'" in str(found)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD[name], **fields}


@pytest.mark.parametrize(
    ("check", "fact", "level", "text", "step"),
    [
        (
            "python",
            changed("python", version="3.12.1"),
            "problem",
            "driver: 3.11.7",
            "PYSPARK_PYTHON",
        ),
        (
            "python",
            changed("python", version="3.11.9"),
            "warning",
            "driver: 3.11.7",
            "PYSPARK_PYTHON",
        ),
        (
            "python",
            changed("python", lacks="Function not implemented (Linux 4.18)"),
            "problem",
            "which nodes need, fail: Function not implemented (Linux 4.18)",
            "Linux 5.4 or newer",
        ),
        ("packages", {**PACKAGES, "tfos": "0.2.0"}, "problem", "tfos 0.2.0 (driver: 0.1.0)", "env"),
        ("packages", {**PACKAGES, "numpy": "2.0.0"}, "warning", "numpy 2.0.0", "--archives"),
        ("packages", {"tfos": "0.1.0"}, "warning", "at the driver: numpy", "--archives"),
        (
            "packages",
            {"error": "ModuleNotFoundError: x"},
            "problem",
            "NotFound",
            "install tfos where",
        ),
        ("java", changed("java", major=11), "problem", "Spark 4 needs 17", "JAVA_HOME"),
        ("java", changed("java", major=21), "warning", "driver: 17", "JAVA_HOME"),
        ("java", {"error": "FileNotFoundError: java"}, "problem", "java", "install a Java 17"),
        ("memory", changed("memory", total_mib=4000), "ok", "before any model", ""),
        ("memory", changed("memory", available_mib=4096), "ok", "4.0 GiB of 16 GiB", ""),
        ("memory", changed("memory", available_mib=10 << 10), "ok", "10 GiB of 16 GiB", ""),
        ("memory", changed("memory", limit_mib=32 << 10), "ok", "of 16 GiB available; 2", ""),
        ("memory", changed("memory", address_space_mib=4096), "ok", "before any model", ""),
        (
            "memory",
            changed("memory", total_mib=4096, available_mib=3000),
            "warning",
            "2.9 GiB of 4.0",
            "free memory",
        ),
        (
            "memory",
            changed("memory", available_mib=3000),
            "warning",
            "2.9 GiB of 16",
            "fewer executors",
        ),
        (
            "memory",
            changed("memory", total_mib=3000, available_mib=3000),
            "problem",
            "need 4.0 GiB",
            "fewer executors",
        ),
        (
            "memory",
            changed("memory", limit_mib=2048),
            "problem",
            "2.0 GiB for this cgroup",
            "fewer",
        ),
        (
            "memory",
            changed("memory", address_space_mib=4095),
            "problem",
            "RLIMIT_AS",
            "pyspark.memory",
        ),
        ("shm", changed("/dev/shm", free_mib=64), "warning", "64 of 1024 MiB", "--shm-size"),
        ("shm", changed("/dev/shm", free_mib=65), "ok", "65 of 1024 MiB free", ""),
        ("shm", changed("/dev/shm", is_writable=False), "warning", "not writable", "--shm-size"),
        (
            "shm",
            changed("/dev/shm", unshared="aarch64 may"),
            "warning",
            "sockets: aarch64",
            "nothing",
        ),
        ("gpus", {"gpus": []}, "ok", "lists none", ""),
        ("gpus", changed("gpus", held=["0 by pid 9 (x)"]), "ok", "0 NVIDIA H100, 512 of", ""),
        ("names", {**NAMES, "resolved": {}}, "ok", "no other host; the driver is reached", ""),
        ("names", {**NAMES, "untried": ["h7"]}, "warning", "resolve h7: others", "name service"),
        ("gpus", {"failed": "nvidia-smi ended with 9"}, "warning", "ended with 9", "driver"),
        ("gpus", changed("gpus", held=["0 by pid 9 (x)"]), "warning", "0 by pid 9", "busy_gpus"),
        ("ports", {"error": "OSError: x"}, "problem", "OSError", "SPARK_LOCAL_IP"),
        ("ports", changed("ports", hidden="127.0.1.1"), "problem", "at 127.0.1.1:", "/etc/hosts"),
        (
            "names",
            {**NAMES, "failed": {"h9": "unknown"}},
            "problem",
            "h9 is not resolved",
            "/etc/hosts",
        ),
        ("names", {**NAMES, "misled": ["h1"]}, "problem", "h1, another host", "/etc/hosts"),
        ("names", {**NAMES, "untried": ["h7", "h8"]}, "warning", "h7 and 1 more", "name service"),
        (
            "names",
            {**NAMES, "unreached": "refused"},
            "problem",
            "d:1: refused",
            "spark.driver.host",
        ),
        (
            "tensorflow",
            {"missing": ["keras"]},
            "warning",
            "keras not installed",
            "without tfos: pip install 'tfos-VERSION-py3-none-any.whl[cpu]', a wheel of",
        ),
        ("tensorflow", {"compiled_again": "run compileall"}, "warning", "run compileall", ""),
        ("tensorflow", {"compiled_again": ""}, "ok", "not tried", ""),
        ("tensorflow", changed("tensorflow", import_s=30.0), "warning", "30.0 s", "local disk"),
        (
            "tensorflow",
            {"error": "RuntimeError: x"},
            "problem",
            "RuntimeError",
            "import tensorflow",
        ),
        ("hdfs", {"error": "PermissionError: x"}, "problem", "PermissionError", "HADOOP_CONF_DIR"),
        ("clock", {"ahead_at_least_s": 5, "ahead_at_most_s": 6}, "warning", "5 s ahead", "NTP"),
        ("clock", {"ahead_at_least_s": 6, "ahead_at_most_s": 7}, "warning", "6 s ahead", "NTP"),
        ("clock", {"ahead_at_least_s": -9, "ahead_at_most_s": -8}, "warning", "8 s behind", "NTP"),
        ("clock", {"ahead_at_least_s": 300, "ahead_at_most_s": 301}, "problem", "Kerberos", "NTP"),
        ("clock", {"ahead_at_least_s": -1, "ahead_at_most_s": 9}, "ok", "within 10 s", ""),
    ],
)
def test_each_check(check, fact, level, text, step):
    found = of(**{check: fact})[check.replace("shm", "/dev/shm")]
    [first] = [each for each in found if text in each.text]
    assert (first.level.value, step in first.next_step) == (level, True)
    assert all(each.next_step for each in found if each.level is Level.PROBLEM)


@pytest.mark.parametrize(
    ("check", "fact"),
    [
        ("packages", {**PACKAGES, "numpy": "2.0.0"}),
        ("packages", {"tfos": "0.1.0"}),
        ("ports", changed("ports", hidden="127.0.1.1")),
        ("names", {**NAMES, "failed": {"h9": "unknown"}}),
        ("names", {**NAMES, "misled": ["h1"]}),
        ("names", {**NAMES, "untried": ["h7"]}),
        ("names", {**NAMES, "unreached": "refused"}),
        ("tensorflow", changed("tensorflow", import_s=30.0)),
        ("clock", {"ahead_at_least_s": 6, "ahead_at_most_s": 7}),
    ],
)
def test_what_is_wrong_is_not_also_called_right(check, fact):
    found = of(**{check: fact})[check]
    assert Level.OK not in {each.level for each in found}


def test_a_host_that_others_know_by_its_own_name_is_named_once():
    [named] = of(place=changed("place", host="h2"))["host"]
    assert named.text == "h2"


def test_a_small_difference_of_clocks_is_no_matter_of_tickets():
    [late] = of(clock={"ahead_at_least_s": 6, "ahead_at_most_s": 7})["clock"]
    assert "Kerberos" not in late.text


def test_one_package_that_nodes_cannot_do_without_makes_all_differences_a_problem():
    [both] = of(packages={**PACKAGES, "tfos": "0.2.0", "numpy": "2.0.0"})["packages"]
    assert (both.level, "numpy 2.0.0" in both.text) == (Level.PROBLEM, True)


def test_kernels_are_kept_somewhere_and_compiled_before():
    kept = GOOD["kernels"]
    [lost] = of(kernels={**kept, "feeding": {**kept["feeding"], "is_kept": False}})["kernels"]
    assert lost.level is Level.WARNING
    assert "TFOS_KERNEL_CACHE" in lost.next_step
    [cold] = of(kernels={**kept, "ps": {**kept["ps"], "num_kernels": 0}})["kernels"]
    assert (cold.level, "none compiled yet" in cold.text) == (Level.WARNING, True)


def test_a_host_without_nvidia_smi_says_nothing_of_gpus():
    assert "gpus" not in of(gpus={})


def test_without_tfos_one_problem_says_so_rather_than_ten():
    missing = {"error": "ModuleNotFoundError: No module named 'tfos'"}
    facts = {**dict.fromkeys(GOOD, missing), "python": GOOD["python"]}
    problems = [each for each in of_place(facts, BESIDE) if each.level is Level.PROBLEM]
    assert [each.check for each in problems] == ["packages"]
    assert "install tfos where /env/bin/python is" in problems[0].next_step


def test_another_directory_of_one_source_is_no_version_of_the_drivers():
    driver = {**DRIVER, "packages": {**PACKAGES, versions.DIRECTORY: "/checkout/tfos"}}
    facts = {**GOOD, "packages": {**PACKAGES, versions.DIRECTORY: "/env/tfos"}}
    found = {each.check: each.text for each in of_place(facts, Beside(driver=driver))}
    assert found["packages"] == f"{len(PACKAGES) - 1} packages in the driver's versions"
    found = {each.check: each.text for each in of_place(GOOD, Beside(driver=driver))}
    assert found["packages"] == f"{len(PACKAGES) - 1} packages in the driver's versions"


def test_the_driver_lists_what_it_has():
    found = {each.check: each.text for each in of_place(GOOD, Beside())}
    assert found["packages"] == "tfos 0.1.0, numpy 2.4.6, tensorflow 2.21.0"
    assert "1 node with TensorFlow here needs 2.0 GiB" in found["memory"]


def settings(master: str, **conf: str) -> list[Finding]:
    given = {key.replace("_", "."): value for key, value in conf.items()}
    return of_settings(SparkFacts(master, "app", given, "file:///"))


def test_settings_say_what_reserve_would():
    assert [each.level for each in settings("local[4]")] == [Level.OK]
    [refused] = settings("yarn", spark_speculation="true")
    assert (refused.level, "spark.speculation=true" in refused.text) == (Level.PROBLEM, True)
    warned = settings("yarn", spark_executor_memory="512m")
    assert {each.level for each in warned} == {Level.WARNING}
    assert any("896 MiB = 512 heap + 384 overhead" in each.text for each in warned)
    roomy = settings("yarn", spark_executor_memoryOverhead="2g")
    assert "3072 MiB = 1024 heap + 2048 overhead" in roomy[-1].text
    slots = settings("yarn", spark_executor_memoryOverhead="2g", spark_executor_cores="4")
    assert {each.level for each in slots} == {Level.WARNING}
    assert "4 nodes need 8192 MiB" in slots[-1].text
    [wrong] = settings("yarn", spark_executor_memory="lots")
    assert (wrong.level, "'lots' is not a size" in wrong.text) == (Level.PROBLEM, True)


def test_executors_that_have_not_registered_are_a_problem():
    two = (ExecutorSlots("1", "h", 2), ExecutorSlots("2", "h", 2))
    assert of_offer(Offer(two, expected=2), 3.0) == Finding(
        "executors", Level.OK, "2 executors with 4 task slots"
    )
    missing = of_offer(Offer(two, expected=3, containers=3), 60.0)
    assert missing.level is Level.PROBLEM
    assert missing.text.startswith("2 of 3 executors registered within 60 s (1 has a container")
    none = of_offer(Offer(()), 60.0)
    assert (none.level, "0 of the executors" in none.text) == (Level.PROBLEM, True)


def test_silence_is_a_problem_with_the_executors_number():
    [silent] = of_silence("no answer within 60 s", "7")
    assert (silent.level, "executor 7" in silent.next_step) == (Level.PROBLEM, True)
    [unasked] = of_silence("not asked", "7", was_asked=False)
    assert (unasked.level, "executor 7" in unasked.next_step) == (Level.PROBLEM, False)
    assert "--timeout" in unasked.next_step
