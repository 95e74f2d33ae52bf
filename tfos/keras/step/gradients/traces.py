"""Traces: what a compiled step makes once for each kind of batch.

Covers: which batches are of one kind; lengths that vary, which are traced as unknown.
Does not: know what is traced.      Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from keras import tree

MAX_KINDS = 256
"""Most exact kinds to remember: each length of a dimension is one."""


class Traces:
    """Results for each kind of batch: nesting, dtypes, shapes without the batch dimension.

    Args:
        trace: function that makes the result from the nested specs of a batch, given one by one.
    """

    def __init__(self, trace: Callable[..., Any]) -> None:
        self._trace = trace
        self._found: list[tuple[Any, list[Any], Any]] = []
        self._by_kind: dict[Any, Any] = {}
        """Results by exact kind: to compare a batch with specs takes 20 us for each leaf."""

    @property
    def newest(self) -> Any:
        """The nested specs of the newest kind of batch; None: there was none."""
        if not self._found:
            return None
        structure, specs, _ = self._found[-1]
        return tree.pack_sequence_as(structure, specs)

    def find(self, data: tuple[Any, ...]) -> Any:
        """Return the result that takes this batch; make it if there is none."""
        given: Any = data  # any nesting
        leaves, nesting = optree.tree_flatten(given, namespace="keras")  # Layers' dicts, too
        kind = nesting, tuple(map(_kind, leaves))
        found = self._by_kind.get(kind)
        if found is None:
            found = self._search(data)
            if None not in kind[1]:
                if len(self._by_kind) >= MAX_KINDS:
                    self._by_kind.clear()
                self._by_kind[kind] = found
        return found

    def _search(self, data: tuple[Any, ...]) -> Any:
        structure = tree.map_structure(lambda _: None, data)
        leaves = tree.flatten(data)
        for known, specs, concrete in reversed(self._found):
            if known == structure and all(map(_fits, specs, leaves)):
                return concrete
        wanted = list(map(_spec, leaves))
        for known, specs, _ in reversed(self._found):
            if known == structure and all(map(_related, specs, wanted)):
                wanted = list(map(_relax, specs, wanted))  # lengths vary: do not trace each
                break
        packed = tree.pack_sequence_as(data, wanted)
        concrete = self._trace(*packed)
        self._found.append((structure, wanted, concrete))
        return concrete


def _kind(leaf: Any) -> tuple[Any, ...] | None:
    """Return dtype, rank and dimensions without the batch's; None: others than those are known."""
    import tensorflow as tf

    if isinstance(leaf, tf.__internal__.EagerTensor):
        shape = leaf._shape_tuple()
        return leaf._datatype_enum(), len(shape), shape[1:]
    if not isinstance(leaf, tf.RaggedTensor):
        return None
    if leaf.ragged_rank > 1 or leaf.uniform_row_length is not None:
        return None
    parts = _kind(leaf.values), _kind(leaf.row_splits)
    return None if None in parts else parts


def _spec(leaf: Any) -> Any:
    import tensorflow as tf

    if isinstance(leaf, tf.RaggedTensor):  # any number of rows, as for tensors
        shape = [None, *leaf.shape[1:]]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if not isinstance(leaf, tf.Tensor):
        return None if leaf is None else tf.type_spec_from_value(leaf)
    shape = leaf.shape if leaf.shape.rank == 0 else [None, *leaf.shape[1:]]
    return tf.TensorSpec(shape, leaf.dtype)


def _fits(spec: Any, leaf: Any) -> bool:
    if spec is None or leaf is None:
        return spec is leaf
    return bool(spec.is_compatible_with(leaf))


def _related(first: Any, second: Any) -> bool:
    if first is None or second is None or not hasattr(first, "shape"):
        return first is second
    same = type(first) is type(second) and first.dtype == second.dtype
    return same and first.shape.rank == second.shape.rank


def _relax(first: Any, second: Any) -> Any:
    import tensorflow as tf

    if not isinstance(first, tf.TensorSpec):
        return second
    dims = [a if a == b else None for a, b in zip(first.shape, second.shape, strict=True)]
    return tf.TensorSpec(dims, first.dtype)
