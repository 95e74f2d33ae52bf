"""Rows that a training begins with: the chief loads them, the other workers wait for it.

    fresh     chief: metadata "loading" ─► rows, in batches ─► a save ─► metadata "loaded"
              others: wait for that
    resumed   the checkpoint's rows stay, nothing is loaded

Covers: `ctx.load_rows`, rows that layers have of a file or of another model's training, what a
restart leaves of it.
Does not: read sources (keras_rows, tfos.serving), create rows (ps.client.tables).
Threads: the caller's.

The metadata is in every checkpoint, so a training that resumes knows that its rows were loaded,
and a chief that is started again goes on: an id that has a row keeps it. It holds for the run: the
others hear of it also where ps:0 was restarted from a checkpoint before it.

Rows that layers bring have a state of their own: a call of `ctx.load_rows` still adds those of the
ids that have none, and one that was broken off is made whole by a run that resumes.

A server that is started again has the rows of its checkpoint, and nothing counts those that it has
lost. So the rows are saved before they count as loaded, and loaded again if a server was started
again before that. What is not safe yet is "unsafe": training goes on, and the next call loads them.
So it is after a load that has failed, as of an export that is not there: a program may catch that.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ps.errors import ClosedError, PSError, ServerGone, ServerPhaseError
from ps.manifest.table_spec import TableSpec
from ps.string_ids.ids import ids_of
from ps.tables.ids import from_bits
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import RequestTimeout, SettingsError, UnsupportedModel
from tfos.keras.embedding.layer import MAX_SAVED_BYTES, Embedding
from tfos.keras.embedding.sources import NO_ROWS

METADATA_NAME, LAYERS_NAME = "loaded_rows", "rows_of_layers"
"""The states by table: of calls of `ctx.load_rows`, and of the rows that layers bring."""
LOADING, UNSAFE, LOADED = "loading", "unsafe", "loaded"
"""UNSAFE: as LOADED for the other workers; some of the rows may be lost, so they load again."""
LOOK_S = 0.25
LOAD_TIMEOUT_S = 86_400.0
"""Seconds for the chief's whole load. A chief that fails ends the cluster earlier."""
UNSAVED = (
    "table %r: its rows are loaded but were not saved: %s. A server that is restarted before "
    "the next save lacks them; check the directory of the checkpoints"
)
LOST = (
    "table %r: %s restarted while rows were loaded, and has only those after its checkpoint; its "
    "other ids begin with the table's initializer. Call load_rows on the chief again. Batches that "
    "can be read twice, such as a list, are loaded again automatically"
)
MAX_LOADS = 3
"""Most loads of the same rows, each after a server was restarted."""
RowBatches = Iterable[tuple[Any, Any]]
"""Batches of (ids, rows): [n] integers or strings and [n, dim] of the table's dtype."""
Save = Callable[[], str | None]
"""Saves the servers; returns why it failed, empty once they are saved, None if nothing saves."""

_logger = logging.getLogger("tfos")


def load_rows(client: Any, table: str, batches: RowBatches, *, is_chief: bool, save: Save) -> int:
    """Load a table's rows once per training; returns when they are there.

    Args:
        client: the process's PSClient, attached.
        table: its name.
        batches: the rows; only the chief reads them, again if a server is started again meanwhile
            and they can be read twice, as a list can.
        is_chief: whether this worker loads.
        save: see Save; called once the rows are there.

    Returns:
        Number of rows that this call has created; of several loads, that of the one with most.

    Raises:
        PSError: as ps.client.tables.TableClient.load_rows; the rows before it are loaded.
        ManifestMismatch, ServerPhaseError: there is no such table, or none yet.
        SettingsError: the ids are row numbers, and the table's are strings.
        RequestTimeout: the chief has not loaded them within a day.
    """
    try:
        client.tables.route({table: ()})  # refuses a table that is not there
    except ServerPhaseError as error:
        raise ServerPhaseError(
            f"table {table!r}: no model with weights is distributed yet. Call ctx.load_rows after "
            "ctx.distribute(model) and before fit; give the model a keras.Input before, or call it "
            "once, model(x[:1])"
        ) from error
    if not is_chief:
        _wait_for_chief(client, METADATA_NAME, table)
        return 0
    return _load_once(client, METADATA_NAME, table, batches, save)


def load_layer_rows(
    layers: Sequence[Embedding], client: Any, *, is_chief: bool, save: Save
) -> None:
    """Load the rows that layers have of a file, or of the training of another model.

    Args:
        layers: layers of a model that is being distributed.
        client: the process's PSClient, attached.
        is_chief: whether this worker loads.
        save: see Save.

    Raises:
        UnsupportedModel: another model's table has more than MAX_SAVED_BYTES of rows, or its
            servers have ended.
    """
    found: dict[str, dict[int, Embedding]] = {}
    for layer in layers:
        is_there = getattr(layer.source, "client", None) is client
        if not (is_there or layer.source is NO_ROWS):
            found.setdefault(layer.table, {}).setdefault(id(layer.source), layer)
    specs = {spec.name: spec for spec in client.manifest.tables}
    for table, by_source in found.items():
        if is_chief:
            rows = _RowsOfLayers([*by_source.values()], specs[table])
            _load_once(client, LAYERS_NAME, table, rows, save)
        else:
            _wait_for_chief(client, LAYERS_NAME, table)


class _RowsOfLayers:
    """Batches with the rows of layers of one table, read again each time; an id's first row counts.

    Args:
        layers: each with a source of its own.
        spec: settings of the table that the rows are for.
    """

    def __init__(self, layers: Sequence[Embedding], spec: TableSpec) -> None:
        self._layers = layers
        self._spec = spec

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        given = np.empty(0, np.int64)
        for layer in self._layers:
            content = _dumped(layer)
            if content is not None:
                keys, rows = content
                if given.size:
                    is_new = ~np.isin(keys, given)
                    keys, rows = keys[is_new], rows[is_new]
                given = np.concatenate([given, keys])
                yield from_bits(self._spec, keys), rows


def _dumped(layer: Embedding) -> tuple[Any, Any] | None:
    """Return the rows that a layer has, by RowSource.dump."""
    try:
        return layer.source.dump(layer.table, MAX_SAVED_BYTES)
    except (ClosedError, ServerGone) as error:
        raise UnsupportedModel(
            f"layer {layer.name!r} had the rows of table {layer.table!r} on parameter servers "
            "that have ended. Save the model before they end and load the file, or "
            "make a new Embedding, whose table begins without rows"
        ) from error


def _load_once(client: Any, name: str, table: str, batches: RowBatches, save: Save) -> int:
    """Load a table's rows on the chief, unless its state says that they are there.

    Args:
        client: as for load_rows, with table, batches and save.
        name: name of the metadata with the state, METADATA_NAME or LAYERS_NAME.
        table: its name.
        batches: the rows.
        save: see Save.

    Returns:
        As load_rows.
    """
    states = dict(client.metadata().get(name) or {})

    def note(state: str) -> None:
        client.set_metadata(name, states | {table: state}, of_run=True)

    if reason := _why_not(client, states.get(table)):
        _logger.info("table %r: no rows are loaded: %s", table, reason)
        note(LOADED)
        return 0
    note(LOADING)
    try:
        added, is_safe = _load_whole(client, table, batches, save)
    except Exception:
        # The program may go on without these rows: then the other workers must not wait for them.
        with contextlib.suppress(PSError):
            note(UNSAFE)
        raise
    note(LOADED if is_safe else UNSAFE)
    return added


def _why_not(client: Any, state: str | None) -> str:
    """Return why the table's rows are not loaded; empty: they are."""
    if state == LOADED:
        return "they were loaded before, in this training or in the one that it resumes"
    resumed_step = max(each.resumed_step for each in client.stats())
    if state is None and resumed_step >= 0:
        return f"the training resumes from step {resumed_step}, whose rows stay"
    return ""


def _load_whole(client: Any, table: str, batches: RowBatches, save: Save) -> tuple[int, bool]:
    """Load rows and save them; load again what servers lose that are started again meanwhile.

    Returns:
        How many rows were created, and whether all are on the servers and in a checkpoint.
    """
    most = most_added = 0
    names = ""
    for num_left in reversed(range(1 if isinstance(batches, Iterator) else MAX_LOADS)):
        starts = _starts(client)
        given, added = _load(client, table, batches)
        most, most_added = max(most, given), max(most_added, added)
        if given < most:  # the source keeps its place, as a cursor: what was lost stays so
            break
        failed = save()
        restarted = sorted(_starts(client) - starts)
        if not restarted:
            if failed:
                _logger.warning(UNSAVED, table, failed)
            return most_added, not failed
        names = ", ".join(f"ps:{server}" for server, _ in restarted)
        if num_left:
            _logger.warning("table %r: %s restarted: its rows are loaded again", table, names)
    _logger.warning(LOST, table, names)
    return most_added, False


def _load(client: Any, table: str, batches: RowBatches) -> tuple[int, int]:
    """Load rows; return how many the batches have, and how many of them are new."""
    console = Console()
    lines = ProgressLines(console)
    given = added = 0
    spec = next(each for each in client.manifest.tables if each.name == table)
    for ids, rows in batches:
        if isinstance(ids, range) and spec.id_source == "strings":  # no hash is a row's number
            raise SettingsError(
                f"table {table!r} has strings as ids, and these rows are numbered from "
                f"{ids.start}: name the StringLookup in front of their layer, rows_of(model, "
                "embedding, lookup)"
            )
        keys = ids_of(spec, ids)
        added += client.tables.load_rows(table, keys, rows, named=ids)
        given += len(rows)
        lines.show(f"table {table!r}: {given:,} rows loaded")
    console.end_progress()
    kept = f", at most {given - added:,} ids had a row, which stays" if given > added else ""
    _logger.info("table %r: %d rows loaded%s", table, added, kept)
    return given, added


def _starts(client: Any) -> set[tuple[int, int]]:
    return {(each.server, each.start) for each in client.stats()}


def _wait_for_chief(client: Any, name: str, table: str) -> None:
    deadline_s = time.monotonic() + LOAD_TIMEOUT_S
    while (client.metadata().get(name) or {}).get(table) not in (UNSAFE, LOADED):
        if time.monotonic() > deadline_s:
            raise RequestTimeout(
                f"the chief has not loaded the rows of table {table!r} within "
                f"{LOAD_TIMEOUT_S:.0f} s; call ctx.load_rows on every worker, the chief included"
            )
        time.sleep(LOOK_S)
