"""Address of the driver's control server, as the environment asks for it.

Covers: TFOS_SERVER_HOST and TFOS_SERVER_PORT, TensorFlowOnSpark's variables for firewalls. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfos.errors import SettingsError

HOST_VARIABLE = "TFOS_SERVER_HOST"
PORT_VARIABLE = "TFOS_SERVER_PORT"
_MOST = 65535


def wanted_ports(environment: Mapping[str, str]) -> Sequence[int]:
    """Return the ports to try in this order: 0 alone is any.

    Args:
        environment: TFOS_SERVER_PORT is a port, or a first and a last one: "9997-9999".

    Raises:
        SettingsError: it is neither.
    """
    text = environment.get(PORT_VARIABLE, "").strip()
    if not text:
        return (0,)
    first, dash, last = text.partition("-")
    ends = (first.strip(), last.strip() if dash else first.strip())
    if not all(end.isdecimal() and 0 < int(end) <= _MOST for end in ends):
        raise SettingsError(
            f"{PORT_VARIABLE}={text!r} is no port from 1 to {_MOST} and no range such as 9997-9999"
        )
    ports = range(int(ends[0]), int(ends[1]) + 1)
    if not ports:
        raise SettingsError(f"{PORT_VARIABLE}={text!r} is empty; write the lower port first")
    return ports


def wanted_host(environment: Mapping[str, str], default: str) -> str:
    """Return the address at which nodes reach the driver.

    Args:
        environment: TFOS_SERVER_HOST names it.
        default: without that.
    """
    return environment.get(HOST_VARIABLE, "").strip() or default
