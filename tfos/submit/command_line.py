"""The line of spark-submit that runs a job.

Covers: the options of each cluster manager, what a manager cannot do, a line to copy.
Does not: read the file (tfos.submit.job_file), run the line (tfos.cli.submit). Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfos.driver import job_settings
from tfos.errors import SettingsError
from tfos.slots.resources import Resources
from tfos.spark import executor_memory
from tfos.submit.job_file import JobFile

_DEPLOY_MODE = "spark.submit.deployMode"
_OPTIONS = {
    "spark.master": "--master",
    _DEPLOY_MODE: "--deploy-mode",
    "spark.app.name": "--name",
    "spark.yarn.queue": "--queue",
    "spark.executor.instances": "--num-executors",
    "spark.cores.max": "--total-executor-cores",
    "spark.executor.cores": "--executor-cores",
    "spark.executor.memory": "--executor-memory",
    "spark.driver.cores": "--driver-cores",
    "spark.driver.memory": "--driver-memory",
    "spark.jars.packages": "--packages",
    "spark.submit.pyFiles": "--py-files",
    "spark.files": "--files",
    "spark.archives": "--archives",
}
"""spark-submit's own names of settings."""
_COUNTED = {
    "spark.executor.cores": "executor.cores and the roles' cores",
    "spark.executor.instances": "roles.ps and roles.workers",
    "spark.cores.max": "roles.ps, roles.workers and executor.cores",
}
"""Keys of a job file that make a setting, by its name; a key that is left out has a default."""
_NOT_WITH_LOCAL = ("spark.executor.memory",)
"""Settings whose options spark-submit drops with local-cluster; it takes the setting."""
_LOCAL_MIB = 1024


@dataclass(frozen=True, slots=True)
class SubmitLine:
    """One call of spark-submit."""

    variables: Mapping[str, str]
    """Variables of its environment, which is the driver's in client mode."""
    settings: Mapping[str, str]
    program: str
    args: tuple[str, ...]
    num_nodes: int
    """Nodes of the job; an executor has as many of them as it has slots."""

    def words(self, spark_submit: str) -> list[str]:
        """Return the command line.

        Args:
            spark_submit: the program.
        """
        options = (word for pair in self._pairs() for word in pair)
        return [spark_submit, *options, self.program, *self.args]

    def text(self, spark_submit: str) -> str:
        """Return it for a shell, one option a line.

        Args:
            spark_submit: the program.
        """
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        first = [*(("env", *variables) if variables else ()), spark_submit]
        lines = [first, *self._pairs(), [self.program, *self.args]]
        return " \\\n  ".join(shlex.join(words) for words in lines)

    def warning(self) -> str:
        """Return what the driver would warn of for lack of memory; "": nothing."""
        master = self.settings["spark.master"]
        memory = executor_memory.of_settings(self.settings, master)
        return memory.shortage(min(self.num_nodes, memory.slots))

    def _pairs(self) -> Iterator[tuple[str, str]]:
        is_local = self.settings["spark.master"].startswith("local")
        for key, value in self.settings.items():
            option = None if is_local and key in _NOT_WITH_LOCAL else _OPTIONS.get(key)
            yield (option, value) if option else ("--conf", f"{key}={value}")


def of_job(job: JobFile, more_args: Sequence[str] = ()) -> SubmitLine:
    """Return the line of a job.

    Args:
        job: the checked job.
        more_args: arguments for the program, after its own.

    Raises:
        SettingsError: two keys contradict each other, the master does not know one, or tfos does
            not know a setting `spark.tfos.*`.
    """
    _refuse(job)
    job_settings.stated(job.conf)
    settings = {key: value for key, value in _settings(job) if value}
    settings |= _environment(job)  # an empty variable is one
    for key, value in job.conf.items():
        if settings.get(key, value) != value:
            other = f"another key of this file says {settings[key]!r}; write one of the two."
            if key in _COUNTED:
                made = f"{_COUNTED[key]}, or their defaults, make it {settings[key]!r}"
                other = f"{made}; write these instead."
            if key == _DEPLOY_MODE:
                other = f"deploy_mode is {settings[key]!r}; write deploy_mode = {value!r} instead."
            raise SettingsError(f"conf.{key!r} = {value!r}: {other}")
    counts = {"nodes": job.nodes, "ps": job.ps, "workers": job.workers}
    return SubmitLine(
        variables=job.env if job.deploy_mode == "client" else {},
        settings={**settings, **job.conf},
        program=job.program,
        args=(*(_filled(each, counts) for each in job.args), *more_args),
        num_nodes=job.nodes,
    )


def _refuse(job: JobFile) -> None:
    """Refuse what a cluster manager would silently ignore."""
    is_yarn = job.master == "yarn"
    if job.queue and not is_yarn:
        raise SettingsError(f"queue = {job.queue!r}: master {job.master} has no queues, yarn has.")
    in_cluster = job.deploy_mode == "cluster"
    if in_cluster and not job.master.startswith(("yarn", "k8s")):
        raise SettingsError(
            f"deploy_mode = 'cluster': master {job.master} runs no driver of a Python program; "
            "allowed is 'client'."
        )
    if job.retries and not (is_yarn and in_cluster):
        raise SettingsError(
            f"retries = {job.retries}: only YARN starts a program again, with master = 'yarn' and "
            f"deploy_mode = 'cluster'; here they are {job.master!r} and {job.deploy_mode!r}."
        )
    if job.driver.cores and not in_cluster:
        raise SettingsError(
            f"driver.cores = {job.driver.cores}: in deploy_mode 'client' the driver has its host's."
        )
    if job.driver.overhead and not in_cluster:
        raise SettingsError(
            f"driver.overhead = {job.driver.overhead!r}: in deploy_mode 'client' the driver is not "
            "in a container."
        )
    if job.executor.overhead and not job.master.startswith(("yarn", "k8s")):
        raise SettingsError(
            f"executor.overhead = {job.executor.overhead!r}: executors of master {job.master} "
            "are not in containers; their host's memory is the limit."
        )
    _refuse_executors_of_threads(job)
    _refuse_roles(job)


def _refuse_roles(job: JobFile) -> None:
    """Refuse resources of a role that no executor of this job has."""
    if job.resources.ps is not None and not job.ps:
        raise SettingsError(f"[ps] with roles.ps = {job.ps}: there is no parameter server.")
    for role, field, value in _role_values(job):
        of_executor = getattr(job.executor, field)
        if job.master == "local" or job.master.startswith("local["):
            raise SettingsError(
                f"{role}.{field} = {value!r}: master {job.master} has one executor, inside the "
                "driver; use local-cluster for resources of roles."
            )
        if field != "memory" and of_executor and value > of_executor:
            raise SettingsError(
                f"{role}.{field} = {value}: an executor has executor.{field} = {of_executor}."
            )
        if field == "memory" and job.master.startswith("local-cluster"):
            raise SettingsError(
                f"{role}.memory = {value!r}: executors of master {job.master} are all alike; write "
                "executor.memory."
            )


def _role_values(job: JobFile) -> Iterator[tuple[str, str, Any]]:
    """Yield role, field and value of what the roles are given."""
    for role in ("ps", "workers"):
        asked = getattr(job.resources, role) or Resources()
        for field in ("cores", "gpus", "memory"):
            if (value := getattr(asked, field)) is not None:
                yield role, field, value


def _most(job: JobFile, field: str) -> int:
    """Return what an executor has: what is said, or what the larger role asks for; 0: neither."""
    asked = [value for _, name, value in _role_values(job) if name == field]
    return getattr(job.executor, field) or max(asked, default=0)


def _refuse_executors_of_threads(job: JobFile) -> None:
    if job.master == "local" or job.master.startswith("local["):
        for name in ("cores", "memory", "gpus"):
            if value := getattr(job.executor, name):
                raise SettingsError(
                    f"executor.{name} = {value!r}: master {job.master} has one executor, inside "
                    "the driver; use local-cluster for executors of their own."
                )
    elif job.master.startswith("local-cluster["):
        for name in ("cores", "memory"):
            if value := getattr(job.executor, name):
                raise SettingsError(
                    f"executor.{name} = {value!r}: master {job.master} says it already; write "
                    "master = 'local-cluster'."
                )


def _settings(job: JobFile) -> Iterator[tuple[str, str]]:
    """Yield Spark's settings in the order of the line; those without a value are left out."""
    executor, driver = job.executor, job.driver
    cores = _most(job, "cores") or 1
    of_roles = {field for _, field, _ in _role_values(job)}
    yield "spark.master", _master(job)
    yield _DEPLOY_MODE, job.deploy_mode  # spark-defaults.conf may say the other one
    yield "spark.app.name", job.name
    yield "spark.yarn.queue", job.queue
    if "memory" in of_roles:  # then Spark makes executors for each role, this many
        yield "spark.dynamicAllocation.enabled", "true"
        yield "spark.dynamicAllocation.minExecutors", str(max(job.ps, job.workers))
        yield "spark.dynamicAllocation.maxExecutors", str(max(job.ps, job.workers))
    elif job.master.startswith(("yarn", "k8s")):
        yield "spark.executor.instances", str(job.nodes)
    elif job.master.startswith("spark://"):
        yield "spark.cores.max", str(job.nodes * cores)
    if not job.master.startswith("local"):
        yield "spark.executor.cores", str(cores)
    yield "spark.executor.memory", executor.memory or ""
    yield "spark.executor.memoryOverhead", executor.overhead or ""
    if "spark.task.cpus" not in job.conf and cores > 1:
        yield "spark.task.cpus", str(cores)  # one slot, and so one node, on an executor
    if gpus := _most(job, "gpus"):
        yield "spark.executor.resource.gpu.amount", str(gpus)
        if "gpus" not in of_roles:
            yield "spark.task.resource.gpu.amount", str(gpus)
    yield "spark.driver.cores", str(driver.cores or "")
    yield "spark.driver.memory", driver.memory or ""
    yield "spark.driver.memoryOverhead", driver.overhead or ""
    is_of_yarn = job.master == "yarn" and job.deploy_mode == "cluster"
    # Without the setting YARN starts a program again once.
    if job.retries or (is_of_yarn and "spark.yarn.maxAppAttempts" not in job.conf):
        yield "spark.yarn.maxAppAttempts", str(job.retries + 1)
    yield "spark.pyspark.python", job.python
    yield "spark.pyspark.driver.python", job.driver_python
    yield "spark.jars.packages", ",".join(job.packages)
    yield "spark.submit.pyFiles", ",".join(job.py_files)
    yield "spark.files", ",".join(job.files)
    yield "spark.archives", ",".join(job.archives)
    yield from job_settings.of_job(job.resources, job.inputs, job.output)


def _master(job: JobFile) -> str:
    if job.master != "local-cluster":
        return job.master
    memory_mib = executor_memory.mib(job.executor.memory or f"{_LOCAL_MIB}m")
    return f"local-cluster[{job.nodes},{_most(job, 'cores') or 1},{memory_mib:.0f}]"


def _environment(job: JobFile) -> Iterator[tuple[str, str]]:
    of_driver = "spark.yarn.appMasterEnv" if job.master == "yarn" else "spark.kubernetes.driverEnv"
    for name, value in job.env.items():
        yield f"spark.executorEnv.{name}", value
        if job.deploy_mode == "cluster":
            yield f"{of_driver}.{name}", value


def _filled(text: str, counts: Mapping[str, int]) -> str:
    for name, count in counts.items():
        text = text.replace(f"{{{name}}}", str(count))
    return text
