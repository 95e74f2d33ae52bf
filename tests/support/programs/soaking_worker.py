"""A worker of a long run: it pushes to dense parameters and a table until told to stop, and counts.

Usage: python -m tests.support.programs.soaking_worker

Standard input: the secret, then a `Job` as JSON. What it began and what was acknowledged stands in
the job's file of counts, which outlives its kill. Of the dense elements those whose number is
`slot` modulo `num_slots` get 1 from a push, and each of the slot's rows, so its pushes can be
counted in the values. Workers of odd slots push both in one request.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Credentials, Identity, Integrity, Role
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


class Job(msgspec.Struct, kw_only=True):
    """What one worker is to do."""

    rank: int
    generation: int
    num_workers: int
    slot: int
    num_slots: int
    counts: str
    endpoints: list[Endpoint]
    integrity: Integrity = "auto"


def ids_of(slot: int) -> np.ndarray[Any, Any]:
    """The rows that the worker of this slot pushes to."""
    return np.arange(slot * ROWS_EACH, (slot + 1) * ROWS_EACH)


def pushes_together(slot: int) -> bool:
    """Whether a worker's gradient and rows are one push, which is there if both parts are."""
    return slot % 2 == 1


def together(
    client: PSClient, counts: Counts, job: Job, dense: tuple[dict[str, Any], dict[str, Any]]
) -> Iterator[None]:
    """Push gradient and rows in one request, which brings the next batch's rows, as `fit` does."""
    gradient, values = dense
    routed = client.tables.route({"rows": ids_of(job.slot)})["rows"]
    ones = np.ones((ROWS_EACH, 4), np.float32)
    found = np.empty_like(ones)
    client.tables.lookup_into({"rows": (routed, found)}, training=True)
    while True:
        following = client.tables.route({"rows": ids_of(job.slot)})["rows"]
        counts.add(0)
        counts.add(2)
        client.push_pull(
            gradient,
            values,
            hyper=HYPER,
            rows=1,
            table_grads={"rows": (routed, ones)},
            next_rows={"rows": (following, found)},
        )
        counts.add(1)
        counts.add(3)
        routed = following
        yield


def push_until_stopped(client: PSClient, counts: Counts, job: Job) -> None:
    manifest = client.attach(timeout_s=WAIT_S)
    size = client.layout.group("trainable").num_elements
    mine = np.arange(size) % job.num_slots == job.slot
    gradient = {"trainable": mine.astype(np.float32)}
    values = {"trainable": np.empty(size, np.float32)}
    ids, ones = ids_of(job.slot), np.ones((ROWS_EACH, 4), np.float32)
    has_permits = manifest.consistency == "hybrid"

    def push_apart() -> None:
        batch: AbstractContextManager[Any]
        batch = client.tables.batch({"rows": ids}) if has_permits else nullcontext()
        with batch as begun:
            counts.add(0)
            client.push_pull(gradient, values, hyper=HYPER, rows=1)
            counts.add(1)
            counts.add(2)
            if begun is None:
                client.tables.push({"rows": (ids, ones)}, hyper=HYPER)
            else:
                begun.push({"rows": ones}, hyper=HYPER)
            counts.add(3)

    steps = None
    if pushes_together(job.slot):
        steps = together(client, counts, job, (gradient, values))
    while not counts.stopping:
        if steps is None:
            push_apart()
        else:
            next(steps)
        time.sleep(STEP_S)
    if manifest.consistency != "async":
        client.leave()  # the others still push


def main() -> None:
    secret = sys.stdin.readline().strip().encode()
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    counts = Counts(Path(job.counts))
    with PSClient(
        job.endpoints,
        Credentials(CLUSTER_ID, secret, job.integrity),
        Identity(Role.WORKER, job.rank, job.generation),
        num_workers=job.num_workers,
        timeout_s=WAIT_S,
        reconnect_s=WAIT_S,
    ) as client:
        push_until_stopped(client, counts, job)


if __name__ == "__main__":
    main()
