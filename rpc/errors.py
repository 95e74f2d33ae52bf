"""Error tree: the root of all errors of tfos, and every error of the RPC layer.

TFOSError                 base of every error that tfos raises, in any package and process
├── SettingsError         a value that cannot work; also a ValueError        → fix the call
└── RpcError, ps.errors.PSError, feeding.errors.FeedError and those of tfos.errors

RpcError
├── AuthError             wrong or missing token, wrong cluster or role  → fix the deployment
├── ProtocolError         the peer left the protocol; connection closed  → fix the deployment
│   ├── LimitExceeded     a length, count or size above its limit
│   ├── IntegrityError    a frame was changed, replayed, reordered or inserted
│   └── VersionMismatch   the peer speaks another version of the protocol
├── TransportError        network or peer failed; connection closed      → reconnect, send again
│   ├── PeerGone          end of file or reset; never a deadline
│   └── DeadlineExceeded  the time given for a wait is over
│       └── Unreachable   the peer's host did not accept the connection in time
├── RemoteError           the other side's handler refused; connection survives
├── PortInUse             the address to bind is taken                   → choose another port
├── BusyError             a call is already under way on this connection → programming error
└── ConnectionClosed      *this side* closed it earlier                  → programming error
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes of a peer that it cannot decode: the last two for text that is not
UTF-8 and for nesting, both met by fuzzing."""


class TFOSError(Exception):
    """Base of every error that tfos raises."""


class SettingsError(TFOSError, ValueError):
    """A value cannot work, whatever the data or the cluster."""


class RpcError(TFOSError):
    """Base of all errors of rpc."""


class AuthError(RpcError):
    """The token is wrong or missing, or the peer is not who was expected."""


class ProtocolError(RpcError):
    """The peer left the protocol; the connection is closed."""


class LimitExceeded(ProtocolError):
    """A length, count or size is above its limit; nothing was allocated for it."""


class IntegrityError(ProtocolError):
    """A frame's MAC is wrong: it was changed, replayed, reordered or inserted."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""


class TransportError(RpcError):
    """The network or the peer failed; the connection is closed."""


class PeerGone(TransportError):
    """The peer closed or reset the connection, or nothing listens there."""


class DeadlineExceeded(TransportError):
    """The time given for a wait is over."""


class Unreachable(DeadlineExceeded):
    """The peer's host did not accept the connection in time; the host of a frozen process does."""


class RemoteError(RpcError):
    """The handler on the other side refused the call; the connection stays usable.

    Args:
        code: stable name of the error's class, for programs.
        message: text for people.
        details: further values by name.
    """

    def __init__(self, code: str, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(code, message, dict(details or {}))
        self.code = code
        self.message = message
        self.details: dict[str, str] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class PortInUse(RpcError):
    """The address to bind is taken; the text names the holder where /proc shows it."""


class BusyError(RpcError):
    """A call is already under way on this connection; it carries one at a time."""


class ConnectionClosed(RpcError):
    """This side closed the connection or listener earlier."""
