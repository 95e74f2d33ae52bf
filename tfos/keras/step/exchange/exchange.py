"""Exchange: sends what steps have computed, and sets the variables to what the servers answer.

Covers: pushes in flight and the order in which their answers become the variables' values; pull,
assign; how many updates and rows of this worker the servers have.
Does not: compute (tfos.keras.step.gradients), retry or reconnect (PSClient), decide whether a step
is sent and how many pushes may be in flight (tfos.keras.step.trainer), look for values that the
program gave (given_values).
Threads: the thread that trains; no locks. The pipeline's thread runs `_send` alone.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any

from tfos.keras.step import optimizers
from tfos.keras.step.exchange.averages import Averages
from tfos.keras.step.exchange.outgoing_push import OutgoingPush
from tfos.keras.step.exchange.pipeline import InFlight
from tfos.keras.step.exchange.replica import Received, Replica
from tfos.keras.step.step_clock import StepClock
from tfos.keras.step.table_specs import naming_layers
from tfos.keras.step.variables import Variables


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """A push that the servers have acknowledged, and the values that came back."""

    received: Received
    clock: int
    rows: int


class ParameterExchange:
    """Keeps the variables of an attached model equal to the servers' parameters.

    Args:
        client: the process's PSClient, attached.
        model: the model.
        variables: the model's variables, in the servers' groups.
        times: clock that counts the waits for pulls.

    Attributes:
        steps: number of this worker's pushes that the servers have acknowledged.
        rows: number of rows in those, and in batches that are only accumulated so far.
        clock: number of the servers' updates that the local variables contain.
        replica: the variables' local copy of the servers' values.
        has_pulled: whether no step has begun since the last pull.
    """

    def __init__(self, client: Any, model: Any, variables: Variables, times: StepClock) -> None:
        self._client = client
        self._variables = variables
        self._times = times
        self.replica = Replica(variables.groups, model.optimizer)
        self.has_pulled = False
        keeps_averages = optimizers.keeps_averages(model.optimizer)
        self._averages = Averages(model, variables.groups) if keeps_averages else None
        self._in_flight: InFlight[AppliedPush] = InFlight(lambda: client.longest_push_s)
        self._rows_waiting = self._batches_waiting = 0
        self._batches_of_pushes: deque[int] = deque()
        """Batches of each push, ended ones included: `_batches_in_flight` drops those."""
        self.steps = 0
        self.rows = 0
        self.clock = 0

    @property
    def keeps_averages(self) -> bool:
        """Whether the servers keep moving averages, which each pull fetches."""
        return self._averages is not None

    @property
    def has_trained_rows(self) -> bool:
        """Whether this worker has trained rows of tables, which no variable of the model holds."""
        return self.steps > 0 and bool(self._variables.trained_embeddings)

    @property
    def num_in_flight(self) -> int:
        """Number of pushes without an answer."""
        return len(self._in_flight)

    @property
    def batches_under_way(self) -> int:
        """Number of last batches, from the first one that no acknowledged push contains."""
        return sum(self._batches_in_flight()) + self._batches_waiting

    def push(self, push: OutgoingPush, *, most_in_flight: int) -> None:
        """Send a step's push, and adopt the answer of the push whose turn it is.

        Args:
            push: push of the newest step.
            most_in_flight: most pushes that may lack an answer when this returns.
        """
        rows, self._rows_waiting = push.rows + self._rows_waiting, 0
        self._batches_in_flight().append(self._batches_waiting + 1)
        self._batches_waiting = 0
        received = self.replica.take()
        lag = len(self._in_flight)
        send = functools.partial(self._send, push, received, rows=rows, lag=lag)
        if not most_in_flight:
            applied = send()
            self.replica.adopt(applied.received, applied.clock)
            self._give_back(applied)
            return
        if push.ahead is not None:
            push.ahead.is_asked_for = True
        self._in_flight.submit(send)
        if len(self._in_flight) <= most_in_flight:
            self.replica.count(self.clock + len(self._in_flight))
            return
        self.adopt_oldest()

    def push_nothing(self) -> None:
        """Take part in the others' step without a gradient; for modes with waits."""
        received = self.replica.take()
        self.clock = self._client.push_null(into=received.arrays).clock
        self.replica.adopt(received, self.clock)
        self.replica.give(received)

    def accumulate(self, rows: int) -> None:
        """Count the rows of a batch whose gradient a later push contains."""
        self._rows_waiting += rows
        self._batches_waiting += 1
        self.rows += rows

    def skip(self) -> None:
        """Count a batch that no push contains: those before it may be in flight."""
        if self.batches_under_way:
            self._batches_waiting += 1

    def adopt_oldest(self) -> None:
        """Wait for the oldest push in flight and take its values."""
        applied = self._in_flight.oldest()
        # The layers' own statistics have moved on since: the next pull assigns them.
        count = applied.clock + len(self._in_flight)
        self.replica.adopt(applied.received, count, statistics=False)
        self._give_back(applied)

    def raise_failed(self) -> None:
        """Raise the error of a push that has already failed, without waiting for any."""
        self._in_flight.raise_failed()

    def drain(self) -> None:
        """Wait until the servers have acknowledged every push; the variables stay as they are."""
        while self._in_flight:
            self._give_back(self._in_flight.oldest())

    def forget(self) -> None:
        """Stop waiting for pushes; the pipeline's thread ends after those that it has."""
        self._in_flight.close()

    def pull(self, timeout_s: float | None = None, *, keeps_statistics: bool = False) -> None:
        """Take the servers' newest values, and their averages if they keep any; drain first.

        Args:
            timeout_s: seconds to wait for them; None: the client's timeout.
            keeps_statistics: whether the layers' statistics stay where they contain batches that
                are only accumulated so far: the servers have them with the next push.
        """
        received = self.replica.take()
        with self._times.on("pull"):
            self.clock = self._client.pull(received.arrays, timeout_s=timeout_s).clock
        statistics = not (keeps_statistics and self._rows_waiting)
        self.replica.adopt(received, self.clock, statistics=statistics)
        self.replica.hold_copies()
        self.has_pulled = True
        self.replica.give(received)
        if self._averages is not None:
            self._averages.pull(self._client, timeout_s)

    def begin_step(self) -> None:
        """Note that a step is about to change the variables that the last pull has set."""
        self.has_pulled = False
        self.replica.forget_statistics()

    def assign(self) -> None:
        """Put the model's current values on the servers, after all pushes."""
        self.drain()
        self._client.assign({group.name: group.values() for group in self._variables.groups})

    def _send(self, push: OutgoingPush, received: Received, *, rows: int, lag: int) -> AppliedPush:
        with naming_layers(self._variables.embeddings):
            ack = self._client.push_pull(
                push.grads,
                received.arrays,
                hyper=push.hyper,
                rows=rows,
                lag=lag,
                metadata=push.metadata,
                table_grads=push.table_grads or None,
                next_rows=None if push.ahead is None else push.ahead.into(),
            )
        if push.ahead is not None:
            push.ahead.is_filled = True
        return AppliedPush(received, ack.clock, push.rows)

    def _batches_in_flight(self) -> deque[int]:
        """Return the number of batches of each push in flight, the oldest first."""
        while len(self._batches_of_pushes) > len(self._in_flight):
            self._batches_of_pushes.popleft()
        return self._batches_of_pushes

    def _give_back(self, applied: AppliedPush) -> None:
        self.replica.give(applied.received)
        self.clock = applied.clock
        self.steps += 1
        self.rows += applied.rows
