"""A worker of a long run: it pushes to dense parameters and a table until told to stop, and counts.

Usage: python -m tests.support.programs.soaking_worker RANK GENERATION NUM_WORKERS COUNTS

COUNTS is a file.
Standard input: the secret, then the servers' endpoints as JSON. What it began and what was
acknowledged stands in COUNTS, which outlives its kill. Of the dense elements those whose number is
RANK modulo NUM_WORKERS get 1 from a push, so each worker's pushes can be counted in the values.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tests.support.ps_processes import CLUSTER_ID

STEP_S = 0.004
"""Of computing, as a model would; also what leaves the machine to others."""
WAIT_S = 60.0
ROWS_EACH = 64
HYPER = Hyper(1.0)


class Counts:
    """Numbers in a file that two processes map."""

    _FORM = struct.Struct("5Q")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(self._FORM.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORM.size)

    @property
    def begun(self) -> tuple[int, int]:
        """Pushes to the dense parameters and to the table that were begun."""
        return self._all()[0], self._all()[2]

    @property
    def acknowledged(self) -> tuple[int, int]:
        """Those of them that were acknowledged."""
        return self._all()[1], self._all()[3]

    @property
    def stopping(self) -> bool:
        return bool(self._all()[4])

    def stop(self) -> None:
        self._put(4)

    def add(self, place: int) -> None:
        self._put(place)

    def close(self) -> None:
        self._map.close()

    def _put(self, place: int) -> None:
        struct.pack_into("Q", self._map, 8 * place, self._all()[place] + 1)

    def _all(self) -> tuple[int, ...]:
        return self._FORM.unpack(self._map[:])


def ids_of(rank: int) -> np.ndarray:
    """The rows that a worker pushes to."""
    return np.arange(rank * ROWS_EACH, (rank + 1) * ROWS_EACH)


def push_until_stopped(client: PSClient, counts: Counts, num_workers: int) -> None:
    rank = client.identity.rank
    client.attach(timeout_s=WAIT_S)
    size = client.layout.group("trainable").num_elements
    mine = np.arange(size) % num_workers == rank
    gradient = {"trainable": mine.astype(np.float32)}
    values = {"trainable": np.empty(size, np.float32)}
    rows = {"rows": (ids_of(rank), np.ones((ROWS_EACH, 4), np.float32))}
    while not counts.stopping:
        counts.add(0)
        client.push_pull(gradient, values, hyper=HYPER, rows=1)
        counts.add(1)
        counts.add(2)
        client.tables.push(rows, hyper=HYPER)
        counts.add(3)
        time.sleep(STEP_S)


def main() -> None:
    rank, generation, num_workers = map(int, sys.argv[1:4])
    secret = sys.stdin.readline().strip().encode()
    endpoints = msgspec.convert(json.loads(sys.stdin.readline()), list[Endpoint])
    identity = Identity(Role.WORKER, rank, generation)
    counts = Counts(Path(sys.argv[4]))
    with PSClient(
        endpoints,
        Credentials(CLUSTER_ID, secret),
        identity,
        num_workers=num_workers,
        timeout_s=WAIT_S,
        reconnect_s=WAIT_S,
    ) as client:
        push_until_stopped(client, counts, num_workers)


if __name__ == "__main__":
    main()
