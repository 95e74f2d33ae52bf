r"""Programs that train by turns: one side of the DeepFM benchmark as processes.

    harness ─► "100\n" on each program's standard input ─► 100 more steps ─► "done\n" from each

The first line of a program's input is its `Task` as JSON, the first line of its output says that
it is ready. A task without turns is one pass over the files; then the output's next line is the AUC
on the held-out file. A program ends when its input does.

Covers: both ends of the pipes, the seconds and the CPU seconds of a turn.
Does not: know what is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import psutil

from ps.errors import PSError
from scripts.benchmarks.harness import ROOT

LAST_BYTES = 3000
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Task:
    """What a program trains."""

    files: list[str]
    held_out: str
    num_ids: int
    hidden: list[int]
    optimizer: str
    """Name of its class in Keras."""
    turns: bool = True
    """False: one pass over the files, then the AUC."""
    batch_size: int = 512
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    """What only one side's programs need."""


class Spent(NamedTuple):
    """What some steps took."""

    wall_s: float
    cpu_s: float
    """CPU seconds of all processes of the side, user's and system's."""


def read_task() -> Task:
    """Return the task of this process."""
    return Task(**json.loads(sys.stdin.readline()))


def say(value: object) -> None:
    """Answer with one line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def turns() -> Iterator[int]:
    """Yield how many steps the next turn has; ends the process at the end of the input."""
    for line in iter(sys.stdin.readline, ""):
        yield int(line)
        say("done")
    os._exit(0)  # in the middle of a training, which has no other end


def turn_callback(keras: Any) -> Any:
    """Return a callback of `fit` that waits for the next turn where one ends.

    Args:
        keras: the package, Keras 3 or tf-keras.
    """
    given = turns()

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        left = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if not self.left:
                self.left = next(given)
            self.left -= 1

    return Turns()


class Side:
    """Processes that train one model together, as the harness sees them.

    Args:
        leaders: take turns.
        pids: pids of all processes.
        messages: what they print on standard error.
    """

    def __init__(
        self, leaders: Sequence[subprocess.Popen[str]], pids: Sequence[int], messages: Any
    ) -> None:
        self._leaders = leaders
        self._processes = [psutil.Process(pid) for pid in pids]
        self._messages = messages

    def train(self, steps: int) -> Spent:
        """Run `steps` of each leader; returns what they took.

        Args:
            steps: steps of each leader.
        """
        cpu_s, began_s = self.cpu_s(), time.perf_counter()
        for leader in self._leaders:
            if leader.stdin is not None:
                leader.stdin.write(f"{steps}\n")
                leader.stdin.flush()
        self.answers()
        return Spent(time.perf_counter() - began_s, self.cpu_s() - cpu_s)

    def answers(self) -> list[Any]:
        """Return the next line of each leader."""
        return [self._answer(leader) for leader in self._leaders]

    def cpu_s(self) -> float:
        """Return the CPU seconds that all processes have used so far."""
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _answer(self, leader: subprocess.Popen[str]) -> Any:
        line = leader.stdout.readline() if leader.stdout is not None else ""
        if line:
            return json.loads(line)
        status = leader.wait(STOP_TIMEOUT_S)
        self._messages.seek(0)
        last = self._messages.read()[-LAST_BYTES:].decode("utf-8", "replace")
        raise PSError(f"{leader.args!r} ended with status {status}: {last}")


@contextlib.contextmanager
def side(programs: Mapping[str, Sequence[Task | str]], pids: Sequence[int] = ()) -> Iterator[Side]:
    """Start programs and yield them when they are ready; they end with the block.

    Args:
        programs: by module, one task for each process that takes turns; a text: a process that gets
            it as an argument and is not asked for anything.
        pids: pids of further processes of the same side, whose CPU seconds count.
    """
    environ = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_USE_LEGACY_KERAS": "1",  # of tf.keras alone; Keras 3 is `keras`
    }
    with contextlib.ExitStack() as running:
        messages = running.enter_context(tempfile.TemporaryFile())
        leaders, own = [], list(pids)
        for module, tasks in programs.items():
            for task in tasks:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, *([task] if isinstance(task, str) else [])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    text=True,
                    env=environ,
                    cwd=ROOT,
                )
                running.callback(_end, process)
                if isinstance(task, Task) and process.stdin is not None:
                    process.stdin.write(json.dumps(asdict(task)) + "\n")
                    process.stdin.flush()
                    leaders.append(process)
                own.append(process.pid)
        found = Side(leaders, own, messages)
        found.answers()
        yield found


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()  # in the middle of a training; most have no way of ending in order
    process.communicate(timeout=STOP_TIMEOUT_S)
