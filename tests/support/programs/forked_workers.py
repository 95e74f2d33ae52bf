"""Workers that push until they are killed, forked from this process: one costs milliseconds.

Usage: python -m tests.support.programs.forked_workers CLUSTER_ID SIZE HOST:PORT...
Standard input: the secret in hex, then a line per worker: GENERATION PUSHES DELAY_S. It is killed
(SIGKILL) DELAY_S after its answer to so many pushes. Standard output: BEGUN ACKNOWLEDGED.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time

import numpy as np

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint

RANK, NUM_WORKERS = 1, 2
COUNTS = struct.Struct("QQ")
WAIT_S = 60.0


def push_for_ever(client: PSClient, size: int, counts: mmap.mmap) -> None:
    client.attach()
    gradient = {"trainable": np.ones(size, np.float32)}
    begun = 0
    while True:
        counts[:] = COUNTS.pack(begun + 1, begun)
        client.push(gradient, hyper=Hyper(1.0), rows=1)
        begun += 1
        counts[:] = COUNTS.pack(begun, begun)


def run_and_kill(
    endpoints: list[Endpoint], credentials: Credentials, size: int, line: str
) -> tuple[int, int]:
    generation, pushes, delay_s = line.split()
    counts = mmap.mmap(-1, COUNTS.size)  # shared with the child
    pid = os.fork()
    if pid == 0:
        try:
            identity = Identity(Role.WORKER, RANK, int(generation))
            client = PSClient(endpoints, credentials, identity, num_workers=NUM_WORKERS)
            push_for_ever(client, size, counts)
        finally:
            os._exit(1)
    deadline = time.monotonic() + WAIT_S
    while COUNTS.unpack(counts[:])[1] < int(pushes) and time.monotonic() < deadline:
        time.sleep(0.0002)
    time.sleep(float(delay_s))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError(f"worker {generation} ended by itself: {status}")
    begun, acknowledged = COUNTS.unpack(counts[:])
    return begun, acknowledged


def main() -> None:
    cluster_id, size, *places = sys.argv[1:]
    credentials = Credentials(cluster_id, bytes.fromhex(sys.stdin.readline().strip()))
    endpoints = [
        Endpoint(host, int(port)) for host, _, port in (each.rpartition(":") for each in places)
    ]
    for line in sys.stdin:
        begun, acknowledged = run_and_kill(endpoints, credentials, int(size), line)
        sys.stdout.write(f"{begun} {acknowledged}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
