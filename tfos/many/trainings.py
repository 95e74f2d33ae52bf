"""The handle of a `map_train`: its table while it fills, its values, its end.

Covers: rows as they end, a Spark DataFrame, values, waiting, cancelling.
Does not: run anything (tfos.many.run).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from feeding.filesystem.ordered_reads import read_in_order
from tfos.errors import MapTrainError, SettingsError
from tfos.many.queue import ItemTraining, TrainingState
from tfos.many.results import AHEAD, ResultsDirectory
from tfos.many.run import MapRun
from tfos.spark.interruptible import InterruptibleCall
from tfos.spark.pickling import unpickle_value

_CANCEL_S = 30.0
_SCHEMA = (
    "item string, state string, seconds double, attempts int, metrics map<string,double>, "
    "error string"
)


class ManyTrainings:
    """The result of `map_train`: one row per item, in the order of the items.

    A context manager: the end of the block cancels what still runs.

    Args:
        run: run of the items.
        items: their names, with the digest of each; for groups an empty text, since Spark may
            recompute their rows, perhaps differently.
        results: directory of the values; None: the run holds them.
        release: called once, at the end.
    """

    def __init__(
        self,
        run: MapRun,
        items: Mapping[str, str],
        results: ResultsDirectory | None,
        release: Callable[[], None] | None,
    ) -> None:
        self._run = run
        self._positions = {name: number for number, name in enumerate(items)}
        self._digests = items
        self._results = results
        self._release = release
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more."""
        return self._run.is_over

    @property
    def busy_share(self) -> float:
        """Share of the slots' time, from the start of the call, in which the function ran."""
        return self._run.busy_share

    def table(self) -> list[ItemTraining]:
        """Return all rows as they are now; `pandas.DataFrame(trainings.table())` shows them."""
        rows: list[ItemTraining] = self._run.read(lambda queue: list(queue.table))
        return rows

    @property
    def failed(self) -> list[ItemTraining]:
        """Return the rows of items that have failed."""
        return [row for row in self.table() if row.state is TrainingState.FAILED]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the run; return whether it ended in time. Ctrl-C cancels the run.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            MapTrainError: the run ended early.
            NotEnoughSlots: Spark had no slot for it.
        """
        over = self._wait(None, timeout_s)
        if over:
            self._finish()
        return over

    def as_ended(self) -> Iterator[ItemTraining]:
        """Yield each row as its item is done or has failed, those of an earlier run first.

        An item whose value was lost with its executor is trained again, and not yielded again.

        Raises:
            MapTrainError: the run ended early.
        """
        seen = 0
        shown: set[int] = set()
        ended = self._run.ended_items
        while True:
            while seen < len(ended):
                item = ended[seen]
                seen += 1
                row = self._row(item)
                # Else its value was lost meanwhile: it ends again.
                if item not in shown and row.state in (TrainingState.DONE, TrainingState.FAILED):
                    shown.add(item)
                    yield row
            if self._run.is_over and seen == len(ended):
                self._finish()
                return
            self._wait(functools.partial(_has_more, ended, seen), None)

    def value(self, item: str) -> Any:
        """Return what the function returned for an item; unpickled again at each call.

        Without `results_dir` it arrives once the item's slot has ended.

        Args:
            item: its name, as in the table.

        Raises:
            MapTrainError: the item has failed, with its error; or its value is not there yet, was
                removed, or cannot be read here.
            SettingsError: there is no item of this name.
        """
        number = self._positions.get(item)
        if number is None:
            first = next(iter(self._positions))
            raise SettingsError(f"no item is named {item!r}; the first is {first!r}")
        row = self._row(number)
        if row.state is not TrainingState.DONE:
            reason = f": {row.error}" if row.error else ""
            raise MapTrainError(
                f"item {item!r} is {row.state.value} after {row.attempts} attempts{reason}"
            )
        if self._results is not None:
            return _value_of(item, self._stored(self._results, item))
        data = self._run.values.get(number)
        if data is None:
            raise MapTrainError(
                f"the value of item {item!r} was lost with its slot, which ended before the value "
                "came: pass results_dir, which keeps each value once its item is done"
                if self._run.is_over
                else f"the value of item {item!r} arrives when its slot ends: wait() first, or "
                "give map_train a results_dir"
            )
        return _value_of(item, data)

    def values(self) -> dict[str, Any]:
        """Return the values of all done items by name, after the end of the run."""
        self.wait()
        names = [row.item for row in self.table() if row.state is TrainingState.DONE]
        if self._results is None:
            return {name: self.value(name) for name in names}
        sizes = self._results.sizes(names)
        read = functools.partial(self._stored, self._results)
        stored = read_in_order(read, names, AHEAD, sizes)
        return {name: _value_of(name, data) for name, data in zip(names, stored, strict=True)}

    def raise_failed(self) -> None:
        """Wait, and raise if an item has failed.

        Raises:
            MapTrainError: names the items, with the first one's error.
        """
        self.wait()
        failed = self.failed
        if failed:
            names = ", ".join(repr(row.item) for row in failed[:10])
            more = f" and {len(failed) - 10} more" if len(failed) > 10 else ""
            raise MapTrainError(
                f"{len(failed)} of {len(self._positions)} items have failed: {names}{more}. The "
                f"first, after {failed[0].attempts} attempts: {failed[0].error}"
            )

    def to_spark(self, spark: Any) -> Any:
        """Return the table as a Spark DataFrame.

        Args:
            spark: a SparkSession.
        """
        rows = [
            (row.item, row.state.value, row.seconds, row.attempts, row.metrics or {}, row.error)
            for row in self.table()
        ]
        return spark.createDataFrame(rows, _SCHEMA)

    def cancel(self) -> None:
        """End all slots and wait until nothing runs any more. Idempotent."""
        self._run.cancel()
        self._run.wait(None, _CANCEL_S)
        self._let_go()

    def __len__(self) -> int:
        return len(self._positions)

    def __enter__(self) -> ManyTrainings:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        counts = dict.fromkeys(TrainingState, 0)
        for row in self.table():
            counts[row.state] += 1
        text = ", ".join(f"{count} {state.value}" for state, count in counts.items() if count)
        return f"<{len(self)} trainings: {text}>"

    def _stored(self, results: ResultsDirectory, item: str) -> bytes:
        path = results.path_of(item)
        try:
            head, data = results.value(item)
        except OSError as error:
            raise MapTrainError(
                f"the value of item {item!r} cannot be read at {path}: {error}. If slots have "
                "written it on their own hosts, pass a shared directory as results_dir, such as "
                "hdfs://…"
            ) from error
        if self._digests[item] not in ("", head.digest):
            raise MapTrainError(
                f"the value of item {item!r} at {path} is no longer this run's: another one has "
                "trained another value of the item. Give each run a results_dir of its own"
            )
        return data

    def _row(self, number: int) -> ItemTraining:
        row: ItemTraining = self._run.read(lambda queue: queue.table[number])
        return row

    def _wait(self, is_enough: Callable[[], bool] | None, timeout_s: float | None) -> bool:
        call = InterruptibleCall("tfos-many-wait", lambda: self._run.wait(is_enough, timeout_s))
        return call.result(on_interrupt=self.cancel)

    def _finish(self) -> None:
        self._let_go()
        if self._run.error is not None:
            raise self._run.error

    def _let_go(self) -> None:
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            with contextlib.suppress(Exception):  # Spark has stopped
                release()


def _has_more(ended: Sequence[int], seen: int) -> bool:
    return len(ended) > seen


def _value_of(item: str, data: bytes) -> Any:
    return unpickle_value(data, f"item {item!r}", MapTrainError)
