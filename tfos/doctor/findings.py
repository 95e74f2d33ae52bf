"""Judgement of facts: what is in order, what is a warning, what is a problem, and the next step.

Covers: every check of `tfos doctor`, each a function of facts alone.
Does not: look at anything (tfos.doctor.collection). Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfos.config import ClusterConfig
from tfos.doctor.collection import ERROR, NAMES_S, PLACE, Facts
from tfos.driver import preflight
from tfos.errors import ConfigError
from tfos.node import versions
from tfos.node_memory import ADDRESS_SPACE_MIB, overhead_mib
from tfos.slots.offer import Offer
from tfos.spark import executor_memory
from tfos.spark.facts import SparkFacts

MIN_JAVA = 17
"""Java that Spark 4 needs."""
MIN_SHM_MIB = 65
"""More than the 64 MiB that containers have by default."""
SKEW_WARNING_S = 5.0
SKEW_PROBLEM_S = 300.0
"""From here on Kerberos refuses tickets."""
SLOW_IMPORT_S = 30.0
_NEWER_LINUX = (
    "run on Linux 5.4 or newer, x86-64 or arm64; a container's seccomp profile must allow the calls"
)
_ONE_ENVIRONMENT = (
    "let driver and executors run one environment: set PYSPARK_PYTHON to the same on every host, "
    "or ship one with --archives"
)


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement."""

    check: str
    level: Level
    text: str
    next_step: str = ""
    """What to do; empty: nothing, or the text says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a place's facts are compared with."""

    driver: Facts | None = None
    """The driver's facts; None: this is the driver."""
    nodes_on_host: int = 1
    """Nodes that the host of this place can be given at once; each may load TensorFlow."""


def of_place(facts: Facts, beside: Beside) -> list[Finding]:
    """Return the findings about one place, in the order of its facts.

    Args:
        facts: facts from `collect`.
        beside: what they are compared with.
    """
    found: list[Finding] = []
    has_tfos = ERROR not in facts.get("packages", {})
    for check, judge in _JUDGES.items():
        fact = facts.get(check)
        if fact is None:
            continue
        if ERROR not in fact:
            found += judge(fact, beside)
        elif has_tfos or check == "packages":  # without tfos most steps fail alike
            found.append(Finding(check, Level.PROBLEM, fact[ERROR], _step_after(check, facts)))
    return found


def of_silence(reason: str, executor_id: str, *, was_asked: bool = True) -> list[Finding]:
    """Return the finding about an executor that has sent no facts.

    Args:
        reason: what is known.
        executor_id: its number.
        was_asked: whether its turn came in time.
    """
    if not was_asked:
        step = "check those that did not answer first; --timeout waits longer"
        return [Finding("answer", Level.PROBLEM, reason, step)]
    next_step = (
        f"read the log of executor {executor_id}; PYSPARK_PYTHON must start there, in the driver's "
        "minor version; --timeout waits longer"
    )
    return [Finding("answer", Level.PROBLEM, reason, next_step)]


def of_settings(facts: SparkFacts) -> list[Finding]:
    """Return what `reserve` will say about Spark's settings, and the memory that they give.

    Args:
        facts: the SparkContext's facts.
    """
    found: list[Finding] = []
    try:
        preflight.check_spark(facts, ClusterConfig())
        memory = executor_memory.of_settings(facts.conf, facts.master)
        notes = preflight.notes(facts, memory.slots)  # as many nodes as an executor may be given
        found += [Finding("settings", Level.WARNING, note) for note in notes]
    except ConfigError as error:
        return [*found, Finding("settings", Level.PROBLEM, str(error))]
    if memory.is_contained and not memory.shortage(memory.slots):
        found.append(Finding("memory", Level.OK, memory.sentence()))
    return found or [Finding("settings", Level.OK, "nothing that reserve() refuses or warns of")]


def of_offer(offer: Offer, waited_s: float) -> Finding:
    """Return whether the configured executors are there.

    Args:
        offer: what has registered.
        waited_s: how long they were awaited.
    """
    there = len(offer.executors)
    slots = f"{there} executor{'' if there == 1 else 's'} with {offer.total} task slots"
    if there and not offer.outstanding:
        return Finding("executors", Level.OK, slots)
    known = f" ({offer.whereabouts})" if offer.whereabouts else ""
    wanted = there + offer.outstanding or "the"
    text = f"{there} of {wanted} executors registered within {waited_s:.0f} s{known}"
    next_step = (
        "see the cluster manager's queue and nodes for memory and cores; ask for fewer or smaller "
        "executors (--conf spark.executor.instances=N, spark.executor.memory=M); --timeout waits "
        "longer"
    )
    return Finding("executors", Level.PROBLEM, text, next_step)


def _host(fact: Facts, _: Beside) -> Iterator[Finding]:
    name, host = fact["hostname"], fact["host"]
    yield Finding("host", Level.OK, name if host == name else f"{name}, for others {host}")


def _python(fact: Facts, beside: Beside) -> Iterator[Finding]:
    here = f"{fact['version']} {fact['executable']}"
    if fact["lacks"]:
        text = f"{here}: pidfd_open and memfd_create, which nodes need, fail: {fact['lacks']}"
        yield Finding("python", Level.PROBLEM, text, _NEWER_LINUX)
        return
    driver = (beside.driver or {}).get("python", fact)
    differences = versions.compare({"python": driver["version"]}, {"python": fact["version"]})
    if not differences:
        yield Finding("python", Level.OK, here)
        return
    level = Level.PROBLEM if differences[0].is_fatal else Level.WARNING
    yield Finding("python", level, f"{here} (driver: {driver['version']})", _ONE_ENVIRONMENT)


def _packages(fact: Facts, beside: Beside) -> Iterator[Finding]:
    mine = {name: version for name, version in fact.items() if name != "python"}
    if beside.driver is None:
        shown = ", ".join(f"{name} {version}" for name, version in mine.items())
        yield Finding("packages", Level.OK, shown)
        return
    driver = beside.driver.get("packages", {})
    theirs = {name: version for name, version in driver.items() if name not in ("python", ERROR)}
    differences = versions.compare(theirs, mine)
    # TensorFlow and Keras have a check of their own; the driver needs neither.
    elsewhere = {"tensorflow", "keras", versions.SOURCE, versions.DIRECTORY}
    missing = sorted(theirs.keys() - mine.keys() - elsewhere)
    if differences:
        level = Level.PROBLEM if any(each.is_fatal for each in differences) else Level.WARNING
        yield Finding("packages", level, versions.sentence(differences), _ONE_ENVIRONMENT)
    if missing:
        text = f"not installed here, and at the driver: {', '.join(missing)}"
        yield Finding("packages", Level.WARNING, text, _ONE_ENVIRONMENT)
    if not differences and not missing:
        count = len(mine.keys() - {versions.DIRECTORY})  # which may be another one
        yield Finding("packages", Level.OK, f"{count} packages in the driver's versions")


def _java(fact: Facts, beside: Beside) -> Iterator[Finding]:
    if "silent_s" in fact:
        text = f"{fact['program']} -version did not answer within {fact['silent_s']:.0f} s"
        yield Finding("java", Level.WARNING, text, "run it there; the host or its disk is busy")
        return
    here = f"{fact['major']} {fact['program']}"
    driver_major = (beside.driver or {}).get("java", {}).get("major", fact["major"])
    if fact["major"] < MIN_JAVA:
        next_step = f"install a Java {MIN_JAVA} and set JAVA_HOME to it"
        yield Finding(
            "java", Level.PROBLEM, f"{here}: Spark 4 needs {MIN_JAVA} or later", next_step
        )
    elif fact["major"] != driver_major:
        next_step = "set JAVA_HOME to the same release on every host"
        yield Finding("java", Level.WARNING, f"{here} (driver: {driver_major})", next_step)
    else:
        yield Finding("java", Level.OK, here)


def _memory(fact: Facts, beside: Beside) -> Iterator[Finding]:
    address_space_mib = fact["address_space_mib"]
    if address_space_mib is not None and address_space_mib < ADDRESS_SPACE_MIB:
        yield Finding(
            "memory",
            Level.PROBLEM,
            f"address space is limited to {address_space_mib} MiB (RLIMIT_AS), and a process with "
            f"TensorFlow maps up to {ADDRESS_SPACE_MIB} MiB before any model, more with a GPU",
            "unset spark.executor.pyspark.memory, or raise ulimit -v on this host",
        )
    total_mib, available_mib = fact["total_mib"], fact["available_mib"]
    limit_mib = fact["limit_mib"]
    has = f"{_gib(available_mib)} of {_gib(total_mib)} available"
    if limit_mib is not None and limit_mib < total_mib:
        has = f"{has}, {_gib(limit_mib)} for this cgroup"
        total_mib, available_mib = limit_mib, min(available_mib, limit_mib)
    nodes = beside.nodes_on_host
    needed_mib = overhead_mib(nodes)
    need = f"{nodes} node{'s' if nodes > 1 else ''} with TensorFlow here need{'s' * (nodes == 1)}"
    text = f"{has}; {need} {_gib(needed_mib)} before any model"
    if available_mib >= needed_mib:
        yield Finding("memory", Level.OK, text)
        return
    level = Level.PROBLEM if total_mib < needed_mib else Level.WARNING
    next_step = "run fewer executors on this host, give them fewer cores, or free memory"
    yield Finding("memory", level, text, next_step)


def _gib(mib: float) -> str:
    """Return a size for people; so rounded that executors of one host often say the same."""
    gib = mib / 1024
    return f"{gib:.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"


def _shared_memory(fact: Facts, _: Beside) -> Iterator[Finding]:
    if fact["unshared"]:
        yield Finding(
            "/dev/shm",
            Level.WARNING,
            f"processes of this host exchange rows and tensors by sockets: {fact['unshared']}",
            "nothing to do unless feeding is the bottleneck",
        )
    size = f"{fact['free_mib']} of {fact['total_mib']} MiB free"
    if fact["is_writable"] and fact["free_mib"] >= MIN_SHM_MIB:
        yield Finding("/dev/shm", Level.OK, size)
        return
    size += "" if fact["is_writable"] else ", not writable"
    yield Finding(
        "/dev/shm",
        Level.WARNING,
        f"{size}: tfos needs none of it, other libraries do (multiprocessing, NCCL)",
        "start the container with --shm-size=1g, or mount an emptyDir of medium Memory there",
    )


def _gpus(fact: Facts, _: Beside) -> Iterator[Finding]:
    """Judge what nvidia-smi says; a host without it has no finding."""
    if "failed" in fact:
        yield Finding(
            "gpus", Level.WARNING, fact["failed"], "run nvidia-smi there; it needs the driver"
        )
    if fact.get("gpus"):
        yield Finding("gpus", Level.OK, "; ".join(fact["gpus"]))
    elif "gpus" in fact:
        yield Finding("gpus", Level.OK, "nvidia-smi lists none")
    if fact.get("held"):
        yield Finding(
            "gpus",
            Level.WARNING,
            f"held: {'; '.join(fact['held'])}",
            "a worker that Spark gives one of these whole does not start: end the processes, or "
            "set ClusterConfig(busy_gpus='warn')",
        )


def _clock(fact: Facts, _: Beside) -> Iterator[Finding]:
    """Judge what is certain: the clock differs by at least as much as this."""
    at_least_s, at_most_s = fact["ahead_at_least_s"], fact["ahead_at_most_s"]
    certain_s = max(at_least_s, -at_most_s, 0.0)
    if certain_s < SKEW_WARNING_S:
        bound_s = max(abs(at_least_s), abs(at_most_s))
        yield Finding("clock", Level.OK, f"within {max(1, round(bound_s + 0.5))} s of the driver's")
        return
    text = f"{certain_s:.0f} s {'ahead of' if at_least_s > 0 else 'behind'} the driver's"
    if certain_s >= SKEW_PROBLEM_S:
        text += ": Kerberos refuses this host's tickets"
    level = Level.PROBLEM if certain_s >= SKEW_PROBLEM_S else Level.WARNING
    yield Finding("clock", level, text, "let NTP or chrony set the clocks of all hosts")


def _ports(fact: Facts, _: Beside) -> Iterator[Finding]:
    if not fact["hidden"]:
        yield Finding("ports", Level.OK, f"free ones on {', '.join(fact['listened'])}")
        return
    yield Finding(
        "ports",
        Level.PROBLEM,
        f"nodes listen at {fact['hidden']}: other hosts do not reach them",
        "set SPARK_LOCAL_IP to an address of this host that others reach, or give its name that "
        "address in /etc/hosts",
    )


def _names(fact: Facts, _: Beside) -> Iterator[Finding]:
    names_step = (
        "give every host a name that all hosts resolve to the same address (DNS, /etc/hosts), or "
        "set SPARK_LOCAL_IP to each host's address"
    )
    is_fine = True
    for name, reason in fact["failed"].items():
        is_fine = False
        yield Finding("names", Level.PROBLEM, f"{name} is not resolved here: {reason}", names_step)
    for name in fact["misled"]:
        is_fine = False
        text = (
            f"{name}, another host, resolves to {fact['resolved'][name]} here, which is this host"
        )
        yield Finding("names", Level.PROBLEM, text, names_step)
    if untried := fact["untried"]:
        is_fine = False
        others = f" and {len(untried) - 1} more" if len(untried) > 1 else ""
        text = f"no time was left to resolve {untried[0]}{others}: others took {NAMES_S:.0f} s"
        slow_step = "check which name service this host asks (/etc/nsswitch.conf, /etc/resolv.conf)"
        yield Finding("names", Level.WARNING, text, slow_step)
    if fact["unreached"]:
        is_fine = False
        yield Finding(
            "names",
            Level.PROBLEM,
            f"the driver cannot be reached at {fact['driver']}: {fact['unreached']}",
            "open ports of the driver to the executors, or set spark.driver.host to an "
            "address that they reach",
        )
    if is_fine:
        known = ", ".join(fact["resolved"]) or "no other host"
        reached = "; the driver is reached" if fact["driver"] else ""
        yield Finding("names", Level.OK, f"{known}{reached}")


def _kernels(fact: Facts, _: Beside) -> Iterator[Finding]:
    servers = fact["ps"]
    unkept = [room["path"] for room in fact.values() if not room["is_kept"]]
    next_step = (
        "run `tfos warm DIR` once, and set TFOS_KERNEL_CACHE=DIR for the executors, a directory of "
        "their user alone"
    )
    if unkept:
        text = (
            f"no directory keeps them ({unkept[0]} is removed): each process compiles for seconds"
        )
        yield Finding("kernels", Level.WARNING, text, next_step)
    elif not servers["num_kernels"]:
        text = f"none compiled yet in {servers['path']}: the first start takes longer"
        yield Finding("kernels", Level.WARNING, text, next_step)
    else:
        yield Finding("kernels", Level.OK, f"{servers['num_kernels']} in {servers['path']}")


def _tensorflow(fact: Facts, _: Beside) -> Iterator[Finding]:
    if "missing" in fact:
        text = (
            f"{' and '.join(fact['missing'])} not installed: parameter servers alone can run here"
        )
        next_step = (  # tfos is in no index, so pip finds only one that is installed
            "pip install 'tfos[cpu]' there, or 'tfos[gpu]'; on a host without tfos: pip install "
            "'tfos-VERSION-py3-none-any.whl[cpu]', a wheel of scripts/build"
        )
        yield Finding("tensorflow", Level.WARNING, text, next_step)
        return
    if fact["compiled_again"]:
        yield Finding("tensorflow", Level.WARNING, fact["compiled_again"])
    if "silent_s" in fact:
        text = f"not imported within {fact['silent_s']:.0f} s"
    elif "import_s" not in fact:
        yield Finding("tensorflow", Level.OK, "installed; its import was not tried")
        return
    else:
        text = f"imported in {fact['import_s']:.1f} s, {fact['peak_mib']} MiB"
        if fact["import_s"] < SLOW_IMPORT_S:
            yield Finding("tensorflow", Level.OK, text)
            return
    next_step = "each start of a node waits for it: put the environment on a local disk"
    yield Finding("tensorflow", Level.WARNING, text, next_step)


def _hdfs(fact: Facts, _: Beside) -> Iterator[Finding]:
    yield Finding("hdfs", Level.OK, f"written, read and removed in {fact['took_s']:.1f} s")


_JUDGES: Mapping[str, Callable[[Any, Beside], Iterator[Finding]]] = {
    PLACE: _host,
    "python": _python,
    "packages": _packages,
    "java": _java,
    "memory": _memory,
    "/dev/shm": _shared_memory,
    "gpus": _gpus,
    "clock": _clock,
    "ports": _ports,
    "names": _names,
    "kernels": _kernels,
    "tensorflow": _tensorflow,
    "hdfs": _hdfs,
}


def _step_after(check: str, facts: Facts) -> str:
    """Return what to do after a step that has failed where it was tried."""
    python = facts.get("python", {}).get("executable", "python")
    return {
        "packages": f"install tfos where {python} is, or {_ONE_ENVIRONMENT}",
        "java": f"install a Java {MIN_JAVA} (openjdk-{MIN_JAVA}-jre-headless) and set JAVA_HOME",
        "ports": "set SPARK_LOCAL_IP to an address of this host",
        "kernels": f"run {python} -c 'import numba' there",
        "tensorflow": f"run {python} -c 'import tensorflow, keras' there",
        "hdfs": (
            "name a directory that exists and that this user may write to, and set "
            "HADOOP_CONF_DIR on this host, and a ticket, token or keytab where it wants Kerberos"
        ),
    }.get(check, "")
