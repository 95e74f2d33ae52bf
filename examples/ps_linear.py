"""Train a linear model with two parameter servers and two workers, with only numpy.

No Spark, no TensorFlow: this process starts two servers (`python -m ps.server`) and two workers
(this file again), each with half of the rows, waits for them, pulls the weights and compares them
with least squares.

    python examples/ps_linear.py
    python examples/ps_linear.py --consistency sync --steps 400
    python examples/ps_linear.py --consistency ssp
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from ps import GroupSpec, Hyper, Manifest, ParamSpec, PSClient, rules
from rpc import Credentials, Endpoint, Identity, Role

NUM_SERVERS = 2
NUM_WORKERS = 2
NUM_ROWS = 4000
NUM_FEATURES = 20
CLUSTER_ID = "ps-linear"
CHILD_TIMEOUT_S = 120.0


def manifest_of(consistency: Literal["async", "sync", "ssp"]) -> Manifest:
    params = (ParamSpec("kernel", (NUM_FEATURES,)), ParamSpec("bias", (1,)))
    group = GroupSpec("trainable", "float32", rules.SGD(), params)
    # Buckets of 64 bytes, so that even these 21 numbers are spread over both servers.
    bound = 2 if consistency == "ssp" else 0  # steps that one worker may be ahead
    return Manifest(
        groups=(group,), consistency=consistency, staleness_bound=bound, bucket_bytes=64
    )


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Features with a last column of ones, and noisy targets; the same in every process."""
    random = np.random.default_rng(7)
    features = random.standard_normal((NUM_ROWS, NUM_FEATURES + 1)).astype(np.float32)
    features[:, -1] = 1.0
    weights = random.standard_normal(NUM_FEATURES + 1).astype(np.float32)
    noise = 0.1 * random.standard_normal(NUM_ROWS).astype(np.float32)
    return features, features @ weights + noise


def work(options: argparse.Namespace) -> None:
    """One worker: pull, compute the gradient of its rows, push and pull, many times."""
    launch = json.loads(sys.stdin.readline())
    credentials = Credentials(CLUSTER_ID, launch["secret"].encode())
    endpoints = [Endpoint(host, port) for host, port in launch["endpoints"]]
    features, targets = (part[options.worker :: NUM_WORKERS] for part in make_data())
    random = np.random.default_rng(options.worker)
    weights = {"trainable": np.zeros(NUM_FEATURES + 1, np.float32)}
    identity = Identity(Role.WORKER, options.worker)
    with PSClient(endpoints, credentials, identity, num_workers=NUM_WORKERS) as client:
        if options.worker == 0:
            client.seed(manifest_of(options.consistency), weights)
        client.attach()
        client.pull(weights)
        for step in range(options.steps):
            rows = random.integers(0, len(targets), options.batch_size)
            errors = features[rows] @ weights["trainable"] - targets[rows]
            gradient = {"trainable": 2.0 * features[rows].T @ errors / np.float32(len(rows))}
            rate = Hyper(options.learning_rate / (1.0 + step / 100.0))
            ack = client.push_pull(gradient, weights, hyper=rate, rows=len(rows))
            if step % 50 == 0 or step == options.steps - 1:
                loss = float(np.mean(errors**2))
                print(f"worker:{options.worker} step {step} clock {ack.clock} loss {loss:.4f}")
        client.finish()


@contextlib.contextmanager
def running(
    command: list[str], *, stdin: int | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block."""
    child = subprocess.Popen(command, text=True, stdin=stdin, stdout=stdout)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        child.communicate(timeout=CHILD_TIMEOUT_S)


def start_servers(stack: contextlib.ExitStack, secret: str) -> list[Endpoint]:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-linear-"))
    secret_file = Path(directory) / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text(secret)
    endpoints = []
    for rank in range(NUM_SERVERS):
        command = [sys.executable, "-m", "ps.server", "--rank", str(rank)]
        command += ["--num-servers", str(NUM_SERVERS), "--num-workers", str(NUM_WORKERS)]
        command += ["--secret-file", str(secret_file), "--cluster-id", CLUSTER_ID]
        server = stack.enter_context(running(command, stdout=subprocess.PIPE))
        assert server.stdout is not None
        announced = json.loads(server.stdout.readline())
        print(f"{announced['server']} listens on {announced['host']}:{announced['port']}")
        endpoints.append(Endpoint(announced["host"], announced["port"]))
    return endpoints


def lead() -> bool:
    """Start everything, wait for the workers, compare; True when the weights match."""
    secret = secrets.token_urlsafe(32)
    with contextlib.ExitStack() as stack:
        endpoints = start_servers(stack, secret)
        launch = json.dumps(
            {"secret": secret, "endpoints": [[end.host, end.port] for end in endpoints]}
        )
        workers = []
        for rank in range(NUM_WORKERS):
            command = [sys.executable, __file__, "--worker", str(rank), *sys.argv[1:]]
            worker = stack.enter_context(running(command, stdin=subprocess.PIPE))
            assert worker.stdin is not None
            worker.stdin.write(launch + "\n")  # by pipe: arguments are visible to everybody
            worker.stdin.flush()
            workers.append(worker)
        failed = [rank for rank, worker in enumerate(workers) if worker.wait(CHILD_TIMEOUT_S)]
        if failed:
            print(f"workers {failed} failed")
            return False
        return compare(endpoints, Credentials(CLUSTER_ID, secret.encode()))


def compare(endpoints: list[Endpoint], credentials: Credentials) -> bool:
    """Pull the weights as the driver and compare them with least squares."""
    weights = {"trainable": np.zeros(NUM_FEATURES + 1, np.float32)}
    identity = Identity(Role.DRIVER, 0)
    with PSClient(endpoints, credentials, identity, num_workers=NUM_WORKERS) as client:
        client.attach()
        client.pull(weights)
        for stats in client.stats():
            rows = ", ".join(f"worker:{w.worker} {w.pushes} pushes" for w in stats.workers)
            print(f"ps:{stats.server} clock {stats.clock}, {rows}, {stats.bytes_in} bytes in")
        client.stop_servers("done")
    features, targets = make_data()
    best = np.linalg.lstsq(features, targets, rcond=None)[0]
    difference = float(np.abs(weights["trainable"] - best).max())
    verdict = "match" if difference < 0.03 else "DO NOT MATCH"
    print(f"loss {float(np.mean((features @ weights['trainable'] - targets) ** 2)):.4f}")
    print(f"weights {verdict} least squares: largest difference {difference:.5f}")
    return difference < 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--consistency", choices=("async", "sync", "ssp"), default="async")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return 0
    return 0 if lead() else 1


if __name__ == "__main__":
    sys.exit(main())
