"""From a job to the line of spark-submit, for each cluster manager; and a shell reads it back."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfos.errors import SettingsError
from tfos.files.inputs import InputFiles
from tfos.slots.resources import Resources, RoleResources
from tfos.submit.command_line import of_job
from tfos.submit.job_file import JobFile
from tfos.submit.job_file import JobResources as Given


def job(**changed: Any) -> JobFile:
    return JobFile(**{"program": "/p/train.py", "master": "yarn", **changed})


def options(**changed: Any) -> str:
    """Return the options between spark-submit and the program."""
    words = of_job(job(**changed)).words("spark-submit")
    assert words[0] == "spark-submit"
    return " ".join(words[1 : words.index("/p/train.py")])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "--master yarn --deploy-mode client --num-executors 1 --executor-cores 1"),
        (
            {"ps": 1, "workers": 2, "queue": "q", "name": "a"},
            "--master yarn --deploy-mode client "
            "--name a --queue q --num-executors 3 --executor-cores 1",
        ),
        (
            {"executor": Given(cores=4, memory="1g", overhead="3g")},
            "--master yarn --deploy-mode client "
            "--num-executors 1 --executor-cores 4 --executor-memory 1g "
            "--conf spark.executor.memoryOverhead=3g --conf spark.task.cpus=4",
        ),
        (
            {"executor": Given(cores=4), "conf": {"spark.task.cpus": "2"}},
            "--master yarn --deploy-mode client "
            "--num-executors 1 --executor-cores 4 --conf spark.task.cpus=2",
        ),
        (
            {"executor": Given(gpus=2)},
            "--master yarn --deploy-mode client --num-executors 1 --executor-cores 1 "
            "--conf spark.executor.resource.gpu.amount=2 --conf spark.task.resource.gpu.amount=2",
        ),
        (
            {"master": "spark://h:7077", "workers": 3, "executor": Given(cores=2)},
            "--master spark://h:7077 --deploy-mode client "
            "--total-executor-cores 6 --executor-cores 2 "
            "--conf spark.task.cpus=2",
        ),
        (
            {
                "master": "local-cluster",
                "ps": 1,
                "workers": 2,
                "executor": Given(memory="2g"),
            },
            "--master local-cluster[3,1,2048] --deploy-mode client --conf spark.executor.memory=2g",
        ),
        ({"master": "local[4]"}, "--master local[4] --deploy-mode client"),
        (
            {
                "master": "local-cluster",
                "workers": 2,
                "resources": RoleResources(workers=Resources(cores=2)),
            },
            "--master local-cluster[2,2,1024] --deploy-mode client "
            "--conf spark.task.cpus=2 --conf spark.tfos.workers.cores=2",
        ),
        (
            {
                "ps": 1,
                "workers": 2,
                "resources": RoleResources(Resources(cores=2), Resources(cores=4, gpus=1), "pack"),
            },
            "--master yarn --deploy-mode client "
            "--num-executors 3 --executor-cores 4 --conf spark.task.cpus=4 "
            "--conf spark.executor.resource.gpu.amount=1 --conf spark.tfos.ps.cores=2 "
            "--conf spark.tfos.workers.cores=4 --conf spark.tfos.workers.gpus=1 "
            "--conf spark.tfos.placement=pack",
        ),
        (
            {
                "master": "spark://h:7077",
                "ps": 1,
                "workers": 3,
                "resources": RoleResources(workers=Resources(memory="8g")),
            },
            "--master spark://h:7077 --deploy-mode client "
            "--conf spark.dynamicAllocation.enabled=true "
            "--conf spark.dynamicAllocation.minExecutors=3 "
            "--conf spark.dynamicAllocation.maxExecutors=3 --executor-cores 1 "
            "--conf spark.tfos.workers.memory=8g",
        ),
        (
            {
                "inputs": (InputFiles(name="a", path="/a", mode="download"),),
                "output": "hdfs:///out",
            },
            "--master yarn --deploy-mode client "
            "--num-executors 1 --executor-cores 1 --conf spark.tfos.inputs.a.path=/a "
            "--conf spark.tfos.inputs.a.mode=download --conf spark.tfos.inputs.a.share=part "
            "--conf spark.tfos.output=hdfs:///out",
        ),
        (
            {"master": "local-cluster[2,1,1024]"},
            "--master local-cluster[2,1,1024] --deploy-mode client",
        ),
        (
            {"deploy_mode": "cluster", "retries": 2, "env": {"A": "b"}},
            "--master yarn --deploy-mode cluster --num-executors 1 --executor-cores 1 "
            "--conf spark.yarn.maxAppAttempts=3 --conf spark.executorEnv.A=b "
            "--conf spark.yarn.appMasterEnv.A=b",
        ),
        (
            {"deploy_mode": "cluster", "env": {"CUDA_VISIBLE_DEVICES": ""}},
            "--master yarn --deploy-mode cluster --num-executors 1 --executor-cores 1 "
            "--conf spark.yarn.maxAppAttempts=1 --conf spark.executorEnv.CUDA_VISIBLE_DEVICES= "
            "--conf spark.yarn.appMasterEnv.CUDA_VISIBLE_DEVICES=",
        ),
        (
            {"deploy_mode": "cluster", "conf": {"spark.yarn.maxAppAttempts": "4"}},
            "--master yarn --deploy-mode cluster --num-executors 1 --executor-cores 1 "
            "--conf spark.yarn.maxAppAttempts=4",
        ),
        (
            {"master": "k8s://h", "deploy_mode": "cluster", "env": {"A": "b"}},
            "--master k8s://h --deploy-mode cluster --num-executors 1 --executor-cores 1 "
            "--conf spark.executorEnv.A=b --conf spark.kubernetes.driverEnv.A=b",
        ),
        (
            {"deploy_mode": "cluster", "driver": Given(cores=2, memory="1g", overhead="2g")},
            "--master yarn --deploy-mode cluster --num-executors 1 --executor-cores 1 "
            "--driver-cores 2 --driver-memory 1g --conf spark.driver.memoryOverhead=2g "
            "--conf spark.yarn.maxAppAttempts=1",
        ),
        (
            {
                "packages": ("g:a:1", "g:b:2"),
                "py_files": ("/a.py", "/b.py"),
                "files": ("/w",),
                "archives": ("/e.zip#env",),
                "python": "./env/bin/python",
                "driver_python": "/usr/bin/python3",
            },
            "--master yarn --deploy-mode client --num-executors 1 --executor-cores 1 "
            "--conf spark.pyspark.python=./env/bin/python "
            "--conf spark.pyspark.driver.python=/usr/bin/python3 --packages g:a:1,g:b:2 "
            "--py-files /a.py,/b.py --files /w --archives /e.zip#env",
        ),
    ],
)
def test_each_manager_gets_its_options(changed, expected):
    assert options(**changed) == expected


def test_a_role_may_have_what_an_executor_has_and_another_memory():
    roles = RoleResources(workers=Resources(cores=2, memory="640m"))
    line = options(executor=Given(cores=2, memory="512m"), resources=roles)
    assert "--executor-cores 2 --executor-memory 512m" in line
    assert "spark.tfos.workers.memory=640m" in line


def test_counts_are_filled_into_the_programs_arguments():
    args = ("--n", "{nodes}", "--of={ps}+{workers}", '{"json": 1}', "{other}")
    line = of_job(job(ps=1, workers=2, args=args), ["{nodes}"])
    assert line.args == ("--n", "3", "--of=1+2", '{"json": 1}', "{other}", "{nodes}")


def test_a_setting_that_says_the_same_as_another_key_is_none_too_many():
    assert options(conf={"spark.submit.deployMode": "client"}) == options()


def test_variables_are_the_drivers_own_in_client_mode_only():
    assert of_job(job(env={"A": "b c"})).variables == {"A": "b c"}
    text = of_job(job(env={"A": "b c"})).text("spark-submit")
    assert text.startswith("env 'A=b c' spark-submit \\\n  --master yarn")
    assert of_job(job(env={"A": "b"}, deploy_mode="cluster")).variables == {}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"master": "local[2]", "queue": "q"}, "queue = 'q': master local[2] has no queues"),
        ({"retries": 1}, "retries = 1: only YARN starts a program again"),
        (
            {"master": "k8s://h", "deploy_mode": "cluster", "retries": 1},
            "retries = 1: only YARN starts a program again",
        ),
        (
            {"master": "spark://h:1", "deploy_mode": "cluster"},
            "deploy_mode = 'cluster': master spark://h:1 runs no driver of a Python program",
        ),
        ({"driver": Given(cores=2)}, "driver.cores = 2: in deploy_mode 'client'"),
        (
            {"driver": Given(overhead="1g")},
            "driver.overhead = '1g': in deploy_mode 'client'",
        ),
        (
            {"master": "spark://h:1", "executor": Given(overhead="1g")},
            "executor.overhead = '1g': executors of master spark://h:1",
        ),
        (
            {"master": "local[2]", "executor": Given(memory="1g")},
            "executor.memory = '1g': master local[2] has one executor, inside the driver",
        ),
        (
            {"master": "local", "executor": Given(gpus=1)},
            "executor.gpus = 1: master local has one executor, inside the driver",
        ),
        (
            {"master": "local-cluster[2,1,1024]", "executor": Given(cores=2)},
            "executor.cores = 2: master local-cluster[2,1,1024] says it already",
        ),
        (
            {"resources": RoleResources(ps=Resources(cores=2))},
            "[ps] with roles.ps = 0: there is no parameter server",
        ),
        (
            {
                "executor": Given(cores=2),
                "resources": RoleResources(workers=Resources(cores=4)),
            },
            "workers.cores = 4: an executor has executor.cores = 2",
        ),
        (
            {"master": "local[4]", "resources": RoleResources(workers=Resources(cores=4))},
            "workers.cores = 4: master local[4] has one executor, inside the driver",
        ),
        (
            {"master": "local", "resources": RoleResources(workers=Resources(gpus=1))},
            "workers.gpus = 1: master local has one executor, inside the driver",
        ),
        (
            {"master": "local-cluster", "resources": RoleResources(workers=Resources(memory="1g"))},
            "workers.memory = '1g': executors of master local-cluster are all alike",
        ),
        (
            {
                "deploy_mode": "cluster",
                "retries": 1,
                "conf": {"spark.yarn.maxAppAttempts": "4"},
            },
            "conf.'spark.yarn.maxAppAttempts' = '4': another key of this file says '2'",
        ),
        (
            {"conf": {"spark.submit.deployMode": "cluster"}},
            "conf.'spark.submit.deployMode' = 'cluster': deploy_mode is 'client'; write "
            "deploy_mode = 'cluster' instead",
        ),
        (
            {"conf": {"spark.executor.cores": "2"}},
            "conf.'spark.executor.cores' = '2': executor.cores and the roles' cores, or their "
            "defaults, make it '1'; write these instead",
        ),
        (
            {"conf": {"spark.executor.instances": "9"}, "workers": 2},
            "roles.ps and roles.workers, or their defaults, make it '2'; write these instead",
        ),
        (
            {"conf": {"spark.tfos.ps.core": "2"}},
            "unknown setting spark.tfos.ps.core; did you mean spark.tfos.ps.cores?",
        ),
    ],
)
def test_what_a_manager_would_ignore_is_refused(changed, text):
    with pytest.raises(SettingsError) as refused:
        of_job(job(**changed))
    assert text in str(refused.value)


def test_a_container_too_small_for_a_node_is_warned_of():
    assert "spark.executor.memoryOverhead=2048m" in of_job(job()).warning()
    assert of_job(job(executor=Given(overhead="2g"))).warning() == ""
    assert of_job(job(master="local-cluster")).warning() == ""
    slots = {
        "executor": Given(cores=4, overhead="2g"),
        "conf": {"spark.task.cpus": "1"},
    }
    assert of_job(job(**slots)).warning() == ""
    assert "3 nodes need 6144 MiB" in of_job(job(ps=1, workers=2, **slots)).warning()
    assert "4 nodes need 8192 MiB" in of_job(job(ps=1, workers=8, **slots)).warning()


TEXTS = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1
).filter(
    lambda text: "\\\n" not in text  # what ends the lines
)


@given(
    args=st.lists(TEXTS),
    env=st.dictionaries(st.from_regex(r"[A-Z_]\w{0,8}", fullmatch=True).filter(str.isascii), TEXTS),
    conf=st.dictionaries(st.from_regex(r"spark\.x[a-z.]{0,8}", fullmatch=True), TEXTS),
)
def test_a_shell_reads_the_printed_line_as_the_words_that_are_run(args, env, conf):
    line = of_job(job(args=tuple(args), env=env, conf=conf))
    variables = [f"{name}={value}" for name, value in env.items()]
    words = [*(["env", *variables] if env else []), *line.words("spark-submit")]
    # Not by a shell: it would run whatever is quoted wrongly.
    assert shlex.split(line.text("spark-submit").replace(" \\\n", " ")) == words
