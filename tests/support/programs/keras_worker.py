"""A worker that trains the counting model of tests.system.keras.test_embedding_faults.

Usage: python -m tests.support.programs.keras_worker CLUSTER_ID MODE STEPS HOST:PORT...
Standard input: the secret in hex; then a line, which it waits for after STEPS steps.
Standard output: "ready" after them. It is worker 1 of 2.
"""

from __future__ import annotations

import sys

from ps.client.client import PSClient
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tests.system.keras.test_embedding_faults import counting, fit, ids

RANK, NUM_WORKERS = 1, 2
WAIT_S = 60.0


def main() -> None:
    cluster_id, mode, steps, *places = sys.argv[1:]
    pairs = [place.rsplit(":", 1) for place in places]
    endpoints = [Endpoint(host, int(port)) for host, port in pairs]
    credentials = Credentials(cluster_id, bytes.fromhex(sys.stdin.readline()))
    identity = Identity(Role.WORKER, RANK)
    client = PSClient(
        endpoints, credentials, identity, num_workers=NUM_WORKERS, timeout_s=WAIT_S, reconnect_s=2.0
    )

    def at_step(number: int) -> None:
        if number + 1 == int(steps):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            sys.stdin.readline()

    fit(counting(client, mode, NUM_WORKERS, RANK), ids(RANK), at_step)


if __name__ == "__main__":
    main()
