"""The control link between a supervisor and its child: typed structs over an inherited socketpair.

Covers: the message types and their framing (4-byte little-endian length, msgpack body).
Does not: decide anything (node.supervisor, node.worker, node.server).
Threads: `send` may be called from any thread; `receive` from one thread.

Child to supervisor: Listening, PhaseChanged, FlushReached, Done of control.messages as they are, and Progress and Raised below.
Supervisor to child: every Order of control.messages as it is.
"""

from __future__ import annotations

import msgspec

from tfos.control import messages


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The child's latest numbers; replaces the previous one."""

    values: dict[str, float]
    feeds: tuple[messages.FeedSnapshot, ...] = ()


class Raised(msgspec.Struct, frozen=True, tag=True):
    """User code or ours raised in the child; it exits with code 1 after this."""

    error_type: str
    message: str
    traceback: str


FromChild = (
    messages.Listening
    | messages.PhaseChanged
    | messages.FlushReached
    | messages.Done
    | Progress
    | Raised
)
