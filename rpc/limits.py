"""Limits: what one side of a connection accepts and spends; one frozen record for all of rpc."""

from __future__ import annotations

import resource
from dataclasses import dataclass

_KiB = 1024
_MiB = 1024 * _KiB
_GiB = 1024 * _MiB

SPARE_PART = 4
"""Strangers may hold one in this many descriptors of a process."""
MAX_SPARE_DESCRIPTORS = 1024
MIN_RING_BYTES = 4 * _KiB
MAX_RING_BYTES = 1 * _GiB
"""Bounds of the ring size that a peer may offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this side accepts from a peer; every check comes before memory is taken."""

    max_meta_bytes: int = 64 * _KiB
    """Meta of one frame, which is held before its MAC is known."""
    max_payload_bytes: int = 16 * _GiB
    """Payload of one frame. Payload goes straight into the handler's own buffers."""
    max_reply_bytes: int = 1 * _MiB
    """Memory that a client takes for the payload of a reply when the caller gave no buffers."""
    handshake_timeout_s: float = 5.0
    """Time from accepting a connection to its proof; after that the connection is closed."""
    max_handshakes: int = 1024
    """Connections that have not proved themselves yet; one more closes the oldest. At most
    `spare_descriptors()`."""
    max_handshakes_per_peer: int = 512
    """The same per peer address; at most half of `spare_descriptors()`."""
    max_connections: int = 4096
    """Authenticated connections of one listener; each costs a thread."""
    stall_timeout_s: float = 20.0
    """How long a peer may pause inside a frame. TCP_USER_TIMEOUT is the same."""
    min_bytes_per_s: int = 64 * _KiB
    """Slowest accepted payload, after a first `stall_timeout_s`; slower connections are closed."""
    send_buffer_bytes: int | None = None
    """Kernel's send buffer of a socket; None lets the kernel grow it as needed: fastest."""
    shared_ring_bytes: int = 4 * _MiB
    """Shared memory per direction between two processes of one host; 0 disables it."""
    max_shared_bytes: int = 256 * _MiB
    """Shared memory of one listener, both directions; further local peers use the socket."""
    receive_buffer_bytes: int | None = None
    """Kernel's receive buffer of a socket; None as above."""

    def __post_init__(self) -> None:
        ring = self.shared_ring_bytes
        if ring and not MIN_RING_BYTES <= ring <= MAX_RING_BYTES:
            raise ValueError(
                f"shared_ring_bytes must be 0 or {MIN_RING_BYTES}..{MAX_RING_BYTES}, got {ring}"
            )


DEFAULT_LIMITS = Limits()


def spare_descriptors() -> int:
    """Return how many descriptors unauthenticated connections may hold on one listening port.

    A quarter of the process's soft limit, at most 1024: a stranger must not stop the process from
    opening files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_SPARE_DESCRIPTORS
    return max(1, min(soft // SPARE_PART, MAX_SPARE_DESCRIPTORS))
