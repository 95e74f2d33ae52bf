"""Where nodes are told to come, and where the driver listens for them."""

from __future__ import annotations

import contextlib
import io
import socket
from typing import Any

import pytest

from rpc.auth.handshake import Credentials
from tests.support.fake_spark import FakeSpark
from tests.support.nodes import node_settings
from tfos import TFCluster
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.driver.node_jobs import NodeKeys
from tfos.driver.reservation import Reservation
from tfos.driver.server_address import ServerHost, check_servers_here, server_host
from tfos.errors import ReservationTimeout, SettingsError
from tfos.spark.facts import SparkFacts
from tfos.topology import plan
from tfos.watch.job import Job
from tfos.watch.snapshot import JobInfo

NAMES = {"own-name": "127.0.1.1", "nic-2": "127.0.0.2", "gateway": "192.0.2.99"}
"""As the driver's host resolves them; the last one is no address of it."""


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6")


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, port: int, **options: Any) -> Any:
        if host == "not-known-yet":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(NAMES.get(host, host), port, **options)

    monkeypatch.setattr("tfos.driver.server_address.socket.getaddrinfo", resolve)


def _facts(master: str = "spark://h:7077", **conf: str) -> SparkFacts:
    named = {f"spark.driver.{name}": value for name, value in conf.items()}
    return SparkFacts(master, "app", named, "file:///")


@pytest.mark.parametrize(
    ("wanted", "bound"),
    [
        ("127.0.0.2", "127.0.0.2"),  # another interface of this host
        (" 127.0.0.2 ", "127.0.0.2"),
        pytest.param("::1", "::1", marks=NEEDS_IPV6),
        pytest.param("[::1]", "::1", marks=NEEDS_IPV6),
        ("localhost", "127.0.0.1"),
        ("192.0.2.99", "0.0.0.0"),  # NAT: it leads to this host
        ("2001:db8::99", "::"),
        ("gateway", "0.0.0.0"),
        ("own-name", "0.0.0.0"),  # Debian's 127.0.1.1 would shut out all other hosts
        ("no such name", "0.0.0.0"),
    ],
)
def test_the_driver_listens_where_the_address_leads_that_nodes_are_told(wanted: str, bound: str):
    found = server_host({"TFOS_SERVER_HOST": wanted}, _facts(host="10.0.0.1"))
    assert found == ServerHost(wanted.strip().strip("[]"), bound)


def test_sparks_own_address_to_bind_holds_beside_the_environment():
    facts = _facts(host="10.0.0.1", bindAddress="0.0.0.0")
    assert server_host({"TFOS_SERVER_HOST": "127.0.0.2"}, facts) == ServerHost(
        "127.0.0.2", "0.0.0.0"
    )
    assert server_host({}, facts) == ServerHost("10.0.0.1", "0.0.0.0")
    assert server_host({}, _facts(host="10.0.0.1")) == ServerHost("10.0.0.1", "10.0.0.1")
    assert server_host({}, _facts(host="[fd00::2]")) == ServerHost("fd00::2", "fd00::2")
    for wanted in ({}, {"TFOS_SERVER_HOST": " "}):
        assert server_host(wanted, _facts("local[2]", bindAddress="0.0.0.0")) == ServerHost(
            "127.0.0.1", "127.0.0.1"
        )


@pytest.mark.fault("F19")
def test_a_cluster_that_is_not_complete_names_the_address_that_is_told_and_the_one_that_is_bound():
    cluster, authority = plan(2, 1), ClusterAuthority("c")
    console = Console(enabled=False, stream=io.StringIO())
    credentials = Credentials("c", b"S" * 32)
    coordinator = Coordinator(cluster, ClusterConfig(), console)
    reservation = Reservation(
        sc=None,
        console=console,
        plan=cluster,
        settings=node_settings(driver_address="gateway:4711"),
        coordinator=coordinator,
        job=Job(coordinator, JobInfo("c", "words", "app-7")),
        keys=NodeKeys(authority, credentials.secret),
        credentials=credentials,
        feeder_credentials=credentials,
        workers_hold_slots=False,
        places=None,  # type: ignore[arg-type]  # nothing is started
        listens_at="10.0.0.1:4711",
    )
    reservation.coordinator.act(lambda state: state.begin_start())
    reservation.coordinator._state.phase = reservation.coordinator._state.phase.RESERVED
    with pytest.raises(ReservationTimeout, match=r"driver at gateway:4711, .* at 10.0.0.1:4711"):
        reservation.await_roster(0.0)


@pytest.mark.parametrize(
    ("wanted", "is_refused"),
    [("127.0.0.2", False), ("192.0.2.99", True), ("own-name", True)],
)
def test_servers_beside_the_driver_need_an_address_of_its_own(wanted: str, is_refused: bool):
    environment = {"TFOS_SERVER_HOST": wanted}
    check_servers_here(environment, _facts("local-cluster[3,1,1024]", host="10.0.0.1"))
    check_servers_here({**environment, "SPARK_LOCAL_IP": "10.0.0.7"}, _facts(host="10.0.0.1"))
    refused = (
        pytest.raises(SettingsError, match=f"TFOS_SERVER_HOST={wanted}: parameter servers beside")
        if is_refused
        else contextlib.nullcontext()
    )
    with refused:
        check_servers_here({**environment, "SPARK_LOCAL_IP": "0.0.0.0"}, _facts(host="10.0.0.1"))


@pytest.mark.parametrize(
    ("host", "is_refused"), [("gateway", True), ("own-name", False), ("not-known-yet", False)]
)
def test_servers_beside_the_driver_need_a_drivers_host_that_is_here(host: str, is_refused: bool):
    refused = pytest.raises(SettingsError, match=f"with spark.driver.host={host}: parameter")
    with refused if is_refused else contextlib.nullcontext():
        check_servers_here({}, _facts(host=host))


def test_a_cluster_with_servers_beside_the_driver_is_refused_before_it_has_a_node(
    monkeypatch: pytest.MonkeyPatch,
):
    spark = FakeSpark()
    monkeypatch.setenv("TFOS_SERVER_HOST", "192.0.2.99")
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    monkeypatch.setattr(SparkFacts, "is_local", False)
    with pytest.raises(SettingsError, match="driver_ps_nodes=True with TFOS_SERVER_HOST=192"):
        TFCluster.run(spark, print, None, 3, 1, driver_ps_nodes=True)
    spark.close()
