"""Facts about one place, which is the driver or an executor: collected there, judged elsewhere.

Covers: every look at a host and its Python; a step that fails leaves its error as the fact.
Does not: judge (tfos.doctor.findings) or reach the places (tfos.doctor.executors).
Runs in: the driver, and a PySpark worker on each executor, to which this module travels by value:
where tfos is not installed, that is a fact. So it imports the standard library alone, and tfos
inside of steps.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]
ERROR = "error"
"""Key of a step's result that has failed: kind and text of the error."""
PLACE = "place"
CHECKS_OF_ANY_PLACE = (PLACE, "python", "packages", "java", "ports", "names", "hdfs")
CHECKS_OF_NODES = ("memory", "/dev/shm", "gpus", "kernels", "tensorflow")
"""Checks of places where nodes will run."""
COMMAND_S = 20.0
CONNECT_S = 5.0
NAMES_S = 20.0
"""Seconds for all names; a lookup that has begun is awaited as long as the resolver takes."""
IMPORT_S = 90.0
"""Seconds for TensorFlow's import, which takes a minute if each start compiles its modules."""
_HDFS_CALL_S = 10.0
_HDFS_PATIENCE_S = 20.0
_CONTENT = b"tfos doctor\n" * 1024
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)[^"]*"')
_IMPORT = """\
import time
began_s = time.monotonic()
import keras, tensorflow
took_s = time.monotonic() - began_s
import json, resource
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([took_s, peak_kib]))
"""


@dataclass(frozen=True, kw_only=True)
class CollectRequest:
    """What to collect at one place."""

    checks: tuple[str, ...]
    """Names of steps."""
    is_executor: bool = False
    is_loopback: bool = False
    """Whether everything runs on one host."""
    host: str = "127.0.0.1"
    """The driver's own name; an executor finds its own."""
    bound: str = ""
    """Where servers of the driver listen; empty: on `host`."""
    driver: tuple[str, int] | None = None
    """Host and port where the driver accepts a connection."""
    names: tuple[str, ...] = ()
    """Hosts to resolve."""
    with_tensorflow: bool = True
    hdfs: str = ""
    """URL of the file to write."""


def collect(request: CollectRequest) -> Facts:
    """Return what this process finds out about its place."""
    facts: Facts = {}
    for name in request.checks:
        try:
            facts[name] = _STEPS[name](request)
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the fact
            text = str(error).strip()
            facts[name] = {ERROR: f"{type(error).__name__}: {text}" if text else repr(error)}
    return facts


def visit(request: CollectRequest, rows: Iterator[Any]) -> Iterator[Facts]:
    """Collect as a Spark task.

    Args:
        request: what to collect.
        rows: rows of the task's partition, read to their end.
    """
    for _ in rows:
        pass
    yield collect(request)


def look_at_clock(rows: Iterator[Any]) -> Iterator[float]:
    """Read the clock as a Spark task.

    Args:
        rows: rows of the task's partition, read to their end.
    """
    for _ in rows:
        pass
    yield unix_s()


def unix_s() -> float:
    """Return this host's clock: what is compared between hosts."""
    return time.time()


def _place(request: CollectRequest) -> Facts:
    from tfos.node.task import find_executor

    host = request.host
    executor_id = ""
    if request.is_executor:
        executor = find_executor(loopback=request.is_loopback, cores=1)
        host, executor_id = executor.host, executor.executor_id
    return {"host": host, "executor_id": executor_id, "hostname": socket.gethostname()}


def _python(_: CollectRequest) -> Facts:
    lacks = ""
    try:
        from rpc.linux_calls import memfd_create, pidfd_open

        os.close(pidfd_open(os.getpid()))
        os.close(memfd_create("tfos-doctor"))
    except ModuleNotFoundError:
        pass  # without tfos, of which another check tells
    except OSError as error:
        lacks = f"{error.strerror} (Linux {platform.release()})"
    return {"version": platform.python_version(), "executable": sys.executable, "lacks": lacks}


def _packages(_: CollectRequest) -> Facts:
    from tfos.node import versions

    return dict(versions.installed(versions.OTHER_DISTRIBUTIONS))


def _java(_: CollectRequest) -> Facts:
    """Return the Java of this executor, or the one that Spark would start here."""
    from tfos.node import procfs

    jvm_pid = procfs.java_ancestor()
    if jvm_pid:
        program = os.readlink(f"/proc/{jvm_pid}/exe")
    elif home := os.environ.get("JAVA_HOME"):
        program = os.path.join(home, "bin", "java")
    else:
        program = shutil.which("java") or "java"
    found = _run([program, "-version"], COMMAND_S)
    if found is None:
        return {"program": program, "silent_s": COMMAND_S}
    match = _JAVA_VERSION.search(found.stderr)
    if match is None:
        raise RuntimeError(f"{program} -version shows no version: {_last_line(found.stderr)}")
    return {"major": int(match[1]), "program": os.path.realpath(program)}


def _memory(_: CollectRequest) -> Facts:
    from tfos.node import procfs

    with open("/proc/meminfo") as lines:
        host = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
        }
    limit = procfs.memory_limit_bytes()
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return {
        "total_mib": host["MemTotal"] // 1024,
        "available_mib": host["MemAvailable"] // 1024,
        "limit_mib": None if limit is None else limit >> 20,
        "address_space_mib": None
        if address_space == resource.RLIM_INFINITY
        else address_space >> 20,
    }


def _shared_memory(_: CollectRequest) -> Facts:
    from rpc.transport.memfd import cannot_share

    size = os.statvfs("/dev/shm")
    return {
        "total_mib": size.f_frsize * size.f_blocks >> 20,
        "free_mib": size.f_frsize * size.f_bavail >> 20,
        "is_writable": os.access("/dev/shm", os.W_OK),
        "unshared": cannot_share(),
    }


def _gpus(_: CollectRequest) -> Facts:
    """Return the GPUs of this host and their users; nothing if it has no nvidia-smi."""
    from tfos.node import gpus

    try:
        found = gpus.look(COMMAND_S)
    except gpus.GpuToolFailed as error:
        return {"failed": str(error)}
    if found is None:
        return {}
    addresses = [each.index for each in found.gpus]
    held = found.held(addresses)
    return {
        "gpus": [f"{gpu.index} {gpu.name}, {gpu.used_of_total}" for gpu in found.gpus],
        "held": [f"{gpu.index} by {', '.join(map(str, those))}" for gpu, those in held],
    }


def _ports(request: CollectRequest) -> Facts:
    """Try what servers do: listen on any port of their address, and be reached there."""
    from rpc.endpoint import is_loopback
    from rpc.limits import Limits
    from rpc.transport.listen import bound_tcp

    found: dict[str, int] = {}
    hidden = ""
    # The name of the driver's host elsewhere may not be an address that it can bind.
    own = _place(request)["host"] if request.is_executor else request.bound or request.host
    for host in dict.fromkeys(("127.0.0.1", own or "127.0.0.1")):
        with bound_tcp(host, 0, Limits()) as listener:
            address = listener.getsockname()[:2]
            socket.create_connection(address, CONNECT_S).close()
        found[host] = int(address[1])
        if is_loopback(address[0]) and not is_loopback(host) and _has_others(request):
            hidden = f"{address[0]}, where {host} leads on this host"
    return {"listened": found, "hidden": hidden}


def _names(request: CollectRequest) -> Facts:
    """Resolve the hosts of the others, and reach the driver at some port."""
    resolved: dict[str, str] = {}
    failed: dict[str, str] = {}
    untried: list[str] = []
    deadline_s = time.monotonic() + NAMES_S
    for name in request.names:
        if time.monotonic() > deadline_s:
            untried.append(name)
            continue
        try:
            resolved[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            failed[name] = str(error)
    unreached = ""
    if request.driver:
        try:
            socket.create_connection(request.driver, CONNECT_S).close()
        except OSError as error:
            unreached = str(error)
    driver = "{}:{}".format(*request.driver) if request.driver else ""
    return {
        "resolved": resolved,
        "failed": failed,
        "untried": untried,
        "misled": [name for name, address in resolved.items() if _misleads(name, address, request)],
        "driver": driver,
        "unreached": unreached,
    }


def _misleads(name: str, address: str, request: CollectRequest) -> bool:
    """Whether the name of another host leads to this one, as Debian's 127.0.1.1 does."""
    if request.is_loopback or not address.startswith("127."):
        return False
    return name not in (address, *_own_names(request))


def _has_others(request: CollectRequest) -> bool:
    """Whether this is an executor, and others are on other hosts; the driver may be here."""
    return request.is_executor and not _own_names(request) >= {*request.names} - {request.host}


def _own_names(request: CollectRequest) -> set[str]:
    """Return what this host is called here."""
    return {_place(request)["host"], socket.gethostname(), socket.getfqdn(), "localhost"}


def _kernels(_: CollectRequest) -> Facts:
    from feeding.formats.kernel_cache import CACHE as FEEDING
    from ps.jit.cache import CACHE as PS

    found = {}
    for room, cache in (("ps", PS), ("feeding", FEEDING)):
        path = cache.directory.path()
        found[room] = {
            "path": str(path),
            "is_kept": path.name == cache.directory.name,  # else it ends with this process
            "num_kernels": len(list(path.glob("*.nbi"))),
        }
    return found


def _tensorflow(request: CollectRequest) -> Facts:
    """Import it in a separate process, as a node does, under a node's environment."""
    import importlib.util

    from tfos.node.bootstrap import node_env
    from tfos.worker.import_ahead import SLOW, compiled_again

    missing = sorted(name for name in SLOW if importlib.util.find_spec(name) is None)
    if missing:
        return {"missing": missing}
    again = compiled_again(("tensorflow",))
    if not request.with_tensorflow:
        return {"compiled_again": again}
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **node_env(os.environ)}
    done = _run([sys.executable, "-P", "-c", _IMPORT], IMPORT_S, env)
    if done is None:
        return {"compiled_again": again, "silent_s": IMPORT_S}
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}: {_last_line(done.stderr)}")
    took_s, peak_kib = json.loads(_last_line(done.stdout))
    return {"compiled_again": again, "import_s": took_s, "peak_mib": peak_kib >> 10}


def _hdfs(request: CollectRequest) -> Facts:
    """Write a file, read it and remove it."""
    from feeding.filesystem.config import FileSystemConfig
    from feeding.filesystem.registry import filesystem_for

    url = request.hdfs
    config = FileSystemConfig(call_timeout_s=_HDFS_CALL_S, patience_s=_HDFS_PATIENCE_S)
    files = filesystem_for(url, config)
    began_s = time.monotonic()
    files.write(url, _CONTENT, overwrite=False)
    with files.open(url) as file:
        found = file.read_range(0, file.size_bytes)
    if found != _CONTENT:
        raise OSError(
            f"{url} holds {len(found)} bytes that differ from the {len(_CONTENT)} written"
        )
    if not files.delete(url):
        raise OSError(f"{url} was there and could not be removed")
    return {"url": url, "took_s": time.monotonic() - began_s}


def _run(
    command: list[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a program without input; None: it did not end in time."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


_STEPS: Mapping[str, Callable[[CollectRequest], Facts]] = {
    PLACE: _place,
    "python": _python,
    "packages": _packages,
    "java": _java,
    "memory": _memory,
    "/dev/shm": _shared_memory,
    "gpus": _gpus,
    "ports": _ports,
    "names": _names,
    "kernels": _kernels,
    "tensorflow": _tensorflow,
    "hdfs": _hdfs,
}
