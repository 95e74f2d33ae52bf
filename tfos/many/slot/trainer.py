"""The process that trains a slot's items, one after the other.

Covers: imports ahead of the first item, the call of the user's function, its value and metrics.
Does not: limit its time or count attempts (tfos.many.slot.process), talk to the driver.
Runs in: a child of the slot's process; the function runs in the main thread.
"""

from __future__ import annotations

import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from numbers import Real
from typing import Any

import cloudpickle
import msgspec

from tfos.errors import LinkError, NotPicklable
from tfos.many.messages import Returned, TrainerReady, TrainingRaised, TrainItem
from tfos.many.slot.specs import TrainerSpec
from tfos.node import whole_files
from tfos.node.child_link import ChildLink
from tfos.node.child_log import start_log
from tfos.node.failure import sendable, text_of, user_traceback
from tfos.node.process_exit import forks_end, leave
from tfos.spark.pickling import pickle_value
from tfos.worker import spark_files
from tfos.worker.import_ahead import collector_paused, import_ahead, will_import

_MAX_ERROR_CHARS = 32_000
_MAX_METRICS = 1000
_MAX_NAME_CHARS = 200
"""Metrics travel in messages of at most 4 MiB; a value of any size goes to a file."""
_OURS = frozenset({__file__})


def metrics_of(value: Any) -> dict[str, float]:
    """Return the metrics in a function's return value.

    Args:
        value: a number is `value`; a dict gives each number, and the last of each list of numbers,
            as in Keras' `history.history`. Anything else has none. Only the first 1,000 numbers
            count, with names of up to 200 characters.
    """
    if not isinstance(value, dict):
        number = _number(value)
        return {} if number is None else {"value": number}
    found: dict[str, float] = {}
    for name, part in value.items():
        if len(found) == _MAX_METRICS:
            break
        number = _number(part[-1] if isinstance(part, list | tuple) and part else part)
        if isinstance(name, str) and len(name) <= _MAX_NAME_CHARS and number is not None:
            found[sendable(name)] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    is_scalar = getattr(value, "shape", None) == () and _is_numeric(value)
    if not isinstance(value, Real) and not is_scalar:  # numpy's scalars are Real
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_numeric(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", "") in "iuf"


class Trainer:
    """One process's trainings.

    Args:
        spec: the process's document.
        link: link to the slot.
    """

    def __init__(self, spec: TrainerSpec, link: ChildLink[TrainItem]) -> None:
        self._spec = spec
        self._link = link

    def run(self) -> int:
        """Train until the slot closes the link; returns the exit code."""
        spark_files.announce(self._spec.spark_files)
        sys.argv = [self._spec.title]
        try:
            with collector_paused():
                function = cloudpickle.loads(self._spec.function)
            import_ahead(will_import(function))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must read it
            self._link.send(TrainingRaised(0.0, _text_of(error)))
            return 1
        self._link.send(TrainerReady())
        try:
            while (order := self._link.receive()) is not None:
                self._link.send(self._train(function, order))
        except LinkError:
            return 1
        return 0

    def _train(self, function: Callable[..., Any], order: TrainItem) -> Returned | TrainingRaised:
        started_s = time.monotonic()
        try:
            data = whole_files.read_at(self._spec.items_fd, order.length, order.offset)
            item = pickle.loads(data)  # noqa: S301 - from Spark, of the user
            value = self._call(function, item)
            seconds = time.monotonic() - started_s
            return _delivered(value, seconds, order.values_fd)
        except SystemExit as end:
            text = f"it called sys.exit({end.code!r}); let the function return a value in its place"
            return TrainingRaised(time.monotonic() - started_s, f"{_text_of(end)}\n{text}")
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            return TrainingRaised(time.monotonic() - started_s, _text_of(error))

    def _call(self, function: Callable[..., Any], item: Any) -> Any:
        arguments: tuple[Any, ...] = (item,)
        if self._spec.is_grouped:
            import pyarrow

            key, stream = item
            arguments = (key, pyarrow.ipc.open_stream(stream).read_all())
        with forks_end():
            return function(*arguments)


def _delivered(value: Any, seconds: float, values_fd: int) -> Returned | TrainingRaised:
    """Write a pickled value at the start of the file; return how the training ended."""
    try:
        pickled = pickle_value(value, "it")
    except NotPicklable as error:
        return TrainingRaised(seconds, text_of(error), is_unpicklable=True)
    whole_files.replace(values_fd, pickled)
    return Returned(seconds, metrics_of(value), len(pickled))


def _text_of(error: BaseException) -> str:
    try:
        text = user_traceback(error, _OURS)
    except Exception:  # noqa: BLE001 - a traceback that cannot be formatted
        text = "".join(traceback.format_exception_only(error))
    return text.strip()[-_MAX_ERROR_CHARS:]


def main(body: bytes) -> None:
    """Run one trainer, and end the process.

    Args:
        body: a TrainerSpec, msgpack.
    """
    start_log()
    spec = msgspec.msgpack.decode(body, type=TrainerSpec)
    link: ChildLink[TrainItem] = ChildLink(socket.socket(fileno=spec.link_fd), TrainItem)
    leave(Trainer(spec, link).run())
