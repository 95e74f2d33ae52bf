"""Tensor RPC: authenticated frames over TCP, TLS, Unix sockets and shared memory.

Public names: Endpoint (where a process listens), Credentials (the cluster's secret), Identity and
Role (which process a peer is). They load on first use. `rpc.client.connection.connect` opens a
connection, `rpc.server.listener.Listener` serves one.

Packages, each importing from those before it only: auth, transport, wire, client and server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpc import errors as errors
    from rpc.auth.handshake import Credentials, Identity, Role
    from rpc.endpoint import Endpoint
    from rpc.errors import RpcError, TFOSError

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Credentials",
    "Endpoint",
    "Identity",
    "Role",
    "RpcError",
    "TFOSError",
    "errors",
]

_HOMES = {
    "Credentials": "rpc.auth.handshake",
    "Endpoint": "rpc.endpoint",
    "Identity": "rpc.auth.handshake",
    "Role": "rpc.auth.handshake",
    "RpcError": "rpc.errors",
    "TFOSError": "rpc.errors",
}
_MODULES = {
    "errors": "rpc.errors",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
