"""Process identity: names one process uniquely by pid, start time, boot id and pid namespace.

Covers: naming this process in files that others read, and whether a named process has ended.
Does not: list, watch or end processes (tfos.node.procfs).
Threads: any.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Self

import msgspec

from rpc.endpoint import namespace_id
from rpc.process_stat import stat_fields

MAX_PID = 1 << 22
"""Linux' own limit."""


class ProcessId(msgspec.Struct, frozen=True):
    """Identity of a process, which no later process can have. Files on disk have these fields."""

    kernel: str
    """Boot id and pid namespace in which `pid` is valid."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=MAX_PID)]
    started: str
    """Start of the process in clock ticks since boot; differs for a later process of this pid.
    Empty: it could not be read."""

    @classmethod
    def of_this(cls, **fields: Any) -> Self:
        """Return the record of this process; `fields` are those that a subclass adds."""
        pid = os.getpid()
        return cls(kernel=namespace_id("pid"), pid=pid, started=_state_and_start(pid)[1], **fields)

    def has_ended(self) -> bool | None:
        """Whether the process has certainly ended; None: it cannot be seen from here."""
        if self.kernel != namespace_id("pid"):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # another user's process
        state, started = _state_and_start(self.pid)
        if not started or not self.started:
            return None  # no free descriptor, or /proc hides other users' processes
        return state in ("Z", "X") or started != self.started


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state and its start in ticks, both empty if they cannot be read."""
    fields = stat_fields(pid)
    return (fields[0].decode(), fields[19].decode()) if fields else ("", "")
