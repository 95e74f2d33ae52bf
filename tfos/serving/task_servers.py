"""Servers of a Spark task: how it reaches them, with the credentials of feed tasks.

Covers: connecting.      Does not: read or load rows (scan_task, load_task).
Runs in: Python workers of Spark.      Threads: the task's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ps.client.client import PSClient
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint


@dataclass(frozen=True)
class TaskServers:
    """The servers of a running cluster."""

    endpoints: Sequence[Endpoint]
    """Of all servers, in the order of ranks."""
    credentials: Callable[[], Credentials]
    """Returns those of the cluster; called in the task."""
    num_workers: int

    @contextmanager
    def connected(self) -> Iterator[PSClient]:
        """Give a client that knows the tables; closed after the block."""
        identity = Identity(Role.FEEDER, 0)
        with PSClient(
            self.endpoints, self.credentials(), identity, num_workers=self.num_workers
        ) as client:
            client.attach()
            yield client
