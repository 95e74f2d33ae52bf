"""Tensor RPC: authenticated frames over TCP, TLS, Unix sockets and shared memory.

Public names: Endpoint (where a process listens), Credentials (the cluster's secret), Identity and
Role (which process a peer is). They load on first use. `rpc.client.connection.connect` opens a
connection, `rpc.server.listener.Listener` serves one.

Packages, each importing from those before it only: auth, transport, wire, client and server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from rpc import errors as errors
    from rpc.auth.certificates import TlsCredentials
    from rpc.auth.handshake import Credentials, HandshakeOptions, Identity, Role
    from rpc.endpoint import Endpoint
    from rpc.errors import RpcError, TFOSError
    from rpc.histogram import Latency

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Credentials",
    "Endpoint",
    "HandshakeOptions",
    "Identity",
    "Latency",
    "Role",
    "RpcError",
    "TFOSError",
    "TlsCredentials",
    "errors",
]

_HOMES = {
    "Credentials": "rpc.auth.handshake",
    "Endpoint": "rpc.endpoint",
    "HandshakeOptions": "rpc.auth.handshake",
    "Identity": "rpc.auth.handshake",
    "Latency": "rpc.histogram",
    "Role": "rpc.auth.handshake",
    "RpcError": "rpc.errors",
    "TFOSError": "rpc.errors",
    "TlsCredentials": "rpc.auth.certificates",
    "errors": "rpc.errors:",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
