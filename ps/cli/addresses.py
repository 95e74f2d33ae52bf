"""Server addresses on a command line: HOST:PORT,... to endpoints.

Covers: HOST:PORT, also of IPv6 in brackets, and lists of them.      Does not: connect.      Pure.
"""

from __future__ import annotations

from ps.errors import PSSettingsError
from rpc.endpoint import Endpoint


def endpoint_of(address: str) -> Endpoint:
    """Return the endpoint at `HOST:PORT`.

    Raises:
        PSSettingsError: it is none.
    """
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PSSettingsError(f"{address.strip()!r} is not HOST:PORT, e.g. 127.0.0.1:40001")
    return Endpoint(host.strip("[]"), int(port))


def endpoints_of(addresses: str) -> tuple[Endpoint, ...]:
    """Return the endpoints at `HOST:PORT,HOST:PORT,…`, in this order. Raises as `endpoint_of`."""
    return tuple(endpoint_of(address) for address in addresses.split(","))
