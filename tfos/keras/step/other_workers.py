"""Other workers of a training: whether they wait for this one, and the exchange of small values.

Covers: membership in the barrier, from the attachment on; rendezvous, also before it.
The error of a step that waited too long for theirs.
Does not: decide when this worker leaves or joins (tfos.keras.fit), agree on anything itself.
Threads: the thread that runs the model's `fit`.
"""

from __future__ import annotations

import enum
from typing import Any

from tfos.errors import RequestTimeout
from tfos.keras.protocols import WorkerContext

RENDEZVOUS_TIMEOUT_S = 86_400.0
"""Seconds for the slowest worker's epoch. A worker that dies or finishes is not waited for."""


def waited_too_long(error: RequestTimeout, timeout_s: float) -> RequestTimeout:
    """Return the error of a step that has waited for another worker's, with the limit to raise.

    Args:
        error: what the servers said.
        timeout_s: the client's.
    """
    names = error.details["missing"]
    return RequestTimeout(
        f"this worker's step has waited for that of worker {names} for {timeout_s:g} s: a step "
        "there, or the source of its rows, takes longer. Raise the limit on all workers, after "
        "ctx.distribute(model): ctx.ps_client().timeout_s = 7200. If the worker hangs, "
        "cluster.status() shows where its time goes",
        error.details,
    )


class Membership(enum.Enum):
    """Whether the others' steps wait for this worker's."""

    NONE = enum.auto()
    """The others never wait: this worker is not attached, or no step waits for any."""
    MEMBER = enum.auto()
    """Yes."""
    LEFT = enum.auto()
    """The others do not wait until it joins again."""


class OtherWorkers:
    """The workers that train the same model.

    Args:
        client: the process's PSClient.
        ctx: the worker's context.
    """

    def __init__(self, client: Any, ctx: WorkerContext) -> None:
        self._client = client
        self._ctx = ctx
        self._membership = Membership.NONE

    def attached(self) -> None:
        """Note that the servers wait for this worker's pushes from now on."""
        self._membership = Membership.MEMBER

    def join(self) -> None:
        """Make the others' steps wait for this worker again."""
        if self._membership is Membership.LEFT:
            self._client.join()
            self._membership = Membership.MEMBER

    def leave(self) -> None:
        """Let the others go on without this worker until it trains again."""
        if self._membership is Membership.MEMBER:
            # First: an interrupt may follow the call, and joining twice does no harm.
            self._membership = Membership.LEFT
            self._client.leave()

    def rendezvous(self, key: str, value: bytes) -> dict[int, bytes]:
        """Exchange small values with all workers that are not done; return them by rank.

        Args:
            key: name of the rendezvous.
            value: value of at most 1 MiB.
        """
        if self._ctx.num_workers == 1:
            return {self._ctx.worker_rank: value}
        answers = self._client.rendezvous(key, value, timeout_s=RENDEZVOUS_TIMEOUT_S)
        return dict(answers)
