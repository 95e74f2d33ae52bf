"""Ragged arguments of a SavedModel: its signature has their parts, under names that nobody wrote.

    def f(words: Ragged)   ─► signature: words (all values), words_1 (where rows end)

Covers: which arguments were ragged, the parts of a ragged tensor.
Does not: read models (tfos.predict.loading).      Runs in: Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tfos.errors import UnsupportedModel


def ragged_arguments(model: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the specs of a signature's ragged arguments, by the name that its function gave them.

    The signature does not say it; the function that it was made from is in the model and does.

    Args:
        model: as `tf.saved_model.load` returns it.
        names: of the signature's tensors.

    Raises:
        UnsupportedModel: a row would be lists of lists.
    """
    import tensorflow as tf

    found: dict[str, Any] = {}
    for function in vars(model).values():
        for concrete in getattr(function, "concrete_functions", ()):
            for name, each in concrete.function_type.parameters.items():
                spec = each.type_constraint
                if isinstance(spec, tf.RaggedTensorSpec) and {name, _ends(name)} <= {*names}:
                    found[name] = spec
    for name, spec in found.items():
        if spec.ragged_rank != 1:
            raise UnsupportedModel(
                f"input {name!r} takes lists of lists in each row (ragged_rank="
                f"{spec.ragged_rank}), and a column has lists; give the model an input for each "
                "level, or pad it"
            )
    return found


def without_parts(names: Collection[str], ragged: Mapping[str, Any]) -> list[str]:
    """Return a signature's names without those of the ends of ragged rows."""
    parts = {_ends(name) for name in ragged}
    return [name for name in names if name not in parts]


def parts_of(name: str, tensor: Any, spec: Any) -> dict[str, Any]:
    """Return what the signature takes for a ragged tensor.

    Args:
        name: of the argument.
        tensor: a tf.RaggedTensor.
        spec: of the argument.
    """
    import tensorflow as tf

    ends = tf.cast(tensor.row_splits, spec.row_splits_dtype)
    return {name: tensor.values, _ends(name): ends}


def _ends(name: str) -> str:
    return f"{name}_1"
