"""An examination: the driver, a Spark that is started for it, every executor, a directory on HDFS.

Covers: the order of things, what is asked of which place, bounds, cleaning up.
Does not: collect facts or judge them (tfos.doctor.collection, findings), print (tfos.cli.doctor).
Runs in: the process of `tfos doctor`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from feeding.errors import FeedError, NotAuthenticated
from feeding.filesystem.bounded_calls import BoundedCalls, CallTimeout
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.location import LOCAL, Location, parse
from feeding.filesystem.registry import filesystem_for
from tfos.doctor import collection, executors, findings
from tfos.doctor.collection import (
    CHECKS_OF_ANY_PLACE,
    CHECKS_OF_NODES,
    PLACE,
    CollectRequest,
    Facts,
)
from tfos.doctor.findings import Beside, Finding, Level
from tfos.doctor.probe_port import open_probe_port
from tfos.driver.server_address import server_host
from tfos.errors import SettingsError
from tfos.slots.offer import ExecutorSlots, Offer
from tfos.slots.reading import read_offer
from tfos.slots.yarn import YarnContainers
from tfos.spark.facts import SparkFacts, read_facts
from tfos.spark.jobs import reason_of

DEFAULT_TIMEOUT_S = 120.0
_SETTLE_S = 3.0
"""Seconds to wait if nothing says how many executors there will be."""
_LOOK_S = 0.2
_STOP_S = 30.0
_MOST_NAMES = 16
"""Hosts that one place resolves: thousands of names one by one would take all of its time."""
_HDFS = FileSystemConfig(call_timeout_s=10.0, patience_s=20.0)
_OWN_SETTINGS = {
    # It waits for executors itself, with a bound, and says which are missing.
    "spark.scheduler.minRegisteredResourcesRatio": "0",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.task.maxFailures": "1",  # a task that fails is a finding, not to be tried again
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationRequest:
    """What to examine."""

    master: str = ""
    """Spark's master; empty: this host alone, without Spark."""
    conf: Mapping[str, str] = field(default_factory=dict)
    hdfs: str = ""
    """URL of an existing directory to write to; empty: none."""
    with_tensorflow: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds for each of: Spark's start, its executors, their answers."""


@dataclass(frozen=True, slots=True)
class PlaceReport:
    """One place: facts and findings."""

    name: str
    host: str
    findings: tuple[Finding, ...]
    facts: Facts = field(default_factory=dict)

    @property
    def has_problem(self) -> bool:
        """Whether a finding is a problem."""
        return any(each.level is Level.PROBLEM for each in self.findings)


Say = Callable[[str], object]
"""Shows what is waited for."""


def _silent(_text: str) -> None:
    """Show nothing."""


def examine(
    wanted: ExaminationRequest,
    *,
    start_spark: Callable[[ExaminationRequest], Any] | None = None,
    say: Say = _silent,
) -> list[PlaceReport]:
    """Examine all places; what cannot be reached is a finding.

    Args:
        wanted: what to examine.
        start_spark: makes the SparkContext; None: pyspark's.
        say: called with each step that may take long.

    Raises:
        SettingsError: `wanted.hdfs` is not a URL.
    """
    with _fresh_directory(wanted.hdfs) as fresh:
        if not wanted.master:
            say("examining this host")
            reports = [_this_host(wanted, fresh)]
        else:
            reports = _cluster(wanted, fresh, start_spark or _spark_context, say)
    if fresh.failures:
        reports.append(PlaceReport(fresh.parent, "", tuple(fresh.failures)))
    return reports


@dataclass(slots=True)
class _FreshDirectory:
    """A directory of this examination alone."""

    parent: str
    location: Location | None = None
    """Its place; None: there is none, and nothing is to be written."""
    failures: list[Finding] = field(default_factory=list)

    def file(self, name: str) -> str:
        return "" if self.location is None else str(self.location.child(name))


@contextmanager
def _fresh_directory(parent: str) -> Iterator[_FreshDirectory]:
    """Make it below an existing directory, and remove it with all that is in it."""
    fresh = _FreshDirectory(parent)
    if not parent:
        yield fresh
        return
    location = _url(parent)
    try:
        files = filesystem_for(parent, _HDFS)
        if not files.status(parent).is_directory:
            raise NotADirectoryError(f"{parent} is not a directory")
        made = location.child(f"tfos-doctor-{secrets.token_hex(6)}")
        files.mkdirs(str(made))
        fresh.location = made
    except (OSError, FeedError) as error:
        text = f"no directory could be created in {parent}: {error}"
        unproved = isinstance(error, NotAuthenticated)
        fresh.failures.append(Finding("hdfs", Level.PROBLEM, text, _PROOF if unproved else _PARENT))
        yield fresh
        return
    try:
        yield fresh
    finally:
        try:
            files.delete(str(made), recursive=True)
        except OSError as error:
            text = f"{made} could not be removed: {error}"
            fresh.failures.append(Finding("hdfs", Level.PROBLEM, text, "remove it by hand"))


_PARENT = (
    "name an existing directory that this user may write to, such as hdfs:///user/NAME; hdfs:///… "
    "needs HADOOP_CONF_DIR"
)
_PROOF = "get a valid ticket, token or keytab as the text says, and run it again"


def _url(text: str) -> Location:
    try:
        location = parse(text)
    except FeedError as error:
        raise SettingsError(f"--hdfs: {error}") from error
    if "://" not in text or (location.scheme == LOCAL and not location.path.startswith("/")):
        raise SettingsError(
            f"--hdfs {text!r} is not a URL: name an existing directory, such as hdfs:///user/NAME."
        )
    return location


def _request(wanted: ExaminationRequest, hdfs: str, *, for_nodes: bool) -> CollectRequest:
    checks = (*CHECKS_OF_ANY_PLACE, *(CHECKS_OF_NODES if for_nodes else ()))
    return CollectRequest(
        checks=tuple(check for check in checks if hdfs or check != "hdfs"),
        with_tensorflow=wanted.with_tensorflow,
        hdfs=hdfs,
    )


def _this_host(wanted: ExaminationRequest, fresh: _FreshDirectory) -> PlaceReport:
    request = _request(wanted, fresh.file("this-host"), for_nodes=True)
    return _own_report("this host", replace(request, is_loopback=True), wanted.timeout_s)


def _cluster(
    wanted: ExaminationRequest,
    fresh: _FreshDirectory,
    start_spark: Callable[[ExaminationRequest], Any],
    say: Say,
) -> list[PlaceReport]:
    calls = BoundedCalls(2)
    say(f"starting Spark on {wanted.master}, {wanted.timeout_s:.0f} s at most")
    try:
        sc = calls.start(lambda: start_spark(wanted), _STOP_S).result(wanted.timeout_s)
    except Exception as error:  # noqa: BLE001 - pyspark's and py4j's many; the finding has its text
        request = _request(wanted, fresh.file("driver"), for_nodes=False)
        driver = _own_report("driver", request, wanted.timeout_s)
        return [driver, PlaceReport("Spark", wanted.master, (_no_spark(error, wanted),))]
    reports: list[PlaceReport] = []
    try:
        _add_reports(reports, sc, wanted, fresh, say)
    except Exception as error:  # noqa: BLE001 - a Spark that ends meanwhile fails in many ways
        text = f"the examination ended early: {reason_of(error)}"
        step = "check whether the application was killed; the reason may be above, or in its log"
        ended = Finding("spark", Level.PROBLEM, text, step)
        reports.append(PlaceReport("Spark", wanted.master, (ended,)))
    finally:
        with suppress(Exception):  # the JVM ends with this process anyway
            calls.start(sc.stop, _STOP_S).result(_STOP_S)
    return reports


def _add_reports(
    reports: list[PlaceReport],
    sc: Any,
    wanted: ExaminationRequest,
    fresh: _FreshDirectory,
    say: Say,
) -> None:
    """Add each report once it is finished: those before an error count."""
    facts = read_facts(sc)
    host = server_host(os.environ, facts)
    offer, waited_s = _await_executors(sc, facts, wanted.timeout_s, say)
    settings = (*findings.of_settings(facts), findings.of_offer(offer, waited_s))
    reports.append(PlaceReport("Spark", facts.master, settings))
    # On one host everything uses loopback, and no name is looked up.
    executor_hosts = [] if facts.is_local else [each.host for each in offer.executors]
    hosts = tuple(dict.fromkeys(host for host in executor_hosts if host))
    asked = replace(
        _request(wanted, fresh.file("driver"), for_nodes=False),
        is_loopback=facts.is_local,
        host=host.told,
        bound=host.bound,
        names=some_of(hosts, host.told, _MOST_NAMES),
    )
    say("examining the driver")
    driver = _own_report("driver", asked, wanted.timeout_s)
    reports.append(driver)
    say(f"examining each of {len(offer.executors)} executors, {wanted.timeout_s:.0f} s at most")
    of = {each.executor_id: each.host for each in offer.executors}
    with open_probe_port(host.bound) as port:
        asked = replace(
            asked,
            is_executor=True,
            checks=_request(wanted, asked.hdfs, for_nodes=True).checks,
            driver=(host.told, port),
        )
        visits = executors.visit_all(
            sc,
            sorted(offer.executors, key=_number),
            lambda executor_id: replace(
                asked,
                hdfs=fresh.file(f"executor-{executor_id}"),
                names=tuple(
                    dict.fromkeys((host.told, *some_of(hosts, of[executor_id], _MOST_NAMES)))
                ),
            ),
            wanted.timeout_s,
        )
    reports += _executor_reports(visits, driver.facts)


def some_of(hosts: Sequence[str], own: str, most: int) -> tuple[str, ...]:
    """Return the hosts after one's own, in a ring: each host is resolved by another one.

    Args:
        hosts: all, each once.
        own: the host that must resolve the others.
        most: largest number of hosts.
    """
    at = hosts.index(own) + 1 if own in hosts else 0
    ring = (*hosts[at:], *hosts[:at])
    return ring[: min(most, len(ring))]


def _executor_reports(visits: list[executors.Visit], driver: Facts) -> list[PlaceReport]:
    slots: Counter[str] = Counter()
    for visit in visits:
        slots[_host_of(visit)] += visit.executor.slots
    reports = []
    for visit in visits:
        executor_id = visit.executor.executor_id
        if visit.facts is None:
            found = findings.of_silence(visit.reason, executor_id, was_asked=visit.was_asked)
        else:
            beside = Beside(driver=driver, nodes_on_host=slots[_host_of(visit)])
            found = findings.of_place(visit.facts, beside)
        name = f"executor {executor_id}"
        reports.append(PlaceReport(name, _host_of(visit), tuple(found), visit.facts or {}))
    return reports


def _number(executor: ExecutorSlots) -> tuple[int, str]:
    """Return a sort key of executors by number; that of local mode has none."""
    name = executor.executor_id
    return (int(name) if name.isdecimal() else 0, name)


def _host_of(visit: executors.Visit) -> str:
    """Return the machine's own name: Spark has several for one machine, and at first none."""
    return str((visit.facts or {}).get(PLACE, {}).get("hostname", visit.executor.host))


def _own_report(name: str, request: CollectRequest, timeout_s: float) -> PlaceReport:
    """Examine this process's host; a step that hangs is abandoned with its thread."""
    host = socket.gethostname()
    calls = BoundedCalls(1)
    try:
        facts = calls.start(lambda: collection.collect(request), timeout_s).result(timeout_s)
    except CallTimeout as error:
        silent = Finding("answer", Level.PROBLEM, str(error), "--timeout waits longer")
        return PlaceReport(name, host, (silent,))
    return PlaceReport(name, host, tuple(findings.of_place(facts, Beside())), facts)


def _await_executors(sc: Any, facts: SparkFacts, timeout_s: float, say: Say) -> tuple[Offer, float]:
    """Wait until all configured executors have registered, or no more come; say how long."""
    containers = YarnContainers(sc)
    began_s = changed_s = time.monotonic()
    count = -1
    while True:
        offer = read_offer(sc, facts)
        now_s = time.monotonic()
        if len(offer.executors) != count:
            count, changed_s = len(offer.executors), now_s
            expected = "" if offer.expected is None else f" of {offer.expected}"
            say(f"{count}{expected} executors have registered; waiting {timeout_s:.0f} s at most")
        is_settled = offer.expected is None and count and now_s - changed_s >= _SETTLE_S
        if offer.complete or is_settled or now_s - began_s >= timeout_s:
            return replace(offer, containers=containers.count()), now_s - began_s
        time.sleep(_LOOK_S)


def _spark_context(wanted: ExaminationRequest) -> Any:
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setMaster(wanted.master).setAppName("tfos doctor")
    for key, value in {**_OWN_SETTINGS, **wanted.conf}.items():
        conf.set(key, value)
    return SparkContext(conf=conf)


def _no_spark(error: Exception, wanted: ExaminationRequest) -> Finding:
    if isinstance(error, ModuleNotFoundError):
        text = f"Spark cannot be started: {error}"
        return Finding("start", Level.PROBLEM, text, "pip install 'tfos[spark]'")
    if isinstance(error, CallTimeout):
        text = f"Spark did not start within {wanted.timeout_s:.0f} s"
        step = "check whether the master answers and the queue has room; --timeout waits longer"
        return Finding("start", Level.PROBLEM, text, step)
    text = f"Spark did not start: {reason_of(error)}"
    step = f"its own words are above; check --master {wanted.master}, JAVA_HOME and HADOOP_CONF_DIR"
    return Finding("start", Level.PROBLEM, text, step)
