"""Metrics over all workers: an epoch's values from the workers' metric variables added up.

AUC over all rows is not the mean of the workers' AUCs. It follows from its variables, which count
rows, and the sum over the workers counts all rows. Keras's own `result` computes the value.

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
"""Limit for one worker's variables in an epoch, which every worker receives; AUC has 3,200."""
MAX_STATES_BYTES = MAX_OPEN_BYTES // 2
"""Limit for all workers' variables; the other half of a rendezvous is for their logs."""
ADDITIVE = "state_is_additive"
"""Attribute by which a user's metric declares that its variables may be added."""

_KERAS = "keras.src.metrics."
VALIDATION = "val_"


class MetricState(msgspec.Struct, frozen=True):
    """One metric of one worker."""

    name: str
    """Name in the logs; the first one of a metric with several values."""
    variables: tuple[bytes, ...]
    """Bytes of each variable, in Keras's order."""
    is_shared: bool = False
    """Whether the rows are the same on all workers, so that the variables are averaged."""


class MetricStates(msgspec.Struct, frozen=True):
    """All metrics of one worker in one epoch."""

    states: tuple[MetricState, ...] = ()
    others: dict[str, str] = {}
    """Reasons why metrics are in no state, by name."""
    known: tuple[str, ...] = ()
    """Metrics whose value this worker can compute, given their states."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of this worker, as it was when it was read."""

    metric: Any
    values: Mapping[str, Any]
    """Values by name in the logs, without `val_`."""
    variables: tuple[bytes, ...]

    @property
    def name(self) -> str:
        """The first name."""
        return next(iter(self.values))


def are_built(model: Any) -> bool:
    """Return whether the metrics have values. The first batch builds the compiled ones."""
    return all(not isinstance(each, CompileMetrics) or each.built for each in model.metrics)


def measure(model: Any) -> list[Measured]:
    """Return the model's current metrics; none before they are built."""
    if not are_built(model):
        return []
    return [
        Measured(metric, values, tuple(each.numpy().tobytes() for each in metric.variables))
        for metric, values in _named(model)
        if values
    ]


def measured_rows(model: Any) -> int:
    """Return the rows that Keras' own loss was measured on; 1: the user's own step measures none.

    Args:
        model: compiled.
    """
    tracker = model._loss_tracker
    is_used = any(each is tracker for each in model.metrics)
    return max(1, int(tracker.count)) if is_used else 1


def _named(model: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each metric with its current values, by their names in the logs."""
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
        training: metrics at the end of training.
        validation: metrics at the end of validation; empty without it.
        is_shared: whether all workers validate the same rows.
        num_workers: number of workers that report theirs.
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
            logs: logs of the epoch. A metric whose value they lack is left out: the user's own
                `train_step` returned something else under its name.
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
                        f"its variables, {num_bytes} bytes, and those of earlier metrics exceed "
                        f"{self._max_bytes} bytes"
                    )
                else:
                    room -= num_bytes
                    states.append(MetricState(name, each.variables, is_shared))
        return MetricStates(tuple(states), others, tuple(self._known))

    def values(self, reports: Iterable[MetricStates]) -> dict[str, Any]:
        """Return the values over all workers that this one can compute, by name in the logs.

        Args:
            reports: reports of all workers, this one's too.
        """
        found: dict[str, Any] = {}
        for name, states in _exact(reports).items():
            prefix, known = self._find(name)
            workers = None if known is None else _by_worker(known.metric, states)
            if known and workers is not None:
                over = np.mean if states[0].is_shared else np.sum
                values = _values(known, [over(each, axis=0) for each in workers])
                found |= {prefix + key: value for key, value in values.items()}
        return found

    def unshared(self, reports: Iterable[MetricStates]) -> dict[str, tuple[Any, Any]]:
        """Return mean and sum of validation counts that may cover different rows on each worker.

        They are by name in the logs; none if all workers have measured the same. Workers whose
        parameters differ in age measure different values on the same rows; these are included.

        Args:
            reports: reports of all workers, this one's too.
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
                _values(known, [over(each, axis=0) for each in workers])
                for over in (np.mean, np.sum)
            )
            for key, total in sums.items():
                mean = means.get(key, np.nan)
                if not np.allclose(mean, total, rtol=1e-3, equal_nan=True):
                    found[prefix + key] = mean, total
        return found

    def _find(self, name: str) -> tuple[str, Measured | None]:
        if name in self._known or not name.startswith(VALIDATION):
            return "", self._known.get(name)
        return VALIDATION, self._known.get(name.removeprefix(VALIDATION))


def is_additive(metric: Any) -> bool:
    """Return whether the sum of two workers' variables is the state of both workers' rows.

    It is, if Keras's own `update_state` writes them. Other metrics declare it themselves.
    """
    said = getattr(metric, ADDITIVE, None)
    if said is not None:
        return bool(said)
    return str(type(metric).update_state.__module__).startswith(_KERAS)


def all_know(reports: Iterable[MetricStates]) -> bool:
    """Whether every worker can compute all values. Without a batch, a worker has no metrics yet."""
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


def uncommon(known: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
    """Return the metrics, by rank, that not all of these workers have under this name.

    Args:
        known: names by rank, without workers that had no batch: they lack some.
    """
    names = {rank: set(each) for rank, each in known.items()}
    common = set.intersection(*names.values()) if names else set()
    return {rank: sorted(each - common) for rank, each in names.items() if each - common}


def _unknown(metric: Any) -> str:
    kind = type(metric)
    return (
        f"it is unknown whether two workers' variables of {kind.__module__}.{kind.__qualname__} "
        f"may be added; if they may, set {ADDITIVE} = True in the class"
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


def _by_worker(metric: Any, states: Sequence[MetricState]) -> list[np.ndarray] | None:
    """Return each variable of all workers, [worker, ...]; None if their sizes differ."""
    found = []
    for at, variable in enumerate(metric.variables):
        own = variable.numpy()
        parts = [state.variables[at : at + 1] for state in states]
        if any(len(part) != 1 or len(part[0]) != own.nbytes for part in parts):
            return None
        arrays = [np.frombuffer(part[0], own.dtype).astype(np.float64) for part in parts]
        found.append(np.stack(arrays).reshape(len(states), *own.shape))
    return found


def _values(measured: Measured, variables: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the metric's values with these variables, by name in the logs.

    The variables are assigned: a `result` that is compiled reads the metric's own, also in Keras'
    StatelessScope. A result may be a variable, so it is read before that has its own value again.
    """
    metric = measured.metric
    own = [variable.numpy() for variable in metric.variables]
    try:
        _assign(metric, variables)
        values = _flat(measured.name, metric.result())
        return {key: _plain(value) for key, value in values.items() if value is not None}
    finally:
        _assign(metric, own)


def _assign(metric: Any, values: Sequence[np.ndarray]) -> None:
    for variable, value in zip(metric.variables, values, strict=True):
        variable.assign(value.astype(variable.numpy().dtype))


def _is_logged(value: Any, logged: Any) -> bool:
    try:
        # Keras logs [x] as x where numpy, before 2.4, converts it.
        left, right = (np.asarray(each).astype(np.float64).ravel() for each in (value, logged))
    except (TypeError, ValueError):  # a log may be anything, or is missing
        return False
    return left.shape == right.shape and np.allclose(left, right, rtol=1e-6, equal_nan=True)


def _plain(value: Any) -> Any:
    """Return a number, or nested lists of numbers, which msgpack can encode."""
    return np.asarray(value).astype(np.float64).tolist()
