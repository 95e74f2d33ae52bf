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

A server that is started again has the rows of its checkpoint, and nothing counts those that it has
lost. So the rows are saved before they count as loaded, and loaded again if a server was started
again before that. What is not safe yet is "unsafe": training goes on, and the next call loads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ps.string_ids.ids import ids_of
from ps.tables.ids import from_bits
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import RequestTimeout
from tfos.keras.embedding.layer import MAX_SAVED_BYTES, Embedding

METADATA_NAME = "loaded_rows"
LOADING, UNSAFE, LOADED = "loading", "unsafe", "loaded"
"""UNSAFE: as LOADED for the other workers; some of the rows may be lost, so a call loads again."""
LOOK_S = 0.25
LOAD_TIMEOUT_S = 86_400.0
"""For the chief's whole load. A chief that fails ends the cluster before."""
UNSAVED = (
    "table %r: its rows are loaded and were not saved: %s. A server that is started again before "
    "the next save lacks them: look at the directory of the checkpoints"
)
LOST = (
    "table %r: %s restarted while rows were loaded, and has only those after its checkpoint; other "
    "ids of it begin with the table's initializer. Call load_rows on the chief again: batches that "
    "can be read twice, as a list, are loaded again without that"
)
MAX_LOADS = 3
"""Of the same rows, each after a server was started again."""
RowBatches = Iterable[tuple[Any, Any]]
"""Batches of (ids, rows): [n] integers or strings and [n, dim] of the table's dtype."""
Save = Callable[[], str | None]
"""Saves the servers; returns why that failed, empty once they are saved, None where nothing is."""

_logger = logging.getLogger("tfos")


def nothing_saves() -> None:
    """Of a run without checkpoints, whose servers nobody starts again."""


def load_rows(
    client: Any, table: str, batches: RowBatches, *, is_chief: bool, save: Save = nothing_saves
) -> int:
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
        RequestTimeout: the chief has not loaded them within a day.
    """
    client.tables.route({table: ()})  # refuses a table that is not there
    if not is_chief:
        _wait_for_chief(client, table)
        return 0
    states = dict(client.metadata().get(METADATA_NAME) or {})
    if reason := _why_not(client, states.get(table)):
        _logger.info("table %r: no rows are loaded: %s", table, reason)
        added = 0
    else:
        client.set_metadata(METADATA_NAME, states | {table: LOADING}, of_run=True)
        added, is_safe = _load_whole(client, table, batches, save)
        if not is_safe:
            client.set_metadata(METADATA_NAME, states | {table: UNSAFE}, of_run=True)
            return added
    client.set_metadata(METADATA_NAME, states | {table: LOADED}, of_run=True)
    return added


def load_layer_rows(
    layers: Sequence[Embedding], client: Any, *, is_chief: bool, save: Save = nothing_saves
) -> None:
    """Load the rows that layers have of a file, or of the training of another model.

    Args:
        layers: of a model that is being distributed.
        client: the process's PSClient, attached.
        is_chief: whether this worker loads.
        save: see Save.

    Raises:
        UnsupportedModel: another model's table has more than MAX_SAVED_BYTES of rows.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for layer in layers:
        is_there = getattr(layer.source, "client", None) is client
        if not is_there and (content := layer.source.dump(layer.table, MAX_SAVED_BYTES)):
            found.setdefault(layer.table, content)
    specs = {spec.name: spec for spec in client.manifest.tables}
    for table, (keys, rows) in found.items():
        batches = [(from_bits(specs[table], keys), rows)]
        load_rows(client, table, batches, is_chief=is_chief, save=save)


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
        keys = ids_of(spec, ids)
        added += client.tables.load_rows(table, keys, rows)
        given += len(rows)
        lines.show(f"table {table!r}: {given:,} rows loaded")
    console.end_progress()
    kept = f", {given - added:,} ids had a row, which stays" if given > added else ""
    _logger.info("table %r: %d rows loaded%s", table, added, kept)
    return given, added


def _starts(client: Any) -> set[tuple[int, int]]:
    return {(each.server, each.start) for each in client.stats()}


def _wait_for_chief(client: Any, table: str) -> None:
    deadline_s = time.monotonic() + LOAD_TIMEOUT_S
    while (client.metadata().get(METADATA_NAME) or {}).get(table) not in (UNSAFE, LOADED):
        if time.monotonic() > deadline_s:
            raise RequestTimeout(
                f"the chief has not loaded the rows of table {table!r} within "
                f"{LOAD_TIMEOUT_S:.0f} s; call ctx.load_rows on every worker, the chief included"
            )
        time.sleep(LOOK_S)
