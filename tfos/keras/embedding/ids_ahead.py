"""Ids ahead of the step: a function of the batch alone that gives the keys of each layer's call.

Covers: recording the calls of a step, which of them depend on the batch alone, the pruned function.
Does not: look rows up (batch_rows), run the step (tfos.keras.step.gradients).
Threads: that of the step.

The model's own step is traced once with layers that record their keys and return zeros. What the
keys are made of is cut out of that graph, so every class of model works. Keys that are a feature of
the batch as it is are taken from there, without a function. A call whose keys depend on more than
the batch (a variable, a random number, another lookup, a loop) looks its rows up inside the step:
a callback, or a later step of a pipeline, may change a variable after the ids were asked for. A
vocabulary that the step only reads is constant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfos.keras.compiled_call import CompiledCall, leaves_of
from tfos.keras.embedding import row_flow

logger = logging.getLogger(__name__)

_SAME_NUMBERS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "Cast")
"""Operations whose result has the numbers of its first input in the same order."""
_TABLE_READS = ("LookupTableFindV2", "LookupTableSizeV2")


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer in a step."""

    layer: Any
    why_inside: str
    """Why its rows are looked up inside the step; empty: they are looked up ahead of it."""

    @property
    def is_ahead(self) -> bool:
        """Whether the keys are known before the step."""
        return not self.why_inside


@dataclass(frozen=True, slots=True)
class IdsAhead:
    """The calls of one kind of batch, in order, and the keys of those that are ahead."""

    calls: tuple[LayerCall, ...]
    keys: Callable[[Any], Sequence[Any]]
    """From a batch the keys of the calls that are ahead: integers of any shape, in order."""


class _Recording:
    """The flow that notes each call's keys."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.zeros: list[Any] = []

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return zeros; see RowFlow."""
        import tensorflow as tf

        keys = tf.identity(keys)
        self.calls.append((layer, keys))
        rows = tf.zeros(tf.stack([tf.size(keys), layer.dim]))
        self.zeros.append(rows)
        return rows, keys


def record(step: Callable[[Any], Any], packed: Any, layers: Sequence[Any]) -> IdsAhead:
    """Return the ids that a step asks for.

    Args:
        step: runs the model's own step on a batch.
        packed: the batch, as nested tensor specs.
        layers: the model's Embeddings.

    Raises:
        UnsupportedModel: as row_flow.flow_for.
    """
    import tensorflow as tf

    recording = _Recording()

    def recorded(data: Any) -> None:
        recording.calls.clear()  # a first trace that makes variables is repeated
        with row_flow.flowing(recording, layers):
            step(data)

    graph = tf.function(recorded, autograph=False).get_concrete_function(packed).graph
    changed = _may_change(graph) | {rows.op for rows in recording.zeros if _in(rows, graph)}
    calls = tuple(
        LayerCall(layer, _why_inside(keys, graph, changed)) for layer, keys in recording.calls
    )
    # As in the step: one layer's calls name their gradients' rows in one way.
    inside = {call.layer.table: call.why_inside for call in calls if not call.is_ahead}
    calls = tuple(LayerCall(call.layer, inside.get(call.layer.table, "")) for call in calls)
    for call in dict.fromkeys(call for call in calls if not call.is_ahead):
        logger.warning(
            "layer %r looks its rows up inside the step, which is slower: %s. Let the ids be a "
            "function of the batch alone, so that the rows of the next batch are asked for early",
            call.layer.name,
            call.why_inside,
        )
    pairs = zip(calls, recording.calls, strict=True)
    wanted = [keys for call, (_, keys) in pairs if call.is_ahead]
    return IdsAhead(calls, _keys(graph, wanted, packed))


def _keys(graph: Any, wanted: Sequence[Any], packed: Any) -> Callable[[Any], Sequence[Any]]:
    """Return a function of the batch that gives these tensors of a graph, of any shape."""
    given = _given(graph)
    leaves = [_same_integers(tensor, given) for tensor in wanted]
    computed = [keys for keys, at in zip(wanted, leaves, strict=True) if at is None]
    compute = _pruned(graph, computed, packed)

    def keys(data: Any) -> Sequence[Any]:
        found, own = iter(compute(data)), leaves_of(data)
        return [next(found) if at is None else own[at] for at in leaves]

    return keys


def _given(graph: Any) -> list[Any]:
    """Return the graph's inputs that are leaves of the batch."""
    return [each for each in graph.inputs if all(each is not inner for _, inner in graph.captures)]


def _same_integers(keys: Any, given: Sequence[Any]) -> int | None:
    """Return which input has the integers of these keys, in this order; None: none has."""
    import tensorflow as tf

    while True:
        at = next((at for at, each in enumerate(given) if each is keys), None)
        if at is not None:
            return at if keys.dtype in (tf.int64, tf.int32) else None
        op = keys.op
        if op.control_inputs or op.type not in _SAME_NUMBERS:
            return None
        if op.type == "Cast" and (op.inputs[0].dtype, keys.dtype) != (tf.int32, tf.int64):
            return None
        keys = op.inputs[0]


def _pruned(graph: Any, wanted: Sequence[Any], packed: Any) -> Callable[[Any], Sequence[Any]]:
    """Return a compiled function of the batch that computes these tensors of a graph alone."""
    import tensorflow as tf

    if not wanted:
        return lambda _: ()
    definition = graph.as_graph_def()
    kept = {op.name for tensor in wanted for op in _ancestors(tensor.op)}
    for at in reversed(range(len(definition.node))):
        if definition.node[at].name not in kept:
            del definition.node[at]
    captured = [(outer, inner) for outer, inner in graph.captures if inner.op.name in kept]
    given = _given(graph)

    def keys(data: Any) -> Any:
        feeds = {
            place.name: leaf
            for place, leaf in zip(given, leaves_of(data), strict=True)
            if place.op.name in kept
        }
        own = tf.compat.v1.get_default_graph()
        feeds |= {inner.name: own.capture(outer) for outer, inner in captured}
        return tf.graph_util.import_graph_def(
            definition, feeds, [tensor.name for tensor in wanted], name="ids"
        )

    return CompiledCall(tf.function(keys, autograph=False).get_concrete_function(packed))


def _may_change(graph: Any) -> set[Any]:
    """Return the captured handles, of variables and others, without vocabularies only read."""
    return {
        inner.op
        for _, inner in graph.captures
        if inner.dtype.name == "resource"
        and any(op.type not in _TABLE_READS for op in inner.consumers())
    }


def _why_inside(keys: Any, graph: Any, changed: set[Any]) -> str:
    """Return why keys cannot be computed ahead of the step; empty: they can."""
    if not _in(keys, graph):
        return "it is called inside a loop, a map or another tf.function"
    for op in _ancestors(keys.op):
        if op in changed:
            return "its ids depend on a variable, a vocabulary that may change, or rows of a table"
        if op.op_def.is_stateful and not _is_constant(op.type):
            return f"its ids depend on {op.type} ({op.name}), whose result may change"
    return ""


def _is_constant(kind: str) -> bool:
    constant = ("Placeholder", "ReadVariableOp", "ResourceGather", "Assert")
    return kind in constant or "LookupTable" in kind


def _in(tensor: Any, graph: Any) -> bool:
    return getattr(tensor, "graph", None) is graph


def _ancestors(op: Any) -> Iterator[Any]:
    seen, waiting = {op}, [op]
    while waiting:
        newest = waiting.pop()
        yield newest
        for before in (*(each.op for each in newest.inputs), *newest.control_inputs):
            if before not in seen:
                seen.add(before)
                waiting.append(before)
