"""Reservation: counts slots, makes keys, opens the control plane, waits for the roster.

Covers: the order of the checks, waiting for executors, the cluster's secrets, the error that names
missing nodes.
Does not: judge arguments (tfos.driver.preflight, topology) or start nodes (tfos.driver.node_jobs).
Runs in: the driver.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rpc import endpoint
from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials, Role
from tfos.config import ClusterConfig, InputMode, TensorBoardConfig
from tfos.console.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.control.identity import OPERATOR_NAME
from tfos.control.state.cluster_view import ClusterView
from tfos.driver import job_settings, preflight, server_address
from tfos.driver.node_jobs import NodeKeys
from tfos.driver.shown_wait import shown_wait
from tfos.errors import ReservationTimeout
from tfos.files import paths
from tfos.monitor import training
from tfos.monitor.prometheus import ClusterPage, MetricsRequest
from tfos.native import legacy_keras
from tfos.node.spec import NodeSettings
from tfos.phases import ClusterPhase
from tfos.slots.awaiting import await_slots
from tfos.slots.profiles import (
    NodePlaces,
    RoleProfiles,
    needs_of,
    places_of,
    profiles_of,
    rooms_mib,
)
from tfos.slots.resources import RoleResources
from tfos.slots.wait import SlotWait, workers_hold_slots
from tfos.spark import executor_memory
from tfos.spark import facts as spark_facts
from tfos.spark.executor_ends import ExecutorEnds
from tfos.spark.interruptible import CancelToken
from tfos.spark.jvm_signals import leave_interrupts_to_python
from tfos.topology import Plan
from tfos.watch import doors
from tfos.watch.doors import PageRequest
from tfos.watch.job import Job

if TYPE_CHECKING:
    from tfos.watch.page_server import JobPage

_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ReservationRequest:
    """What the user asks of reserve(); see there."""

    plan: Plan
    input_mode: InputMode
    queues: Iterable[object]
    tensorboard: TensorBoardConfig
    config: ClusterConfig
    metrics: MetricsRequest = field(default_factory=MetricsRequest)
    page: PageRequest = field(default_factory=PageRequest)
    resources: RoleResources = field(default_factory=RoleResources)
    release_port: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An open control plane and all that nodes need to join it."""

    sc: Any
    console: Console
    plan: Plan
    settings: NodeSettings
    coordinator: Coordinator
    keys: NodeKeys
    credentials: Credentials
    """The driver's own credentials of the data plane."""
    feeder_credentials: Credentials
    """Credentials of the data plane for feed tasks: with TLS valid for no other role."""
    workers_hold_slots: bool
    places: NodePlaces
    listens_at: str
    """Address and port of the control server, where nodes' connections have to arrive."""
    job: Job
    """The job as the user's other processes see it."""
    metrics: ClusterPage | None = None
    page: JobPage | None = None

    @property
    def config(self) -> ClusterConfig:
        """What the user has configured."""
        return self.settings.config

    def await_roster(self, timeout_s: float) -> None:
        """Wait until every node serves or the cluster has failed.

        Raises:
            ReservationTimeout: names every missing node, where it is and what it did last.
        """
        begun_s = self.coordinator.now_s()
        if shown_wait(
            self.coordinator, self.console, _is_complete, timeout_s, lambda: self._line(begun_s)
        ):
            return
        now_s = self.coordinator.now_s()
        missing, text = self.coordinator.read(lambda state: _missing(state, now_s))
        raise ReservationTimeout(
            f"after {timeout_s:.0f} s the cluster is not complete: {text}. Look at the missing "
            f"nodes' executors, check that they reach the driver at "
            f"{self.settings.driver_address}, which listens at {self.listens_at} "
            f"({server_address.HOST_VARIABLE} and spark.driver.bindAddress set these), or raise "
            "reservation_timeout.",
            missing,
        )

    def _line(self, begun_s: float) -> tuple[str, bool]:
        now_s = self.coordinator.now_s()
        missing, what = self.coordinator.read(
            lambda state: (len(state.missing()), training.starting(state, now_s))
        )
        total = len(self.plan.nodes)
        workers = f"; workers: {what}" if what else ""
        waited = f"after {now_s - begun_s:.0f} s"
        return f"nodes start: {total - missing} of {total} serve {waited}{workers}", True


def reserve(spark: Any, request: ReservationRequest, cancel: CancelToken) -> Reservation:
    """Check the request, make the cluster's keys, listen, wait for slots.

    Args:
        spark: the user's SparkContext or session.
        request: what the user asks for.
        cancel: set when nobody waits for the reservation any more.

    Raises:
        SettingsError: the request or Spark's settings cannot work.
        NotEnoughSlots: the cluster does not fit.
        ControlError: the control server cannot listen.
        PhaseError: the reservation was cancelled.
    """
    mode, feeds = _checked(request)
    sc, facts = _context(spark, request)
    request = _filled(request, facts)
    config, plan = request.config, request.plan
    outputs = preflight.outputs(config, request.tensorboard, plan)
    profiles = profiles_of(request.resources, plan, facts, config)
    needs = needs_of(plan, profiles, request.resources.placement, mode)
    console = _console(plan, config, facts, outputs)
    coordinator = _coordinator(sc, request, facts, profiles, console)
    wait = SlotWait(needs, config, time.monotonic(), facts.master, facts.is_dynamic)
    cluster_id = secrets.token_hex(8)
    try:
        authority = ClusterAuthority(cluster_id)
        credentials = Credentials(cluster_id, secrets.token_bytes(_SECRET_BYTES), config.integrity)
        address = _listen(coordinator, authority.driver(), facts)
        metrics = ClusterPage(coordinator, cluster_id)
        served = doors.open_metrics(coordinator, metrics, request.metrics, console)
        job = Job(coordinator, doors.job_info(cluster_id, facts))
        # Before the slots are there, so that `tfos status` shows what a job waits for.
        page = doors.open_doors(
            job, request.page, metrics.render, address.near, authority.node(OPERATOR_NAME), console
        )
        offer, fit = await_slots(sc, facts, job, wait, console, cancel)
        _warn(console, paths.one_host_note(outputs, (each.host for each in offer.executors)))
    except BaseException:
        coordinator.close()  # and give its slots back
        raise
    console.line(f"cluster {cluster_id}: {plan}")
    hold = workers_hold_slots(needs, offer, fit)
    _warn_of_tasks(console, facts, config, hold=hold)
    return Reservation(
        sc=sc,
        console=console,
        plan=plan,
        settings=_settings(request, facts, cluster_id, address.told, feeds),
        coordinator=coordinator,
        keys=NodeKeys(authority, credentials.secret),
        credentials=_with_keys(credentials, Role.DRIVER, authority, config),
        feeder_credentials=_with_keys(credentials, Role.FEEDER, authority, config),
        workers_hold_slots=hold,
        places=places_of(profiles, needs, offer, fit),
        listens_at=address.bound,
        job=job,
        metrics=served,
        page=page,
    )


class _Address(NamedTuple):
    """Address of the control server, each as `host:port`."""

    told: str
    """The address that nodes connect to."""
    bound: str
    near: str
    """The address for processes of this host."""


def _listen(
    coordinator: Coordinator, credentials: TlsCredentials, facts: spark_facts.SparkFacts
) -> _Address:
    host = server_address.server_host(os.environ, facts)
    ports = server_address.wanted_ports(os.environ)
    port = coordinator.start(host.bound, credentials, ports)
    near = spark_facts.LOOPBACK if endpoint.is_wildcard(host.bound) else host.bound
    told, bound, near = (f"{endpoint.bracketed(each)}:{port}" for each in (*host, near))
    return _Address(told, bound, near)


def _context(spark: Any, request: ReservationRequest) -> tuple[Any, spark_facts.SparkFacts]:
    """Return the SparkContext and its settings, which suit a cluster.

    From here on Ctrl-C is the program's alone.
    """
    sc = spark_facts.classic_context(spark)
    facts = spark_facts.read_facts(sc)
    preflight.check_spark(facts, request.config)
    if request.plan.servers_at_driver:
        server_address.check_servers_here(os.environ, facts)
    leave_interrupts_to_python(sc)
    return sc, facts


def _filled(request: ReservationRequest, facts: spark_facts.SparkFacts) -> ReservationRequest:
    """Return the request with what a job file says, and directories as all processes find them."""
    resources, config = job_settings.applied(
        facts.conf, request.resources, request.config, request.plan
    )
    config, tensorboard = preflight.placed_outputs(config, request.tensorboard, facts)
    return replace(request, config=config, tensorboard=tensorboard, resources=resources)


def _checked(request: ReservationRequest) -> tuple[InputMode, tuple[str, ...]]:
    """Refuse what needs no Spark to refuse; return the input mode, and the feeds if it has some."""
    preflight.check_servers(request.plan, request.config)
    mode = preflight.check_mode(request.input_mode)
    feeds = preflight.check_queues(request.queues)
    request.page.check()
    return mode, feeds if mode is InputMode.SPARK else ()


def _coordinator(
    sc: Any,
    request: ReservationRequest,
    facts: spark_facts.SparkFacts,
    profiles: RoleProfiles,
    console: Console,
) -> Coordinator:
    of_all = executor_memory.of_settings(facts.conf, facts.master)
    rooms = rooms_mib(request.plan, profiles, of_all)
    coordinator = Coordinator(
        request.plan,
        request.config,
        console,
        rooms_mib=rooms,
        task_attempts=facts.task_attempts,
    )
    coordinator.explain_by(ExecutorEnds(sc).explain)
    return coordinator


def _settings(
    request: ReservationRequest,
    facts: spark_facts.SparkFacts,
    cluster_id: str,
    driver_address: str,
    feeds: tuple[str, ...],
) -> NodeSettings:
    plan = request.plan
    return NodeSettings(
        cluster_id=cluster_id,
        driver_address=driver_address,
        config=request.config,
        tensorboard=request.tensorboard,
        num_workers=plan.num_workers,
        num_ps=plan.num_ps,
        has_tensorflow_servers=bool(plan.tensorflow_servers),
        is_mirrored=plan.is_mirrored,
        feeds=feeds,
        loopback=facts.is_local,
        # As in TensorFlowOnSpark, whose programs write ctx.defaultFS + an absolute path.
        default_fs="file://" if facts.default_fs == "file:///" else facts.default_fs,
        driver_loopback=endpoint.namespace_id("net"),
        legacy_keras=os.environ.get(legacy_keras.VARIABLE, ""),
        release_port=bool(request.release_port),
    )


def _console(
    plan: Plan, config: ClusterConfig, facts: spark_facts.SparkFacts, outputs: Mapping[str, str]
) -> Console:
    console = Console(enabled=config.verbose, details=config.show_details)
    for what, directory in outputs.items():
        console.line(f"{what} go to {directory}")
    for note in preflight.notes(facts, len(plan.on_executors)):
        console.warn(note)
    if config.save_on_interrupt and not plan.servers:
        console.warn(preflight.NO_LAST_SAVE.format(config.save_on_interrupt))
    if plan.tensorflow_servers:
        console.warn(preflight.OPEN_SERVERS)
    if plan.servers_at_driver:
        console.warn(preflight.SERVERS_AT_DRIVER)
    return console


def _warn_of_tasks(
    console: Console, facts: spark_facts.SparkFacts, config: ClusterConfig, *, hold: bool
) -> None:
    _warn(console, preflight.attempts_note(facts, config, workers_hold_slots=hold))
    _warn(console, preflight.idle_note(facts, workers_hold_slots=hold))


def _warn(console: Console, note: str) -> None:
    if note:
        console.warn(note)


def _with_keys(
    credentials: Credentials, role: Role, authority: ClusterAuthority, config: ClusterConfig
) -> Credentials:
    """Return the credentials of a role that only connects, with a certificate if TLS is on."""
    if config.security != "tls":
        return credentials
    return replace(credentials, tls=authority.data_client(role.value))


def _is_complete(state: ClusterView) -> bool:
    return state.phase is not ClusterPhase.RESERVED


def _missing(state: ClusterView, now_s: float) -> tuple[list[str], str]:
    missing = state.missing()
    present = [member.name for member in state.members.values() if member not in missing]
    text = (
        f"missing {', '.join(member.describe(now_s) for member in missing)}; "
        f"present: {', '.join(present) or 'none'}"
    )
    return [member.name for member in missing], text
