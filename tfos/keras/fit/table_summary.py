"""Summary of a model with tables: Keras' own, then a line per table.

Covers: the lines, and the replaced `summary` of one model object.
Does not: count rows (ps.stats), replace other methods (tfos.keras.fit.distribute).
Threads: the caller's.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ps.errors import PSError
from tfos.keras.step.table_specs import embeddings_of, table_specs
from tfos.keras.step.trainer import PSTrainer


def with_tables(original: Callable[..., Any], trainer: PSTrainer) -> Callable[..., Any]:
    """Return a model's `summary` that goes on with its tables.

    Args:
        original: the model's own method.
        trainer: the model's.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def summary(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if trainer.has_tables:
            show = signature.bind(*args, **kwargs).arguments.get("print_fn") or print
            for line in _lines(trainer):
                show(line)

    return summary


def _lines(trainer: PSTrainer) -> Iterator[str]:
    from ps.optim.row_rules import row_width

    counts, unknown = _rows(trainer)
    yield "Tables:"
    for spec in table_specs(embeddings_of(trainer.model), trainer.optimizer):
        rows = unknown or f"{counts[spec.name]:,} rows"
        yield (
            f"  {spec.name}: {rows}, dim {spec.dim}, {row_width(spec) * spec.itemsize:,} bytes "
            f"per row with slots, {type(spec.rule).__name__}"
        )


def _rows(trainer: PSTrainer) -> tuple[Counter[str], str]:
    """Return the rows of each table, and what to print if they are unknown."""
    counts: Counter[str] = Counter()
    if not trainer.attached:
        return counts, "no rows yet"
    try:
        servers = trainer.client.stats()
    except PSError as error:  # a summary is useful without this number
        return counts, f"rows not known ({type(error).__name__})"
    for server in servers:
        counts.update({table.name: table.rows for table in server.tables})
    return counts, ""
