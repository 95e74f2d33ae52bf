"""A line that a child process writes, awaited for a bounded time.

Covers: the wait, and what is said of a child that writes nothing or has ended.
Does not: start or end the child.
"""

from __future__ import annotations

import select
import subprocess

from ps.errors import PSError

_END_S = 10.0
"""Seconds from the end of its output to its own."""


def child_line(process: subprocess.Popen[str], what: str, timeout_s: float) -> str:
    """Return the next line of a child's standard output, which it flushes line by line.

    Args:
        process: the child; what it wrote before has been read.
        what: the child and what it must do, for the error: "a server to listen".
        timeout_s: seconds to wait at most.

    Raises:
        PSError: no line came in time, or the child has ended.
    """
    if process.stdout is None:
        raise PSError(f"nobody reads the output of pid {process.pid}, which is {what}")
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if not poller.poll(timeout_s * 1000):
        raise PSError(
            f"waited {timeout_s:g} s for {what} (pid {process.pid}): see its messages, and whether "
            "this host is overloaded"
        )
    line = process.stdout.readline()
    if line:
        return line
    try:
        status = f"ended with status {process.wait(_END_S)}"
    except subprocess.TimeoutExpired:
        status = "closed its output"
    raise PSError(f"waited for {what}; pid {process.pid} {status}, see its messages")
