"""`tfos.map_train`: many independent trainings on Spark's task slots.

Covers: the arguments, what the executors receive, an earlier run's results.
Does not: run slots (tfos.many.run), train (tfos.many.slot.trainer).
Runs in: the driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfos.console.console import Console
from tfos.driver.preflight import check_python_workers, check_timeout
from tfos.errors import ConfigError, SettingsError
from tfos.files import paths
from tfos.many import groups
from tfos.many.digests import function_digest
from tfos.many.items import check_kind, items_of
from tfos.many.launch import (
    RunOptions,
    RunPlace,
    RunWork,
    grouped_work,
    listed_work,
    start,
)
from tfos.many.results import ClaimedResults, ResultsDirectory
from tfos.many.trainings import ManyTrainings
from tfos.spark.facts import SparkFacts, active_context, classic_context, read_facts
from tfos.spark.interruptible import CancelToken, InterruptibleCall
from tfos.spark.jvm_signals import leave_interrupts_to_python
from tfos.spark.pickling import dumps, pickle_main_fun


def map_train(  # noqa: PLR0913 - the public surface: keywords with defaults
    items: Iterable[Any] | Mapping[Any, Any] | Any,
    fn: Callable[..., Any],
    *,
    sc: Any = None,
    slots: int | None = None,
    retries: int = 2,
    timeout_s: float | None = None,
    results_dir: str | None = None,
    slot_wait_s: float = 120.0,
    wait: bool = True,
    verbose: bool = True,
) -> ManyTrainings:
    """Train many independent models: `fn(item)` for each item, on Spark's task slots.

    Each slot has one process that trains one item after the other, so TensorFlow is imported once
    per slot. An attempt that raises, takes too long or whose process dies is repeated. A fresh
    process follows a death, a timeout or growth by 1 GiB. Items may be trained in any order.

    Args:
        items: a list, a mapping from names to items, or `df.groupBy("series")`: then
            `fn(key, rows)` gets the group's key and its rows as a pyarrow.Table, in any order.
        fn: trains one item. Its value may be anything that pickles; numbers in a returned dict are
            the item's metrics.
        sc: SparkContext or classic SparkSession; None: the active one.
        slots: number of concurrent trainings, one task slot each; None: as many as are free now. If
            Spark has fewer, the run continues with those.
        retries: attempts of an item after its first one.
        timeout_s: seconds for one attempt, not counting the import of TensorFlow or Keras before
            the first one; None: no limit.
        results_dir: directory that driver and executors see (`hdfs://…`): results survive the
            driver. The same call then resumes a stopped run; it trains added items, and groups
            whose rows have changed. None: values come back with Spark's results.
        slot_wait_s: seconds to wait while Spark has no slot.
        wait: whether to return only at the end; False: return a handle at once.
        verbose: show progress.

    Returns:
        The table of items, with their values. A failed item raises nothing here; see
            `raise_failed()`.

    Raises:
        SettingsError: an argument is invalid, or `results_dir` is of other code or values.
        ConfigError: a Spark setting would duplicate or starve slots.
        NotPicklable: names the item, or the object that the function refers to.
        NotEnoughSlots: Spark had no slot in time.
        MapTrainError: slots failed repeatedly, or their jobs were cancelled.
    """
    _check(items, fn, slots, retries)
    timeout_s = None if timeout_s is None else check_timeout("timeout_s", timeout_s)
    given = groups.session_of(items) if groups.is_grouped(items) else sc or active_context()
    context, wait_s = classic_context(given), check_timeout("slot_wait_s", slot_wait_s)
    facts = read_facts(context)
    _check_spark(facts)
    place = RunPlace(context, facts, Console(enabled=verbose), wait_s)
    options = RunOptions(slots, retries, timeout_s, _pickled_function(fn))
    trainings = _uninterrupted(place, lambda: _started(place, options, items, fn, results_dir))
    if wait:
        trainings.wait()
    return trainings


def _uninterrupted(place: RunPlace, begin: Callable[[], ManyTrainings]) -> ManyTrainings:
    """Start a run on its own thread; Ctrl-C cancels it at once or as soon as it has started."""
    leave_interrupts_to_python(place.sc)
    cancel, begun = CancelToken(), list[ManyTrainings]()

    def run() -> ManyTrainings:
        begun.append(begin())
        if cancel.is_set:
            begun[0].cancel()
        return begun[0]

    def end() -> None:
        for each in begun:
            each.cancel()

    return InterruptibleCall("tfos-map_train", run, cancel=cancel, spark=place.sc).result(end)


def _started(
    place: RunPlace, options: RunOptions, items: Any, fn: Callable[..., Any], results_dir: object
) -> ManyTrainings:
    listed = None if groups.is_grouped(items) else items_of(items)
    num_slots = place.count_slots(options.slots)
    if listed is None:
        work = grouped_work(items, num_slots, with_digests=results_dir is not None)
    else:
        work = listed_work(listed, with_digests=results_dir is not None)
    try:
        claimed = _claimed(results_dir, place.facts, fn, work)
    except BaseException:
        work.release()
        raise
    return start(place, work, options, num_slots, claimed)


def _check(items: object, fn: Callable[..., Any], slots: object, retries: object) -> None:
    if not callable(fn):
        raise SettingsError(f"fn must be a function, got {type(fn).__qualname__}")
    is_grouped = groups.is_grouped(items)
    if not is_grouped:
        check_kind(items)  # first: fn(key, rows) is right, and the DataFrame not grouped
    try:
        inspect.signature(fn).bind(*[None] * (2 if is_grouped else 1))
    except TypeError:
        wanted = "fn(key, rows)" if is_grouped else "fn(item)"
        name = getattr(fn, "__qualname__", repr(fn))
        raise SettingsError(
            f"fn is called as {wanted}, but {name}{inspect.signature(fn)} does not take that; "
            "bind further arguments with functools.partial"
        ) from None
    except ValueError:
        pass  # a builtin without a signature
    if slots is not None and (type(slots) is not int or slots < 1):
        raise SettingsError(f"slots must be an int >= 1, or None for all free ones, got {slots!r}")
    if type(retries) is not int or retries < 0:
        raise SettingsError(f"retries must be an int >= 0, got {retries!r}")


def _check_spark(facts: SparkFacts) -> None:
    """Refuse Spark settings that would duplicate or starve slots."""
    if facts.is_speculative:
        raise ConfigError(
            "spark.speculation=true: Spark starts a slot that trains for long a second time, and "
            "that one ends the first and trains its items again. Set it to false."
        )
    check_python_workers(facts.conf)


def _pickled_function(fn: Callable[..., Any]) -> bytes:
    pickle_main_fun(fn, None, called="fn")  # its error names the object
    return dumps(fn)


def _claimed(
    results_dir: object, facts: SparkFacts, fn: Callable[..., Any], work: RunWork
) -> ClaimedResults | None:
    if results_dir is None:
        return None
    if not isinstance(results_dir, str) or not results_dir:
        raise SettingsError(f"results_dir must be a path or URL as a str, got {results_dir!r}")
    directory = ResultsDirectory(paths.output_directory(results_dir, "results", facts.output_place))
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return ClaimedResults(directory, directory.claim(name, function_digest(fn), work.digest))
