"""A process's side of a gRPC channel to its driver: its credentials, and one call.

Covers: where each key goes; a chain instead of the authority would be believed. Which
failures of a call a retry may fix. The import of gRPC, for all of tfos.
Does not: open a channel (tfos.control.client, tfos.many.slot.client), serve (tfos.tls_server).
Threads: any.

gRPC logs each failed handshake at level INFO, without an address, so a stranger could fill the disk
of the driver's log. It reads the level once, when it is imported. A program that sets
GRPC_VERBOSITY, or imports gRPC earlier, decides for itself. The lines of a node's own failed
handshakes go with the others, so `ask` gives their reason in its error.
"""

from __future__ import annotations

import os
from typing import Any

from rpc.auth.certificates import TlsCredentials
from tfos.errors import ControlFailed, ControlRefused, ControlUnavailable

_LEVEL = "GRPC_VERBOSITY"
_is_given = _LEVEL in os.environ
os.environ.setdefault(_LEVEL, "ERROR")
import grpc  # noqa: E402 - it reads the level

if not _is_given:
    del os.environ[_LEVEL]

__all__ = ["REFUSALS", "ask", "channel_credentials", "grpc", "reason_of"]

REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Answers of the driver that a retry does not change."""
_NO_CALL = "/tfos.Control/None"
"""A path that no server has."""
_LOOK_S = 0.2
_FAILURES = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Its answers when a call raised an error or was too large."""


def channel_credentials(keys: TlsCredentials) -> grpc.ChannelCredentials:
    """Return the credentials of a channel, also of one for asyncio.

    Args:
        keys: keys of this process, and the authority of the server.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=keys.ca_pem,
        private_key=keys.key_pem,
        certificate_chain=keys.cert_pem,
    )


def ask(channel: Any, path: str, body: bytes, timeout_s: float, where: str) -> bytes:
    """Make a call, which waits for the driver to become reachable, and return the reply.

    Args:
        channel: channel to the driver.
        path: the call's path.
        body: the encoded request.
        timeout_s: seconds until ControlUnavailable.
        where: what is asked of whom, for the error.

    Raises:
        ControlUnavailable: no reply arrived in time, or the channel is closed.
        ControlFailed: the driver could not handle the call.
        ControlRefused: the driver refuses, and would do so again.
    """
    try:
        reply: bytes = channel.unary_unary(path)(body, timeout=timeout_s, wait_for_ready=True)
    except grpc.RpcError as error:
        text = f"{where}: {reason_of(error)}"
        if error.code() in REFUSALS:
            raise ControlRefused(text) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            text += _trouble_of(channel)
        failure = ControlFailed if error.code() in _FAILURES else ControlUnavailable
        raise failure(text) from None
    except ValueError as error:  # the channel was closed by another thread
        raise ControlUnavailable(f"{where}: {error}") from error
    return reply


def reason_of(error: Any) -> str:
    """Return the code and the details of a grpc.RpcError."""
    return f"{error.code().name}: {error.details() or 'no details'}"


def _trouble_of(channel: Any) -> str:
    """Return why a channel does not connect; empty: it is connected, or still tries.

    A call that waits for the connection says only that its time is over.
    """
    try:
        channel.unary_unary(_NO_CALL)(b"", timeout=_LOOK_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"; {error.details()}"
    except ValueError:  # closed by another thread
        pass
    return ""
