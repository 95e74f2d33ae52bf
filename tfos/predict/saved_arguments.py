"""Arguments of a SavedModel: its signature has named tensors, without order or kind.

    def f(words: Ragged)   ─► signature: words (all values), words_1 (where rows end)

Covers: the order of arguments, which are ragged, the parts of a ragged tensor.
Does not: read models (tfos.predict.loading).      Runs in: Spark's Python workers.

The model usually includes the function of the signature, which tells both.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tfos.errors import UnsupportedModel


def order_of_arguments(model: Any, names: Collection[str]) -> list[str] | None:
    """Return a signature's names in the order of its function's arguments; None: unknown.

    Args:
        model: the result of `tf.saved_model.load`.
        names: names of the signature's tensors.
    """
    orders = {tuple(order) for order, _ in _functions_of(model, names)}
    return list(orders.pop()) if len(orders) == 1 else None


class RaggedArgument(NamedTuple):
    """A ragged argument of a signature, which takes it as two tensors."""

    name: str
    """Its key in a dict of arguments, else the name of its values."""
    values: str
    ends: str
    """The tensor that tells where the rows of `values` end."""
    spec: Any
    """Its tf.RaggedTensorSpec."""

    def tensors(self, given: Any) -> dict[str, Any]:
        """Return what the signature takes for a tf.RaggedTensor."""
        import tensorflow as tf

        ends = tf.cast(given.row_splits, self.spec.row_splits_dtype)
        return {self.values: given.values, self.ends: ends}


def ragged_arguments(model: Any, names: Collection[str]) -> list[RaggedArgument]:
    """Return a signature's ragged arguments.

    Args:
        model: the result of `tf.saved_model.load`.
        names: names of the signature's tensors.

    Raises:
        UnsupportedModel: a row would contain lists of lists.
    """
    import tensorflow as tf

    found: dict[str, RaggedArgument] = {}
    for order, concrete in _functions_of(model, names):
        parts = iter(order)
        named = [*_named(concrete.structured_input_signature)]
        keys = Counter(key for key, _ in named)
        for key, spec in named:
            values, *ends = itertools.islice(parts, len(tf.nest.flatten(spec, True)))
            if not isinstance(spec, tf.RaggedTensorSpec):
                continue
            name = values if key is None or key in names or keys[key] > 1 else key
            if len(ends) != 1:
                raise UnsupportedModel(
                    f"input {name!r} takes lists of lists in each row (ragged_rank="
                    f"{len(ends)}), but a column has lists. Give the model an input for each "
                    "level, or pad it"
                )
            found[values] = RaggedArgument(name, values, ends[0], spec)
    return [*found.values()]


def _named(structure: Any, key: str | None = None) -> Iterator[tuple[str | None, Any]]:
    """Yield the specs in the order of TensorFlow's tensors, each with its own key in a dict."""
    import tensorflow as tf

    if isinstance(structure, Mapping):
        for each in sorted(structure):
            yield from _named(structure[each], each)
    elif isinstance(structure, (list, tuple)):
        for each in structure:
            yield from _named(each)
    elif isinstance(structure, tf.TypeSpec):
        yield key, structure


def _functions_of(model: Any, names: Collection[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield the model's functions whose arguments are tensors of these names, with their order."""
    import tensorflow as tf

    for function in vars(model).values():
        for concrete in getattr(function, "concrete_functions", ()):
            specs = tf.nest.flatten(concrete.structured_input_signature, expand_composites=True)
            count = sum(isinstance(each, tf.TypeSpec) for each in specs)
            order = _keywords(concrete.inputs[:count])
            if sorted(order) == sorted(names):
                yield order, concrete


def _keywords(tensors: Iterable[Any]) -> list[str]:
    """Return what TensorFlow calls the arguments of a function in its signature.

    The graph's names are no help: it numbers equal ones in another order, in lower case.
    """
    found: list[str] = []
    counts: Counter[str] = Counter()
    for tensor in tensors:
        given = tensor.op.name
        with contextlib.suppress(ValueError):  # a SavedModel may not have it
            given = tensor.op.get_attr("_user_specified_name").decode()
        name = given
        while name in found:
            counts[given] += 1
            name = f"{given}_{counts[given]}"
        found.append(name)
    legal = (re.sub(r"\W", "_", name) for name in found)
    return [name if name[0].isalpha() else f"arg_{name}" for name in legal]
