"""Children of a supervisor: start, watch and end of processes, always by pidfd.

Covers: the bootstrap document, the merged output pipe, the control link, the exit status.
Does not: decide when to start or stop it (tfos.node.supervisor), read its output
(tfos.node.supervisor.log_buffer splits it).
Threads: start it from the supervisor's main thread: PR_SET_PDEATHSIG is bound to that thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from rpc.linux_calls import P_PIDFD, pidfd_open, pidfd_send_signal
from tfos.node import bootstrap, procfs
from tfos.node.child_link import ChildLink, FromChild
from tfos.node.failure import Exit
from tfos.topology import PS_ROLE, PlannedNode

_READ_BYTES = 64 * 1024


class Child:
    """A running child process.

    Args:
        pid: pid of the child.
        output: descriptor of the pipe with its output.
        link: control link; None for programs that are not ours.
    """

    def __init__(self, pid: int, output: int, link: ChildLink[FromChild] | None) -> None:
        self.pid = pid
        self.pidfd = pidfd_open(pid)
        self.output = output
        """Non-blocking read end of its stdout and stderr, in the order of writing."""
        self.link = link
        self.exit: Exit | None = None
        self._suspended_since_s: float | None = None

    def read_output(self) -> bytes | None:
        """Return available output; None if there is none now, empty at the end."""
        try:
            return os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return None

    def reap(self) -> Exit | None:
        """Collect the exit status; None while it runs."""
        if self.exit is None:
            result = os.waitid(P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                by_code = result.si_code == os.CLD_EXITED
                self.exit = Exit(
                    result.si_status if by_code else None, None if by_code else result.si_status
                )
        return self.exit

    def suspended_s(self) -> float:
        """Return for how many seconds all calls have found it suspended."""
        if self.exit is not None or not procfs.is_suspended(self.pid):
            self._suspended_since_s = None
            return 0.0
        now_s = time.monotonic()
        self._suspended_since_s = self._suspended_since_s or now_s
        return now_s - self._suspended_since_s

    def kill(self) -> None:
        """Kill this process, and never another one that got its pid."""
        with contextlib.suppress(ProcessLookupError):
            pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptors of an ended child."""
        os.close(self.pidfd)
        os.close(self.output)
        if self.link is not None:
            self.link.close()


def module_of(node: PlannedNode) -> str:
    """Return the module whose `main` is the process of a node."""
    if node.serves_tensorflow:
        return "tfos.native.server_process"
    return "tfos.node.ps_process" if node.is_ps else "tfos.worker.process"


def spawn(  # noqa: PLR0913 - the whole of a process's start
    module: str,
    body: bytes,
    *,
    sys_path: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    title: str,
    link: tuple[socket.socket, socket.socket] | None = None,
    inherit: Sequence[int] = (),
) -> Child:
    """Start `module.main(body)` in a new process that dies with this one.

    Args:
        module: see bootstrap.document_fd.
        body: argument of `main`.
        sys_path: the child's module path.
        cwd: the child's working directory.
        env: the child's whole environment.
        title: shown in lists of processes.
        link: both ends of a socketpair; the child inherits the second under its own number.
        inherit: further descriptors that the child shares under their numbers.
    """
    document = bootstrap.document_fd(module, body, sys_path=sys_path, parent_pid=os.getpid())
    output_read, output_write = os.pipe()
    os.set_blocking(output_read, False)
    inherited = [document, *([link[1].fileno()] if link else []), *inherit]
    try:
        process = subprocess.Popen(
            bootstrap.command(document, title),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            env=dict(env),
            cwd=cwd,
        )
    except OSError:
        os.close(output_read)
        raise
    finally:
        os.close(document)
        os.close(output_write)
        if link:
            link[1].close()
    child = Child(process.pid, output_read, ChildLink(link[0], FromChild) if link else None)
    process.returncode = 0  # `Child.reap` waits for it; Popen must not
    return child


def visible_gpus(
    node: PlannedNode, gpus: Sequence[str], resource: str | None
) -> Sequence[str] | None:
    """Return the GPUs that a node's process may see; None: as the executor's environment says.

    A parameter server sees none: TensorFlow would take the memory of one that a worker trains on.

    Args:
        node: the node from the plan.
        gpus: addresses that Spark gave to its task.
        resource: Spark's name of the GPUs; None: no node sees one.
    """
    if node.role == PS_ROLE or resource is None:
        return ()
    return gpus or None


def child_env(
    base: Mapping[str, str],
    *,
    threads: int,
    cores: int,
    gpus: Sequence[str] | None = None,
    shares_gpus: bool = False,
) -> dict[str, str]:
    """Return a child's environment: `base` without secrets, with the size of every thread pool.

    Without these sizes each library uses all cores of the host, on every executor of that host.

    Args:
        base: the environment to start from.
        threads: the user's setting; 0: `OMP_NUM_THREADS` if Spark or the user set that, else the
            task's cores.
        cores: number of the task's cores.
        gpus: addresses of those that it sees; empty: none; None: as in `base`.
        shares_gpus: whether others compute on them: TensorFlow would take nearly all memory.
    """
    env = bootstrap.without_spark_secrets(base)
    inherited = env.get("OMP_NUM_THREADS", "")
    count = threads or (int(inherited) if inherited.isdigit() else 0) or max(1, cores)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        env[name] = str(count)
    env.setdefault("TF_NUM_INTRAOP_THREADS", str(count))
    env.setdefault("TF_NUM_INTEROP_THREADS", str(max(2, count)))
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) or "-1"
        # CUDA counts the fastest first; discovery scripts and nvidia-smi count by bus.
        env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if shares_gpus:
        env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return env
