"""Address of the driver's control server, as Spark's settings and the environment ask for it.

Covers: TFOS_SERVER_HOST and TFOS_SERVER_PORT, TensorFlowOnSpark's variables for firewalls: where
nodes are told to come, and where the server listens.
Does not: listen (tfos.tls_server).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rpc.endpoint import is_loopback, is_wildcard
from tfos.errors import SettingsError
from tfos.spark.facts import SparkFacts

HOST_VARIABLE = "TFOS_SERVER_HOST"
PORT_VARIABLE = "TFOS_SERVER_PORT"
LOCAL_IP = "SPARK_LOCAL_IP"
_MOST = 65535


def wanted_ports(environment: Mapping[str, str]) -> Sequence[int]:
    """Return the ports to try, in this order; a single 0 means any port.

    Args:
        environment: TFOS_SERVER_PORT is a port, or a first and a last one: "9997-9999".

    Raises:
        SettingsError: it is neither a port nor a range.
    """
    text = environment.get(PORT_VARIABLE, "").strip()
    if not text:
        return (0,)
    first, dash, last = text.partition("-")
    ends = (first.strip(), last.strip() if dash else first.strip())
    if not all(end.isdecimal() and 0 < int(end) <= _MOST for end in ends):
        raise SettingsError(
            f"{PORT_VARIABLE}={text!r} is not a port from 1 to {_MOST} or a range such as 9997-9999"
        )
    ports = range(int(ends[0]), int(ends[1]) + 1)
    if not ports:
        raise SettingsError(f"{PORT_VARIABLE}={text!r} is empty; write the lower port first")
    return ports


class ServerHost(NamedTuple):
    """Host of a server in the driver, without brackets."""

    told: str
    """The host that nodes connect to."""
    bound: str
    """The host that the server listens on."""


def server_host(environment: Mapping[str, str], facts: SparkFacts) -> ServerHost:
    """Return where nodes reach the driver, and where it listens for them.

    Args:
        environment: TFOS_SERVER_HOST names an address of this host, or one that leads to it.
        facts: Spark's settings hold without that; spark.driver.bindAddress holds beside it.
    """
    wanted = environment.get(HOST_VARIABLE, "").strip().strip("[]")
    if not wanted:
        return ServerHost(facts.driver_host, facts.bind_host)
    if facts.bind_address:
        return ServerHost(wanted, facts.bind_address)
    all_addresses = "::" if ":" in wanted else "0.0.0.0"
    return ServerHost(wanted, _address_here(wanted) or all_addresses)


def check_servers_here(environment: Mapping[str, str], facts: SparkFacts) -> None:
    """Refuse parameter servers beside the driver at an address that is not this host's own.

    They listen on the address that nodes connect to; forwarding ends at the control server.

    Args:
        environment: see `server_host`; for servers SPARK_LOCAL_IP replaces it.
        facts: Spark's settings.

    Raises:
        SettingsError: TFOS_SERVER_HOST or spark.driver.host names such an address.
    """
    wanted = server_host(environment, facts).told
    name = HOST_VARIABLE if environment.get(HOST_VARIABLE, "").strip() else "spark.driver.host"
    has_own = not is_wildcard(environment.get(LOCAL_IP, "").strip("[]"))
    if facts.is_local or has_own:
        return
    # Spark's own choice may be this host's name, which is enough where all executors are here.
    is_here = _address_here(wanted) if name == HOST_VARIABLE else not _is_elsewhere(wanted)
    if not is_here:
        raise SettingsError(
            f"driver_ps_nodes=True with {name}={wanted}: parameter servers beside the "
            "driver listen at that address, which is not a reachable address of this host. Name an "
            "address of this host's own (127.0.0.1 where all executors run here), or leave "
            "driver_ps_nodes out: they run on executors then"
        )


def _address_here(host: str) -> str:
    """Return the address of this host that is meant; empty: one that is only forwarded to it."""
    try:
        found = _bound(host)
    except OSError:
        return ""
    # Debian gives a host's own name the address 127.0.1.1, which other hosts do not have.
    is_own_name = host not in (found, "localhost") and is_loopback(found)
    return "" if is_own_name else found


def _is_elsewhere(host: str) -> bool:
    """Whether a host is no address of this one; a name may be known later than now."""
    try:
        _bound(host)
    except socket.gaierror:
        return False
    except OSError:
        return True
    return False


def _bound(host: str) -> str:
    """Bind to a host for a moment; return its address."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind(address)
    return str(address[0])
