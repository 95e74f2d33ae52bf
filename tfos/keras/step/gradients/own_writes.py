"""Own writes: steps that change variables of the servers other than by `optimizer.apply`.

Covers: a compiled step with its branches, loops and nested functions; an eager step.
Does not: check the layers' statistics (BatchNorm), which a step may write: they are pushed.
Threads: that of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfos.errors import UnsupportedModel
from tfos.keras.step.variables import MOVING_COPY, Variables, raw_bytes

_BY_ROWS_OR_RULE = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")
"""How the other operations that change a variable begin, besides those that assign."""


class OwnWrites:
    """The writes of one step, from its construction to `check`.

    Args:
        variables: the model's.
    """

    def __init__(self, variables: Variables) -> None:
        import tensorflow as tf

        self._groups = (*variables.trainable, *variables.frozen)
        self._before: list[Any] | None = None
        if tf.executing_eagerly():
            self._before = list(map(_value, self._all()))

    def check(self) -> None:
        """Refuse a step that has written any: the next pull, or a new start, would undo it.

        Raises:
            UnsupportedModel: names the variable.
        """
        written = self._written_here() if self._before is not None else self._written_in_graph()
        for variable in written:
            if any(variable is each for g in self._groups if g.trainable for each in g.variables):
                raise UnsupportedModel(
                    f"train_step writes {variable.path!r} itself (a second optimizer, assign, or a "
                    "layer that rewrites its weights, as SpectralNormalization does); the "
                    "parameter servers hold this variable, so update it through "
                    "self.optimizer.apply(gradients, variables) only. In place of such a layer, a "
                    "kernel_regularizer keeps weights small"
                )
            raise UnsupportedModel(
                f"train_step writes {variable.path!r}, which is not trained. The parameter "
                "servers and their checkpoints keep its first value, so each worker that starts "
                f"or resumes would begin with that. {MOVING_COPY}"
            )

    def _all(self) -> Iterator[Any]:
        return (variable for group in self._groups for variable in group.variables)

    def _written_here(self) -> Iterator[Any]:
        for variable, before in zip(self._all(), self._before or (), strict=True):
            if not np.array_equal(raw_bytes(_value(variable)), raw_bytes(before)):
                yield variable

    def _written_in_graph(self) -> Iterator[Any]:
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        inside = {id(outer): inner for outer, inner in graph.captures}
        bodies = _Bodies(graph)
        for variable in self._all():
            handle = inside.get(id(variable.value.handle))
            if handle is not None and bodies.write(handle):
                yield variable


class _Bodies:
    """The functions that a graph calls: nested ones, branches and loops."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._functions: Mapping[str, Any] | None = None

    def write(self, handle: Any) -> bool:
        """Return whether the graph, or a function in it, writes the variable of a handle."""
        return any(
            self._writes(op.type, op.node_def, at, len(op.inputs))
            for op in handle.consumers()
            for at, given in enumerate(op.inputs)
            if given is handle
        )

    def _writes(self, kind: str, node: Any, at: int, num_inputs: int) -> bool:
        """Return whether an operation writes the variable that is its input number `at`."""
        if "Assign" in kind or kind.startswith(_BY_ROWS_OR_RULE):
            return True
        return any(
            self._body_writes(name, at - num_inputs)
            for each in node.attr.values()
            for name in (each.func.name, *(func.name for func in each.list.func))
            if name
        )

    def _body_writes(self, name: str, at: int) -> bool:
        """Return whether a function writes its argument `at`, counted from the last: -1.

        It counts from the last, because branches and loops have their own inputs before those.
        """
        if self._functions is None:
            library = self._graph.as_graph_def().library
            self._functions = {each.signature.name: each for each in library.function}
        body = self._functions.get(name)
        if body is None or len(body.signature.input_arg) < -at:
            return False
        argument = body.signature.input_arg[at].name
        for node in body.node_def:
            inputs = [given for given in node.input if not given.startswith("^")]
            for place, given in enumerate(inputs):
                if given == argument and self._writes(node.op, node, place, len(inputs)):
                    return True
        return False


def _value(variable: Any) -> Any:
    """Return the present value; what is assigned later does not change it."""
    return variable.value.read_value()
