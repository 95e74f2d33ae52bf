"""Exchange: sends what steps have computed, and sets the variables to what the servers answer.

Covers: pushes in flight and the order in which their answers become the variables' values; pull,
assign; how many updates and rows of this worker the servers have.
Does not: compute (tfos.keras.step.gradients), retry or reconnect (PSClient), decide whether a step
is sent and how many pushes may be in flight (tfos.keras.step.trainer).
Threads: the thread that trains; no locks. The pipeline's thread runs `_send` alone.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from tfos.errors import UnsupportedModel
from tfos.keras.step import optimizers
from tfos.keras.step.exchange.averages import Averages
from tfos.keras.step.exchange.held_weights import HeldWeights
from tfos.keras.step.exchange.outgoing_push import OutgoingPush
from tfos.keras.step.exchange.pipeline import InFlight
from tfos.keras.step.exchange.program_writes import ProgramWrites
from tfos.keras.step.exchange.replica import Received, Replica
from tfos.keras.step.step_clock import StepClock
from tfos.keras.step.table_specs import naming_layers
from tfos.keras.step.variables import MOVING_COPY, Variables

logger = logging.getLogger(__name__)


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
        since: call that bound the model to its servers, for messages.
        is_mixed: whether the servers mix the statistics of several workers as they come.

    Attributes:
        steps: number of this worker's pushes that the servers have acknowledged.
        rows: number of rows in those, and in batches that are only accumulated so far.
        clock: number of the servers' updates that the local variables contain.
        writes: whether the program has assigned trained or frozen variables.
    """

    def __init__(
        self,
        client: Any,
        model: Any,
        variables: Variables,
        times: StepClock,
        *,
        since: str,
        is_mixed: bool = False,
    ) -> None:
        self._client = client
        self._since = since
        self._variables = variables
        self._times = times
        self._replica = Replica(variables.groups, model.optimizer)
        self.writes = ProgramWrites([*variables.trained, *variables.held])
        self._tells_mixed = is_mixed
        """Whether a mixed statistic is still to be told."""
        self._has_pulled = False
        """Whether no step has begun since the last pull."""
        keeps_averages = optimizers.keeps_averages(model.optimizer)
        self._averages = Averages(model, variables.groups) if keeps_averages else None
        self._in_flight: InFlight[AppliedPush] = InFlight(lambda: client.longest_push_s)
        self._rows_waiting = self._batches_waiting = 0
        self._batches_of_pushes: deque[int] = deque()
        """Batches of each push, ended ones included: `_batches_in_flight` drops those."""
        self._frozen = HeldWeights(variables.frozen)
        self.steps = 0
        self.rows = 0
        self.clock = 0

    @property
    def keeps_averages(self) -> bool:
        """Whether the servers keep moving averages, which each pull fetches."""
        return self._averages is not None

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
        received = self._replica.take()
        lag = len(self._in_flight)
        send = functools.partial(self._send, push, received, rows=rows, lag=lag)
        if not most_in_flight:
            applied = send()
            self._replica.adopt(applied.received, applied.clock)
            self._give_back(applied)
            return
        if push.ahead is not None:
            push.ahead.is_asked_for = True
        self._in_flight.submit(send)
        if len(self._in_flight) <= most_in_flight:
            self._replica.count(self.clock + len(self._in_flight))
            return
        self.adopt_oldest()

    def push_nothing(self) -> None:
        """Take part in the others' step without a gradient; for modes with waits."""
        received = self._replica.take()
        self.clock = self._client.push_null(into=received.arrays).clock
        self._replica.adopt(received, self.clock)
        self._replica.give(received)

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
        self._replica.adopt(applied.received, count, statistics=False)
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
        received = self._replica.take()
        with self._times.on("pull"):
            self.clock = self._client.pull(received.arrays, timeout_s=timeout_s).clock
        statistics = not (keeps_statistics and self._rows_waiting)
        self._replica.adopt(received, self.clock, statistics=statistics)
        self._replica.hold_copies()
        self._has_pulled = True
        self._replica.give(received)
        if self._averages is not None:
            self._averages.pull(self._client, timeout_s)

    def check_unchanged(self) -> None:
        """Refuse values that the program gave to single variables: the next answer overwrites them.

        Averages are exempt: callbacks that swap them with the weights round them.

        Raises:
            UnsupportedModel: names a variable.
        """
        if path := self._frozen.changed():
            raise UnsupportedModel(
                f"{path!r}, which is not trained, was changed after {self._since}. "
                "The parameter servers, their checkpoints and restarted workers keep the previous "
                "values. Call adapt, load_weights, set_weights or assign before "
                f"{self._since}. {MOVING_COPY}"
            )
        if path := self.changed_here():
            raise UnsupportedModel(
                f"{path!r} was changed after {self._since}, but only in the model; the next answer "
                "of the parameter servers would overwrite it. load_weights or set_weights of a "
                "layer or of a nested model, assign, and training another model that shares the "
                f"layer do not reach the servers. Set weights before {self._since}, or call "
                "set_weights or load_weights of the whole model (with tables, only before the "
                "first step). If another model was trained, rebuild and compile this one: "
                "keras.Model(model.inputs, model.outputs)"
            )

    @property
    def knows_values(self) -> bool:
        """Whether `changed_here` can compare; not while the buffer receives other values."""
        return self._replica.knows_values

    def changed_here(self) -> str:
        """Return the path of a variable changed since its values came; empty: none is known."""
        return "" if self.keeps_averages else self._replica.changed_here()

    def set_statistic(self) -> str:
        """Return the path of a statistic that is not what was received; empty: none is known.

        A layer changes its own in a step, but also when the program calls the model to train.
        """
        return self._replica.set_statistic()

    def begin_step(self) -> None:
        """Warn once of a statistic that the program has set, if other workers' are mixed in."""
        self._tell_mixed()
        self._replica.forget_statistics()  # the step changes them

    def _tell_mixed(self) -> None:
        has_pulled, self._has_pulled = self._has_pulled, False
        if not (self._tells_mixed and has_pulled and (path := self.set_statistic())):
            return
        self._tells_mixed = False
        logger.warning(
            "%r, which is not trained, was changed between two steps. The servers keep a running "
            "mean of what the workers have in such weights, so this value is mixed with the "
            "previous ones and may never be reached. For a value that callbacks set on every "
            "worker (an annealed weight of a loss), use a tf.Variable, which stays in its process, "
            'or consistency="sync"',
            path,
        )

    def forget_values(self) -> None:
        """Allow the variables to have the program's own values until the servers' next answer."""
        self._replica.forget_values()

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
        self._replica.give(applied.received)
        self.clock = applied.clock
        self.steps += 1
        self.rows += applied.rows
