"""Waits while servers compile their kernels, longer than for any other answer.

Covers: asking again, the line that says what is waited for, the bound.
Does not: compile (ps.kernels_ahead).
Threads: one at a time; ps.client holds its lock around every call.
"""

from __future__ import annotations

import logging
import time

from ps.client.channel import OutgoingCall
from ps.client.retry import READY_TIMEOUT_S
from ps.client.server_group import ServerGroup
from ps.errors import RequestTimeout
from ps.manifest.manifest import Manifest
from ps.protocol import messages

_logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long a server may wait before it answers that it still compiles; also when a line says so."""
_REMEDY = (
    "`tfos warm DIR` compiles them beforehand, for servers with TFOS_KERNEL_CACHE=DIR on the same "
    "kind of processor"
)


def wait_compiled(servers: ServerGroup, manifest: Manifest, *, timeout_s: float) -> None:
    """Return once every server has the kernels of this manifest; at once where they are kept.

    Args:
        servers: EMPTY ones, or ones that serve it already.
        manifest: what they will serve.
        timeout_s: for each answer, not for the compiler.

    Raises:
        RequestTimeout: not within READY_TIMEOUT_S, or a server does not answer at all.
        ServerError: the compiler failed.
    """
    encoded = manifest.encode()
    began_s = time.monotonic()
    wait_s = min(LOOK_S, timeout_s / 2)
    request = messages.Compile(manifest.hash(), len(encoded), wait_s)
    is_told = False
    while True:
        calls = [OutgoingCall(link, request, [encoded]) for link in servers.links]
        answers = servers.answers(calls, messages.Compiled, timeout_s=timeout_s)
        left = [
            link.server for link, each in zip(servers.links, answers, strict=True) if each.took_s
        ]
        if not left:
            return
        names = ", ".join(f"ps:{rank}" for rank in left)
        waited_s = time.monotonic() - began_s
        if waited_s > READY_TIMEOUT_S:
            raise RequestTimeout(
                f"{names} still compiled kernels for this model after {waited_s:.0f} s, limit "
                f"{READY_TIMEOUT_S:g}; the hosts are overloaded. {_REMEDY}",
                {"server": str(left[0])},
            )
        if not is_told:
            is_told = True
            _logger.warning(
                "%s: no kernels of this model's optimizer are kept there yet. Compiling them has "
                "taken %.0f s so far; training begins when it is done, in at most %.0f s. %s",
                names,
                waited_s,
                READY_TIMEOUT_S,
                _REMEDY,
            )
