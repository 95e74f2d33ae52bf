"""GPUs of this host, as nvidia-smi reports them: which there are, and which processes use them.

Covers: asking with a deadline, the users of those processes, what is missing or held of some GPUs.
Does not: decide what follows (tfos.node.supervisor.gpu_check), choose free GPUs
(tfos.tensorflowonspark.gpu_info).
Runs in: supervisors, tasks of `tfos doctor`, any process.      Threads: any.

In a container nvidia-smi may see other containers' memory but not their processes, so a GPU without
a holder is not always free. Parts of a GPU (MIG) have addresses of their own, which are not judged.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tfos.node import procfs

ASK_S = 10.0
"""Seconds for one answer of nvidia-smi; without persistence mode it first wakes up each GPU."""
_END_S = 1.0
"""Seconds for the end of a nvidia-smi that gave no answer."""
_GPU_FIELDS = "index,uuid,name,memory.used,memory.total"
_HOLDER_FIELDS = "pid,gpu_uuid,used_memory,process_name"
_MAX_REASON_CHARS = 200
_MIG = "MIG"
_DAEMON = "pyspark.daemon"
"""The module whose forks run Python tasks, and have its command line."""


class GpuToolFailed(Exception):
    """nvidia-smi is there and gave no answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: str
    uuid: str
    name: str
    used_mb: str
    total_mb: str

    @property
    def used_of_total(self) -> str:
        """Its memory, as text."""
        return f"{self.used_mb} of {self.total_mb} MB used"

    def is_at(self, address: str) -> bool:
        """Whether Spark's address means this GPU: its index, or the beginning of its UUID.

        Args:
            address: address from the discovery script.
        """
        if address.isdigit():
            return self.index == address
        return bool(address) and self.uuid.lower().startswith(address.lower())


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that computes on a GPU."""

    pid: int
    gpu_uuid: str
    used_mb: str
    """A number, or what nvidia-smi says instead of it."""
    program: str
    user: str
    """User of the process; empty: this process cannot see it, as in another container."""
    is_spark: bool = False
    """A Python worker of Spark, as of a prediction: without a task it ends after a minute."""

    def __str__(self) -> str:
        who = f"user {self.user}" if self.user else "in another container"
        memory = f", {self.used_mb} MB" if self.used_mb.isdigit() else ""
        program = os.path.basename(self.program) or "unknown"
        what = f"{program} of Spark's tasks" if self.is_spark else program
        return f"pid {self.pid} ({what}, {who}{memory})"


@dataclass(frozen=True, slots=True)
class HostGpus:
    """All GPUs of a host at one moment."""

    gpus: tuple[Gpu, ...]
    holders: tuple[GpuHolder, ...]

    def missing(self, addresses: Sequence[str]) -> list[str]:
        """Return the addresses at which there is no GPU.

        Args:
            addresses: addresses of GPUs, as Spark gave them to a task.
        """
        judged = (each for each in addresses if not each.upper().startswith(_MIG))
        return [each for each in judged if not any(gpu.is_at(each) for gpu in self.gpus)]

    def held(
        self, addresses: Sequence[str], ours: Collection[int] = ()
    ) -> list[tuple[Gpu, list[GpuHolder]]]:
        """Return those of these GPUs on which other processes compute, with these.

        Args:
            addresses: addresses of GPUs, as Spark gave them to a task.
            ours: pids that may be there.
        """
        found = []
        for gpu in self.gpus:
            if any(gpu.is_at(address) for address in addresses):
                others = [
                    each
                    for each in self.holders
                    if each.gpu_uuid == gpu.uuid and each.pid not in ours
                ]
                found += [(gpu, others)] if others else []
        return found


def look(timeout_s: float = ASK_S) -> HostGpus | None:
    """Return the GPUs of this host; None: it has no nvidia-smi.

    Args:
        timeout_s: seconds for each of two answers.

    Raises:
        GpuToolFailed: nvidia-smi failed, or did not answer in time.
    """
    gpus = _ask("gpu", _GPU_FIELDS, timeout_s)
    holders = _ask("compute-apps", _HOLDER_FIELDS, timeout_s)
    if gpus is None or holders is None:
        return None
    return HostGpus(
        tuple(Gpu(*each) for each in gpus),
        tuple(
            GpuHolder(int(pid), uuid, used, program, _user_of(int(pid)), _is_spark(int(pid)))
            for pid, uuid, used, program in holders
            if pid.isdigit()
        ),
    )


def _ask(what: str, fields: str, timeout_s: float) -> list[list[str]] | None:
    """Return the fields of each line of an answer; None: there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GpuToolFailed(f"nvidia-smi cannot run: {error}") from None
    try:
        told, errors = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise GpuToolFailed(f"nvidia-smi gave no answer in {timeout_s:g} s") from None
    finally:
        _end(asked)
    if asked.returncode != 0:
        said = " ".join((told + errors).split())[:_MAX_REASON_CHARS]
        raise GpuToolFailed(f"nvidia-smi ended with status {asked.returncode}: {said}")
    count = fields.count(",")
    lines = [[part.strip() for part in line.split(",", count)] for line in told.splitlines()]
    return [parts for parts in lines if len(parts) == count + 1]


def _end(asked: subprocess.Popen[str]) -> None:
    """End what runs, or leave it: a broken GPU holds it in the kernel, where SIGKILL waits too."""
    asked.kill()
    for pipe in (asked.stdout, asked.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        asked.wait(_END_S)


def _is_spark(pid: int) -> bool:
    return _DAEMON in procfs.command_line(pid)


def _user_of(pid: int) -> str:
    """Return the name or number of a process's user; empty if the process cannot be seen."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
