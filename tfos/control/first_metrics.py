"""First metrics: which of many metrics are kept where there is room for some. Pure.

Covers: the choice.      Does not: measure or show any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")
_LOSSES = ("loss", "val_loss")
"""Kept before all others: users look at them first, and `keep_best` is often `val_loss`."""


def first_metrics(
    metrics: Mapping[str, Value], most: int, wanted: str | None = None
) -> dict[str, Value]:
    """Return the first metrics, in their order; the losses are among them.

    Keras sorts its logs by name, those of validation last.

    Args:
        metrics: by name.
        most: how many to return at most.
        wanted: one that is among them, too; None: none.
    """
    kept = set(sorted(metrics, key=lambda name: name not in (wanted, *_LOSSES))[:most])
    return {name: value for name, value in metrics.items() if name in kept}
