"""Failure records of a dead child, their text, and a user's traceback without frames of tfos.

Pure: reads no process, no clock, no file.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from tfos.failure import NodeFailure
from tfos.node.child_link import Raised

_FATAL = ("Fatal Python error:", "Current thread ", "Thread 0x")


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; exactly one of the two is set."""

    exit_code: int | None
    signal_number: int | None


def describe_exit(how: Exit, *, oom_kills: int = 0) -> str:
    """Return how a process ended, as text after the process's name.

    Args:
        how: exit status or signal.
        oom_kills: processes that the kernel killed for memory meanwhile.
    """
    signal_number = how.signal_number
    if signal_number is None:
        return f"ended with exit code {how.exit_code}"
    try:
        name = signal.Signals(signal_number).name
    except ValueError:
        name = f"signal {signal_number}"
    if signal_number == signal.SIGKILL and oom_kills:
        return (
            f"killed by {name}, probably out of memory (the memory cgroup counts {oom_kills} more "
            "OOM kill(s)); raise spark.executor.memoryOverhead"
        )
    return f"killed by {name}"


def raised(base: NodeFailure, error: Raised) -> NodeFailure:
    """Return the record of a child that has reported its exception.

    Args:
        base: has the node, host and pid.
        error: type, text and traceback.
    """
    return msgspec.structs.replace(
        base,
        error_type=error.error_type,
        message=error.message,
        traceback=error.traceback,
        exit_code=1,
    )


def died(base: NodeFailure, how: Exit) -> NodeFailure:
    """Return the record of a child that has ended without a report.

    Args:
        base: has the node, host and pid.
        how: exit status or signal.
    """
    early = " before its work was done (os._exit?)" if how.exit_code == 0 else ""
    return msgspec.structs.replace(
        base,
        message=base.message + early,
        exit_code=how.exit_code,
        signal=how.signal_number,
        traceback=fatal_dump(base.log_tail),
    )


def fatal_dump(log_tail: Sequence[str]) -> str:
    """Return what faulthandler printed at the end of the log, or an empty string."""
    for number, line in enumerate(log_tail):
        if line.startswith(_FATAL):
            return "\n".join(log_tail[number:])
    return ""


def type_name(error: BaseException) -> str:
    """Return the qualified name of an exception's class; Python's own have no module before it."""
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return an exception's text as a message can carry it."""
    try:
        text = str(error)
        if isinstance(error, SystemExit):
            text += f"; it called sys.exit({error.code!r}); return, or raise an exception"
        return sendable(text)
    except Exception as second:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"its text cannot be formatted: {type(second).__qualname__}"


def sendable(text: str) -> str:
    """Return text that UTF-8 can encode: file names may contain other bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def user_traceback(error: BaseException, ours: frozenset[str]) -> str:
    """Format an exception as the user should read it.

    Args:
        error: the exception as caught.
        ours: file names of tfos whose outermost frames called the user's code; they are omitted.
    """
    trimmed = _skip_frames(error.__traceback__, ours)
    return sendable("".join(traceback.format_exception(type(error), error, trimmed)))


def _skip_frames(trace: TracebackType | None, ours: frozenset[str]) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner or trace
