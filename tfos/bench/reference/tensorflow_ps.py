"""TensorFlow's parameter server: a ClusterCoordinator, one worker and one server, by its own gRPC.

Three processes, as its guide has them. The coordinator reads one command a line from standard
input and answers with the seconds of it: `read`: the worker has fetched all variables; `add`: the
worker has added a gradient to all of them; `value`: the smallest and largest value instead of
seconds. Written with plain `tf.Variable`s: Keras takes no part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from ps.errors import PSError
from tfos.bench.reference.child_line import child_line

ANSWER_TIMEOUT_S = 600.0
"""The first answer comes after TensorFlow's import and the others' start."""
LAST_BYTES = 2000
STOP_TIMEOUT_S = 10.0


class TensorFlowPeer:
    """The three processes as a caller sees them.

    Args:
        processes: coordinator, worker and server.
        messages: their output, for error texts.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], messages: IO[bytes]) -> None:
        self.pids = tuple(process.pid for process in processes)
        self._coordinator = processes[-1]
        self._messages = messages

    def read(self) -> float:
        """Fetch all variables into the worker; returns seconds."""
        return self._ask("read")[0]

    def add(self) -> float:
        """Add ones to all variables from the worker; returns seconds."""
        return self._ask("add")[0]

    def values(self) -> list[float]:
        """Return the smallest and the largest value of all variables."""
        return self._ask("value")

    def _ask(self, command: str) -> list[float]:
        to = self._coordinator.stdin
        if to is None:
            raise PSError("the coordinator was started without pipes")
        try:
            to.write(command + "\n")
            to.flush()
            what = "TensorFlow's coordinator to answer"
            line = child_line(self._coordinator, what, ANSWER_TIMEOUT_S)
        except (PSError, BrokenPipeError) as error:
            self._messages.seek(0)
            last = self._messages.read()[-LAST_BYTES:].decode("utf-8", "replace")
            raise PSError(f"{error}: {last}") from None
        found: list[float] = json.loads(line)
        return found


@contextlib.contextmanager
def tensorflow_peer(num_bytes: int, num_tensors: int) -> Iterator[TensorFlowPeer]:
    """Start the processes with variables of `num_bytes` together; they end with the block.

    Args:
        num_bytes: size of all variables together, float32.
        num_tensors: number of variables.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
    spec = json.dumps({job: [f"127.0.0.1:{free_port()}"] for job in ("ps", "worker")})
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with contextlib.ExitStack() as running:
        messages = running.enter_context(tempfile.TemporaryFile())

        def start(*job: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, spec, *job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                env=environ,
            )
            running.callback(_end, process)
            return process

        processes = [start("ps"), start("worker")]
        processes.append(start("chief", str(num_bytes), str(num_tensors)))
        yield TensorFlowPeer(processes, messages)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()  # they cannot end in order
    process.communicate(timeout=STOP_TIMEOUT_S)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def serve(spec: dict[str, list[str]], job: str) -> None:
    """Run the worker or the server until killed.

    Args:
        spec: TensorFlow's cluster: addresses by job.
        job: "worker" or "ps".
    """
    import tensorflow as tf

    server = tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=job, protocol="grpc")
    server.join()


def coordinate(spec: dict[str, list[str]], num_bytes: int, num_tensors: int) -> None:
    """Answer commands until standard input ends.

    Args:
        spec: TensorFlow's cluster: addresses by job.
        num_bytes: size of all variables together, float32.
        num_tensors: number of variables.
    """
    commands = _commands(spec, num_bytes, num_tensors)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(commands[line.strip()]()) + "\n")
        sys.stdout.flush()


def _commands(
    spec: dict[str, list[str]], num_bytes: int, num_tensors: int
) -> dict[str, Callable[[], list[float]]]:
    import tensorflow as tf

    size = num_bytes // 4 // num_tensors
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros((size,))) for _ in range(num_tensors)]

    def ones() -> Any:
        # One tensor for all variables would travel once.
        return tf.data.Dataset.from_tensors(tuple(tf.ones((size,)) for _ in variables)).repeat()

    gradients = iter(coordinator.create_per_worker_dataset(ones))

    def read() -> Any:
        # One element of each comes back, so that none is left out as unused.
        return tf.stack([tf.identity(variable)[-1] for variable in variables])

    def add(iterator: Any) -> None:
        for variable, gradient in zip(variables, next(iterator), strict=True):
            variable.assign_add(gradient, read_value=False)

    def run(function: Any, *args: Any) -> list[float]:
        begun = time.perf_counter()
        coordinator.schedule(function, args=args)
        coordinator.join()
        return [time.perf_counter() - begun]

    def value() -> list[float]:
        found = [(tf.reduce_min(each), tf.reduce_max(each)) for each in variables]
        return [float(min(low for low, _ in found)), float(max(high for _, high in found))]

    return {
        "read": functools.partial(run, tf.function(read)),
        "add": functools.partial(run, tf.function(add), gradients),
        "value": value,
    }


if __name__ == "__main__":
    _spec: dict[str, list[str]] = json.loads(sys.argv[1])
    if sys.argv[2] == "chief":
        coordinate(_spec, int(sys.argv[3]), int(sys.argv[4]))
    else:
        serve(_spec, sys.argv[2])
