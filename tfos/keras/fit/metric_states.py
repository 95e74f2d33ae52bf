"""Metrics over all workers: an epoch's values from the workers' metric variables added up.

AUC over all rows is no mean of the workers' AUCs. It follows from its variables, counts of rows,
and those of all rows are the sum over the workers. Keras's own `result` makes the value of the sum.

Covers: reading a model's metrics and variables, which of them may be added, adding, the values.
Does not: exchange anything, average other logs (tfos.keras.fit.epoch_agreement).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from keras.src.trainers.compile_utils import CompileMetrics

from ps.protocol.messages import MAX_OPEN_BYTES

MAX_STATE_BYTES = 256 << 10
"""Of one worker's variables in an epoch, which every worker receives; AUC has 3,200."""
MAX_STATES_BYTES = MAX_OPEN_BYTES // 2
"""Of all workers' variables: the other half of what a rendezvous may hold is for their logs."""
ADDITIVE = "state_is_additive"
"""Attribute by which a user's metric says that its variables may be added."""

_KERAS = "keras.src.metrics."
VALIDATION = "val_"


class MetricState(msgspec.Struct, frozen=True):
    """One metric of one worker."""

    name: str
    """In the logs; the first of a metric with several values."""
    variables: tuple[bytes, ...]
    """Bytes of each variable, in Keras's order."""
    is_shared: bool = False
    """The rows are the same on all workers: the variables are to be averaged."""


class MetricStates(msgspec.Struct, frozen=True):
    """All metrics of one worker in one epoch."""

    states: tuple[MetricState, ...] = ()
    others: dict[str, str] = {}
    """Why metrics are in no state, by name."""
    known: tuple[str, ...] = ()
    """Metrics that this worker can tell the value of, given their states."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of this worker, as it was when it was read."""

    metric: Any
    values: Mapping[str, Any]
    """By name in the logs, without `val_`."""
    variables: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return next(iter(self.values))


def are_built(model: Any) -> bool:
    """Whether the metrics have values. Keras builds the compiled ones with the first batch."""
    return all(not isinstance(each, CompileMetrics) or each.built for each in model.metrics)


def measure(model: Any) -> list[Measured]:
    """Read the model's metrics as they are now; none before they are built."""
    if not are_built(model):
        return []
    return [
        Measured(metric, values, tuple(each.numpy().tobytes() for each in metric.variables))
        for metric, values in _named(model)
        if values
    ]


def measured_rows(model: Any) -> int:
    """Return the rows that Keras' own loss was measured on; 1: a step of the user's measures none.

    Args:
        model: compiled.
    """
    tracker = model._loss_tracker
    is_used = any(each is tracker for each in model.metrics)
    return max(1, int(tracker.count)) if is_used else 1


def _named(model: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each metric with its present values, by their names in the logs."""
    for metric in model.metrics:
        if not isinstance(metric, CompileMetrics):
            yield metric, _flat(metric.name, metric.result())
        else:
            results = metric.result()
            if len(results) == len(metric.metrics):  # else two have one name, and Keras shows one
                for each, (name, value) in zip(metric.metrics, results.items(), strict=True):
                    yield each, _flat(name, value)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: each for inner, part in value.items() for key, each in _flat(inner, part).items()}


class EpochMetrics:
    """This worker's metrics of one epoch, and those of all workers.

    Args:
        training: as they were at the end of training.
        validation: at the end of validation; empty without.
        is_shared: all workers validate the same rows.
        num_workers: that report theirs.
    """

    def __init__(
        self,
        training: Sequence[Measured],
        validation: Sequence[Measured],
        *,
        is_shared: bool,
        num_workers: int,
    ) -> None:
        self._max_bytes = min(MAX_STATE_BYTES, MAX_STATES_BYTES // num_workers)
        self._known = {each.name: each for each in (*training, *validation)}
        self._parts = (("", training, False), (VALIDATION, validation, is_shared))

    def states(self, logs: Mapping[str, Any]) -> MetricStates:
        """Return what the other workers need.

        Args:
            logs: of the epoch. A metric whose value is not in there is left out: a `train_step` of
                the user's returned something else by its name.
        """
        states: list[MetricState] = []
        others: dict[str, str] = {}
        room = self._max_bytes
        for prefix, measured, is_shared in self._parts:
            for each in measured:
                name = prefix + each.name
                if not all(_is_logged(v, logs.get(prefix + k)) for k, v in each.values.items()):
                    continue
                num_bytes = sum(map(len, each.variables))
                if not is_additive(each.metric):
                    others[name] = _unknown(each.metric)
                elif num_bytes > room:
                    others[name] = (
                        f"its variables, {num_bytes} bytes, and those of the metrics before are "
                        f"more than {self._max_bytes} bytes"
                    )
                else:
                    room -= num_bytes
                    states.append(MetricState(name, each.variables, is_shared))
        return MetricStates(tuple(states), others, tuple(self._known))

    def values(self, reports: Iterable[MetricStates]) -> dict[str, Any]:
        """Return the values over all workers that this worker can tell, by name in the logs.

        Args:
            reports: of all workers, this one's too.
        """
        found: dict[str, Any] = {}
        for name, states in _exact(reports).items():
            prefix, known = self._find(name)
            result = None if known is None else _combined(known.metric, states)
            if known is not None and result is not None:
                values = _flat(known.name, result)
                found |= {prefix + key: _plain(value) for key, value in values.items()}
        return found

    def unshared(self, reports: Iterable[MetricStates]) -> dict[str, tuple[Any, Any]]:
        """Return counts of validation that may be of other rows on each worker: mean and sum.

        By name in the logs; none if all workers have measured the same. On parameters of different
        moments they measure other values of the same rows: those counts are among them.

        Args:
            reports: of all workers, this one's too.
        """
        shared: list[tuple[str, Measured, list[np.ndarray]]] = []
        for name, states in _exact(reports).items():
            prefix, known = self._find(name)
            workers = None if known is None else _by_worker(known.metric, states)
            if known and workers is not None and all(state.is_shared for state in states):
                shared.append((prefix, known, workers))
        variables = (variable for *_, workers in shared for variable in workers)
        if all(np.allclose(each, each[0], rtol=1e-5, atol=0, equal_nan=True) for each in variables):
            return {}
        found: dict[str, tuple[Any, Any]] = {}
        for prefix, known, workers in shared:
            means, sums = (
                _flat(known.name, _result(known.metric, [over(each, axis=0) for each in workers]))
                for over in (np.mean, np.sum)
            )
            for key in sums:
                mean, total = _plain(means[key]), _plain(sums[key])
                if not np.allclose(mean, total, rtol=1e-3, equal_nan=True):
                    found[prefix + key] = mean, total
        return found

    def _find(self, name: str) -> tuple[str, Measured | None]:
        if name in self._known or not name.startswith(VALIDATION):
            return "", self._known.get(name)
        return VALIDATION, self._known.get(name.removeprefix(VALIDATION))


def is_additive(metric: Any) -> bool:
    """Whether the sum of two workers' variables is the state of both workers' rows.

    True for what Keras's own `update_state` writes. Another metric says so itself.
    """
    said = getattr(metric, ADDITIVE, None)
    if said is not None:
        return bool(said)
    return str(type(metric).update_state.__module__).startswith(_KERAS)


def all_know(reports: Iterable[MetricStates]) -> bool:
    """Whether every worker can tell all values. One that never had a batch has no metrics yet."""
    reports = list(reports)
    needed = set(_exact(reports))
    return all(
        name in report.known or name.removeprefix(VALIDATION) in report.known
        for report in reports
        for name in needed
    )


def inexact(reports: Iterable[MetricStates]) -> dict[str, str]:
    """Return why metrics cannot be added, by name in the logs."""
    return {name: reason for report in reports for name, reason in report.others.items()}


def _unknown(metric: Any) -> str:
    kind = type(metric)
    return (
        f"whether the variables of {kind.__module__}.{kind.__qualname__} of two workers may be "
        f"added is unknown; if so, set {ADDITIVE} = True in the class"
    )


def _exact(reports: Iterable[MetricStates]) -> dict[str, list[MetricState]]:
    reports = list(reports)
    others = inexact(reports)
    found: dict[str, list[MetricState]] = {}
    for report in reports:
        for state in report.states:
            if state.name not in others:
                found.setdefault(state.name, []).append(state)
    return found


def _combined(metric: Any, states: Sequence[MetricState]) -> Any:
    """Return the metric's value over all workers; None if a worker's variables have other sizes."""
    workers = _by_worker(metric, states)
    if workers is None:
        return None
    over = np.mean if states[0].is_shared else np.sum
    return _result(metric, [over(each, axis=0) for each in workers])


def _by_worker(metric: Any, states: Sequence[MetricState]) -> list[np.ndarray] | None:
    """Return each variable of all workers, [worker, ...]; None if a worker's have other sizes."""
    found = []
    for at, variable in enumerate(metric.variables):
        own = variable.numpy()
        parts = [state.variables[at : at + 1] for state in states]
        if any(len(part) != 1 or len(part[0]) != own.nbytes for part in parts):
            return None
        arrays = [np.frombuffer(part[0], own.dtype).astype(np.float64) for part in parts]
        found.append(np.stack(arrays).reshape(len(states), *own.shape))
    return found


def _result(metric: Any, variables: Sequence[np.ndarray]) -> Any:
    import tensorflow as tf

    own = zip(variables, metric.variables, strict=True)
    return metric.stateless_result(
        [tf.constant(value.astype(variable.numpy().dtype)) for value, variable in own]
    )


def _is_logged(value: Any, logged: Any) -> bool:
    try:
        left, right = (np.asarray(each).astype(np.float64) for each in (value, logged))
    except (TypeError, ValueError):  # a log may be anything, or is missing
        return False
    return left.shape == right.shape and np.allclose(left, right, rtol=1e-6, equal_nan=True)


def _plain(value: Any) -> Any:
    """Return a number, or nested lists of numbers, which msgpack can carry."""
    return np.asarray(value).astype(np.float64).tolist()
