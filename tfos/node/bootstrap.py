"""Bootstrap of a node's Python processes: one document in an inherited descriptor.

Covers: the start program of every node process (`python -c`), the document, the start of a process
that outlives this one.
Does not: start children (tfos.node.supervisor.children) or know what processes run.

The document is a memfd: any size without a reader, nothing on disk, in argv or in the environment.
Its first line is a small JSON head that the program below reads without packages of tfos; the rest
is the body that `<module>.main(body)` decodes (msgspec, msgpack).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from rpc.linux_calls import memfd_create
from tfos.errors import NodeStartError

DETACH_S = 60.0
"""Seconds until the process between has read its document and forked."""

_SECRET_VARIABLES = frozenset(
    {"PYTHON_WORKER_FACTORY_SECRET", "PYSPARK_GATEWAY_SECRET", "_SPARK_AUTH_SECRET"}
)

_SPARK_JAR = re.compile(r"spark-core_[\w.-]+\.jar")

PROGRAM = """\
import faulthandler, json, os, sys
with os.fdopen(int(sys.argv[1]), "rb") as document:
    head = json.loads(document.readline())
    body = document.read()
if head["detach"]:
    if os.fork():
        os._exit(0)
    os.setsid()
if head["parent_pid"]:
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != head["parent_pid"]:
        os._exit(1)
faulthandler.enable()
sys.path[:] = head["sys_path"]
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
import importlib
importlib.import_module(head["module"]).main(body)
"""
"""Order matters: fork before any thread, PR_SET_PDEATHSIG (1) before anything slow, and the check
of the parent after it, because a parent that died earlier sends no signal any more."""


def document_fd(
    module: str,
    body: bytes,
    *,
    sys_path: Sequence[str],
    parent_pid: int = 0,
    detach: bool = False,
) -> int:
    """Return a descriptor, positioned at its start, that PROGRAM reads to its end and closes.

    Args:
        module: dotted name of the module whose `main(body)` runs.
        body: argument of `main`.
        sys_path: the new process's `sys.path`.
        parent_pid: pid of the parent, with which the new process dies; 0: it does not.
        detach: fork once and start a session, so that init adopts the process.
    """
    head = {"module": module, "sys_path": list(sys_path), "parent_pid": parent_pid}
    fd = memfd_create("tfos-bootstrap")
    with os.fdopen(os.dup(fd), "wb") as document:
        document.write(json.dumps({**head, "detach": detach}).encode() + b"\n")
        document.write(body)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def command(document: int, title: str) -> list[str]:
    """Return the command line that runs PROGRAM on this document.

    Args:
        document: descriptor from `document_fd`; the new process must inherit it.
        title: shown in lists of processes.
    """
    # -P: no module is imported from the working directory by chance.
    return [sys.executable, "-P", "-c", PROGRAM, str(document), title]


def start_detached(
    document: int,
    title: str,
    *,
    inherited: Sequence[int],
    errors: int | None = None,
    cwd: str | None = None,
) -> None:
    """Start a process that outlives this one, and wait until init has adopted it.

    Args:
        document: made with `detach`; closed at the end.
        title: shown in lists of processes.
        inherited: further descriptors for it.
        errors: descriptor of its standard error; None: that of this process.
        cwd: its working directory; None: that of this process.

    Raises:
        NodeStartError: the process cannot be started.
    """
    try:
        between = subprocess.Popen(
            command(document, title),
            pass_fds=[document, *inherited],
            env=node_env(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a PySpark worker's is its daemon's channel to the JVM
            stderr=errors,
            cwd=cwd,
        )
    except OSError as error:
        raise NodeStartError(f"cannot start {sys.executable}: {error}") from error
    finally:
        os.close(document)
    try:
        between.wait(DETACH_S)
    except subprocess.TimeoutExpired:
        between.kill()
        between.wait()
        raise NodeStartError(
            f"{sys.executable} did not start {title} within {DETACH_S:.0f} s"
        ) from None


def without_spark_jar(path: Iterable[str]) -> tuple[str, ...]:
    """Return a module path without Spark's own jar.

    Spark puts it on every executor's path, and each new Python reads the names of its 6,000 files
    to find no module among them: 22 ms of processor time.

    Args:
        path: entries as of `sys.path`.
    """
    return tuple(entry for entry in path if not _SPARK_JAR.fullmatch(os.path.basename(entry)))


def node_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an executor as its node's processes get it."""
    cleaned = without_spark_secrets(env)
    if "PYTHONPATH" in cleaned:
        path = cleaned["PYTHONPATH"].split(os.pathsep)
        cleaned["PYTHONPATH"] = os.pathsep.join(without_spark_jar(path))
    return cleaned


def without_spark_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the keys of Spark's own sockets."""
    return {name: value for name, value in env.items() if name not in _SECRET_VARIABLES}
