"""Arguments of a SavedModel: its signature has named tensors, without order or kind.

    def f(words: Ragged)   ─► signature: words (all values), words_1 (where rows end)

Covers: the order of arguments, which are ragged, the parts of a ragged tensor.
Does not: read models (tfos.predict.loading).      Runs in: Spark's Python workers.

The model usually includes the function of the signature, which tells both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tfos.errors import UnsupportedModel


def order_of_arguments(model: Any, names: Collection[str]) -> list[str] | None:
    """Return a signature's names in the order of its function's arguments; None: unknown.

    Args:
        model: the result of `tf.saved_model.load`.
        names: names of the signature's tensors.
    """
    orders = {tuple(order) for order, _ in _functions_of(model, names)}
    return list(orders.pop()) if len(orders) == 1 else None


def ragged_arguments(model: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the specs of a signature's ragged arguments, by the function's name for them.

    Args:
        model: the result of `tf.saved_model.load`.
        names: names of the signature's tensors.

    Raises:
        UnsupportedModel: a row would contain lists of lists.
    """
    import tensorflow as tf

    found: dict[str, Any] = {}
    for _, concrete in _functions_of(model, names):
        for name, each in concrete.function_type.parameters.items():
            spec = each.type_constraint
            if isinstance(spec, tf.RaggedTensorSpec) and {name, _ends(name)} <= {*names}:
                found[name] = spec
    for name, spec in found.items():
        if spec.ragged_rank != 1:
            raise UnsupportedModel(
                f"input {name!r} takes lists of lists in each row (ragged_rank="
                f"{spec.ragged_rank}), but a column has lists. Give the model an input for each "
                "level, or pad it"
            )
    return found


def without_parts(names: Collection[str], ragged: Mapping[str, Any]) -> list[str]:
    """Return a signature's names without those of ragged row ends."""
    parts = {_ends(name) for name in ragged}
    return [name for name in names if name not in parts]


def parts_of(name: str, tensor: Any, spec: Any) -> dict[str, Any]:
    """Return what the signature takes for a ragged tensor.

    Args:
        name: name of the argument.
        tensor: a tf.RaggedTensor.
        spec: spec of the argument.
    """
    import tensorflow as tf

    ends = tf.cast(tensor.row_splits, spec.row_splits_dtype)
    return {name: tensor.values, _ends(name): ends}


def _ends(name: str) -> str:
    return f"{name}_1"


def _functions_of(model: Any, names: Collection[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the model's functions whose arguments are tensors of these names, with their order."""
    import tensorflow as tf

    for function in vars(model).values():
        for concrete in getattr(function, "concrete_functions", ()):
            specs = tf.nest.flatten(concrete.structured_input_signature, expand_composites=True)
            count = sum(isinstance(each, tf.TypeSpec) for each in specs)
            order = [each.name.partition(":")[0] for each in concrete.inputs[:count]]
            if sorted(order) == sorted(names):
                yield order, concrete
