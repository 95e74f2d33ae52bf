"""Job files: what is accepted, and how anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfos.errors import SettingsError
from tfos.files.inputs import InputFiles
from tfos.slots.resources import Resources, RoleResources
from tfos.submit.job_file import JobResources, of_tables, read

LEAST: dict[str, Any] = {"program": "train.py", "master": "yarn"}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("train.py", "digits.py", "words.txt", "env.tar.gz"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_whole_file_is_read(here: Path):
    (here / "job.toml").write_text(
        """
        program = "train.py"
        args = ["--nodes", "{nodes}", 3, 0.5, ""]
        name = "a job"
        master = "yarn"
        deploy_mode = "cluster"
        queue = "training"
        retries = 1
        python = "./env/bin/python"
        packages = ["org.example:reader:1.0"]
        py_files = ["digits.py", "hdfs:///lib/more.py"]
        files = ["words.txt"]
        archives = ["env.tar.gz#env"]
        roles = { ps = 1, workers = 2, placement = "spread" }

        [executor]
        cores = 4
        memory = "1g"
        overhead = "4g"
        [ps]
        cores = 2
        [workers]
        cores = 4
        gpus = 1
        [inputs]
        train = "hdfs:///data/train"
        test = { path = "/data/*.csv", mode = "download", share = "all" }
        [output]
        path = "hdfs:///out"
        [env]
        MODE = "fast"
        [conf]
        "spark.ui.enabled" = false
        "spark.port.maxRetries" = 3
        """
    )
    job = read(here / "job.toml")
    assert (job.program, job.nodes) == (str(here / "train.py"), 3)
    assert job.args == ("--nodes", "{nodes}", "3", "0.5", "")
    assert job.py_files == (str(here / "digits.py"), "hdfs:///lib/more.py")
    assert job.archives == (f"{here / 'env.tar.gz'}#env",)
    assert job.executor == JobResources(cores=4, memory="1g", overhead="4g")
    assert job.driver == JobResources()
    assert job.resources == RoleResources(Resources(cores=2), Resources(cores=4, gpus=1), "spread")
    assert job.inputs == (
        InputFiles(name="train", path="hdfs:///data/train"),
        InputFiles(name="test", path="/data/*.csv", mode="download", share="all"),
    )
    assert job.output == "hdfs:///out"
    assert job.conf == {"spark.ui.enabled": "false", "spark.port.maxRetries": "3"}


def test_what_is_left_out_is_one_worker_in_client_mode(here: Path):
    job = of_tables(LEAST, here)
    assert (job.ps, job.workers, job.deploy_mode, job.retries) == (0, 1, "client", 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"args": "--x"}, "args = '--x': allowed is a list of strings and numbers"),
        ({"args": [True]}, "args = [True]: allowed is"),
        ({"master": "spark"}, "master = 'spark': allowed is yarn, spark://HOST:PORT"),
        ({"master": 7077}, "master = 7077: allowed is yarn, spark://HOST:PORT"),
        ({"files": "a.txt"}, "files = 'a.txt': allowed is a list of paths"),
        ({"files": [7]}, "files = [7]: allowed is a list of paths"),
        ({"deploy_mode": "remote"}, "'remote': allowed is 'client' or 'cluster'"),
        ({"retries": -1}, "retries = -1: allowed is an int >= 0"),
        ({"retries": True}, "retries = True: allowed is an int >= 0"),
        ({"queue": ""}, "queue = '': allowed is the name of a queue"),
        ({"roles": {"workers": 0}}, "roles.workers = 0: allowed is an int >= 1"),
        ({"roles": 3}, "roles = 3: allowed is a table [roles]"),
        ({"executor": {"memory": "2.5g"}}, "executor.memory = '2.5g': allowed is a size"),
        ({"executor": {"memory": 2048}}, "executor.memory = 2048: allowed is a size"),
        ({"env": {"A-B": "x"}}, "allowed is a table of variables"),
        ({"env": {"A": ["x"]}}, "allowed is a table of variables"),
        ({"env": "A=x"}, "env = 'A=x': allowed is a table of variables"),
        ({"conf": {"ui.enabled": "x"}}, "allowed is a table of settings of Spark"),
        ({"conf": {"spark.a b": "x"}}, "allowed is a table of settings of Spark"),
        ({"conf": {"spark.a=b": "x"}}, "allowed is a table of settings of Spark"),
        ({"worker": 2}, "unknown key worker; did you mean roles.workers?"),
        ({"roles": {"worker": 2}}, "unknown key roles.worker; did you mean roles.workers?"),
        ({"executors": {"cores": 2}}, "unknown key executors; did you mean executor"),
        ({"workerss": {"cores": 2}}, "unknown key workerss; did you mean workers?"),
        ({"executor": {"core": 2}}, "unknown key executor.core; did you mean executor.cores?"),
        ({"memory": "2g"}, "unknown key memory; did you mean"),
        ({"zzzz": 1}, "unknown key zzzz; known are archives, args,"),
        ({"inputs": "/data"}, "inputs = '/data': allowed is a table [inputs]"),
        ({"inputs": {"a": "data"}}, "inputs.a.path = 'data': allowed is a URL, or an absolute"),
        ({"inputs": {"a": 7}}, "inputs.a.path = 7: allowed is a URL"),
        ({"inputs": {"a b": "/x"}}, "inputs.a b: an input's name has letters"),
        ({"inputs": {"a": {"mode": "list"}}}, "inputs.a.path is missing: a URL"),
        (
            {"inputs": {"a": {"path": "/x", "mode": "copy"}}},
            "inputs.a.mode = 'copy': allowed is 'list' or 'download'",
        ),
        (
            {"inputs": {"a": {"path": "/x", "share": True}}},
            "inputs.a.share = True: allowed is 'part' or 'all'",
        ),
        (
            {"inputs": {"a": {"path": "/x", "modes": "list"}}},
            "unknown key inputs.a.modes; did you mean mode?",
        ),
        ({"output": "/x"}, "output = '/x': allowed is a table [output]"),
        ({"output": {"path": "out"}}, "output.path = 'out': allowed is a URL, or an absolute"),
        ({"workers": 2}, "workers = 2: allowed is a table [workers]"),
        ({"workers": {"core": 2}}, "unknown key workers.core; did you mean workers.cores?"),
        ({"ps": {"gpus": 2}}, "unknown key ps.gpus; did you mean"),
        ({"roles": {"placement": "even"}}, "'even': allowed is 'spread' or 'pack'"),
        ({"program": "none.py"}, "program: 'none.py' is not there: "),
        ({"files": ["a,b"]}, "files: 'a,b' has a comma"),
        ({"packages": ["g:a:1", " "]}, "packages = ['g:a:1', ' ']: allowed is a list of Maven"),
        ({"args": ["a", True]}, "args = ['a', True]: allowed is a list of strings and numbers"),
        ({"name": "a\0b"}, "name = 'a\\x00b': allowed is a non-empty string"),
        ({"py_files": ["gone.py"]}, "py_files: 'gone.py' is not there"),
    ],
)
def test_wrong_keys_and_values_are_refused_by_name(here: Path, wrong, text):
    with pytest.raises(SettingsError) as refused:
        of_tables({**LEAST, **wrong}, here)
    assert text in str(refused.value)


def test_the_least_values_are_taken(here: Path):
    least = {"ps": 0, "workers": 1}, {"cores": 1, "gpus": 0, "memory": "1m"}
    job = of_tables({**LEAST, "retries": 0, "roles": least[0], "executor": least[1]}, here)
    assert (job.retries, job.ps, job.workers) == (0, 0, 1)
    assert job.executor == JobResources(cores=1, gpus=0, memory="1m")


@pytest.mark.parametrize("key", ["program", "master"])
def test_what_every_job_needs_is_named(here: Path, key):
    tables = {name: value for name, value in LEAST.items() if name != key}
    with pytest.raises(SettingsError, match=f"{key} is missing: "):
        of_tables(tables, here)


def test_patterns_and_urls_are_sparks_to_look_up(here: Path):
    job = of_tables({**LEAST, "files": ["*.txt"], "archives": ["s3a://b/env.zip#env"]}, here)
    assert (job.files, job.archives) == ((str(here / "*.txt"),), ("s3a://b/env.zip#env",))


def test_a_file_that_is_none_is_told_with_its_name(here: Path):
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read: No such file"):
        read(here / "none.toml")
    (here / "broken.toml").write_text("program =\n")
    with pytest.raises(SettingsError, match=r"broken\.toml is not TOML: .*line 1"):
        read(here / "broken.toml")
    (here / "latin.toml").write_bytes(b"program = '\xe4'")
    with pytest.raises(SettingsError, match=r"latin\.toml is not TOML"):
        read(here / "latin.toml")
    (here / "wrong.toml").write_text("retries = 'two'")
    with pytest.raises(SettingsError, match=r"wrong\.toml: retries = 'two'"):
        read(here / "wrong.toml")
