"""Train step, compiled: forward, backward, and one flat gradient tensor per group.

Covers: running the model's own `train_step` (ordinary or overridden) with its optimizer's `apply`
intercepted; unscaling, clipping, the finite check, the step's scalars; one trace per kind of batch.
Does not: send anything or touch variables of the servers (tfos.keras.step.trainer), sum gradients
(tfos.keras.step.accumulation).
Threads: one thread at a time. While `train_step` runs, `apply` of the optimizer is intercepted.

Keras skips a variable whose gradient is None. Here its part of the flat gradient is zero. With
fresh slots every rule then leaves value and slots unchanged, bit for bit. Where that does not hold
(weight decay, a gradient in another kind of batch), the step is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keras import tree

from tfos.errors import UnsupportedModel, VariablesChanged
from tfos.keras.data.lists import explained
from tfos.keras.embedding import dense_embeddings, row_flow
from tfos.keras.embedding.batch_rows import BatchRows, RowGradient
from tfos.keras.embedding.ids_ahead import IdsAhead, LayerCall, all_inside, record
from tfos.keras.embedding.sources import looked_up
from tfos.keras.step import optimizers
from tfos.keras.step.accumulation import Accumulator
from tfos.keras.step.variables import Variables

MAX_DENSIFIED_BYTES = 64 << 20
"""Largest dense gradient made from the rows of an embedding, in bytes; every step would send it."""

_WRITES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step: tensors that are not sent yet."""

    logs: Any
    gradients: Sequence[Any]
    """One flat tensor per trainable group."""
    statistics: Sequence[Any]
    """One flat tensor per group of statistics."""
    finite: Any
    """Scalar bool: no NaN and no infinity in any gradient."""
    complete: Any
    """Scalar bool: the gradients are to be pushed, not only accumulated."""
    scalars: Any
    """float64: the learning rate, then the scalars of `optimizers.step_scalars`."""
    row_gradients: Sequence[RowGradient] = ()
    """Of each trained Embedding, in the order of `GradientStep.trained_tables`."""


class GradientStep:
    """The compiled step of one model.

    Args:
        model: compiled.
        variables: the model's, in the servers' groups.
        clips_here: whether the worker clips gradients before they are pushed.
    """

    def __init__(self, model: Any, variables: Variables, *, clips_here: bool) -> None:
        import tensorflow as tf

        self._model = model
        self._optimizer = model.optimizer
        self._inner = optimizers.unwrap(model.optimizer)
        self._variables = variables
        self._clips_here = clips_here
        self._without_gradient: frozenset[int] | None = None
        self._accumulator: Accumulator | None = None
        if optimizers.batches_per_update(model.optimizer) > 1:
            trainable = [v for group in variables.trainable for v in group.variables]
            self._accumulator = Accumulator(model.optimizer, trainable)
        self._trained_layers = variables.trained_embeddings
        self._calls: Sequence[LayerCall] = ()
        compiled = tf.function(self._run, jit_compile=bool(model.jit_compile), autograph=False)
        self._traces = Traces(compiled.get_concrete_function)
        self._ids_ahead = Traces(self._record)
        if self._scaled and not self._optimizer.built:
            # Only the scale and its counter are needed here; the slots are on the servers.
            self._optimizer.build([])

    @property
    def skips_nonfinite(self) -> bool:
        """Whether non-finite steps are expected: a loss scale is being searched."""
        return self._scaled

    @property
    def accumulates(self) -> bool:
        """Whether a push needs several batches."""
        return self._accumulator is not None

    @property
    def _scaled(self) -> bool:
        return optimizers.is_scaled(self._optimizer)

    @property
    def trained_tables(self) -> list[str]:
        """The table of each Embedding whose rows are trained."""
        return [layer.table for layer in self._trained_layers]

    def ids_ahead(self, data: Any) -> IdsAhead:
        """Return the ids that this kind of batch asks for."""
        return self._ids_ahead.find((data,))  # type: ignore[no-any-return]  # what _record returns

    @property
    def batch_spec(self) -> Any:
        """Nested specs of the newest kind of batch; None: none, or the model has no tables."""
        found = self._ids_ahead.newest
        return None if found is None else found[0]

    def __call__(self, data: Any, rows: BatchRows | None = None) -> StepOutput:
        """Run the step on one batch.

        Args:
            data: nested tensors.
            rows: of the batch, filled; None: the model has no tables.
        """
        given: tuple[Any, ...] = (data, {}, [])
        if rows is not None:
            self._calls = rows.calls
            given = (data, rows.tensors, rows.positions)
        with explained(self._model, data):
            run = self._run if self._model.run_eagerly else self._traces.find(given)
            return StepOutput(*run(*given))

    def _record(self, data: Any) -> IdsAhead:
        if self._model.run_eagerly:
            return all_inside(self._variables.embeddings, "run_eagerly=True")
        trained = [v for group in self._variables.trainable for v in group.variables]
        ids = record(self._own_step, data, trained)
        inside = next((call for call in ids.calls if not call.is_ahead), None)
        if inside is not None and self._model.jit_compile:
            raise UnsupportedModel(
                f"layer {inside.layer.name!r} looks its rows up inside the step, because "
                f"{inside.why_inside}, and XLA cannot compile that; compile the model with "
                "jit_compile=False"
            )
        return ids

    def _own_step(self, data: Any) -> tuple[Any, Captured]:
        with intercepted(self._optimizer) as captured:
            return self._model.train_step(data), captured

    def _run(self, data: Any, rows: dict[str, Any], positions: list[Any]) -> tuple[Any, ...]:
        import tensorflow as tf

        flow = (
            _InsideRows() if self._model.run_eagerly else _GivenRows(rows, positions, self._calls)
        )
        with row_flow.flowing(flow):
            logs, captured = self._own_step(data)
        pairs, row_gradients = self._split(captured.pairs())
        gradients = self._gradients(pairs)
        self._check_writes()
        gradients = self._unscale(gradients)
        row_gradients = [
            (self._unscale({0: values})[0], indices) for values, indices in row_gradients
        ]
        finite = _all_finite([*gradients.values(), *(values for values, _ in row_gradients)])
        if self._scaled:
            self._update_scale(finite)
        complete = tf.constant(value=True)
        if self._accumulator is not None:
            gradients, complete = self._accumulator.add(gradients, finite)
        if self._clips_here and (
            self._inner.clipnorm or self._inner.global_clipnorm or self._inner.clipvalue
        ):
            clipped = self._inner._clip_gradients(list(gradients.values()))
            gradients = dict(zip(gradients, clipped, strict=True))
        flats = [
            group.flatten([self._or_zero(gradients, variable) for variable in group.variables])
            for group in self._variables.trainable
        ]
        statistics = [group.flatten(group.variables) for group in self._variables.statistics]
        dtypes = [group.dtype for group in self._variables.trainable]
        dtypes += ["float32"] if self._variables.embeddings else []  # for the tables
        scalars = tf.stack(optimizers.step_scalars(self._optimizer, dtypes))
        if self._accumulator is not None:
            self._accumulator.count(finite)
        return logs, flats, statistics, finite, complete, scalars, row_gradients

    def _split(
        self, pairs: Sequence[tuple[Any, Any]]
    ) -> tuple[list[tuple[Any, Any]], list[RowGradient]]:
        """Return the pairs without those of anchors, and each trained layer's row gradient."""
        import tensorflow as tf

        called = [layer for layer in self._trained_layers if layer.anchor is not None]
        anchors = {id(layer.anchor): layer for layer in called}
        anchors |= {id(layer.anchor.value): layer for layer in called}
        of_layer: dict[int, Any] = {}
        dense = []
        for gradient, target in pairs:
            if id(target) in anchors:
                of_layer[id(anchors[id(target)])] = gradient
            else:
                dense.append((gradient, target))
        found = []
        for layer in self._trained_layers:
            gradient = of_layer.get(id(layer))
            if isinstance(gradient, tf.IndexedSlices):
                found.append((gradient.values, gradient.indices))
            else:  # the step does not use its rows
                found.append((tf.zeros([0, layer.dim]), tf.zeros([0], tf.int64)))
        return dense, found

    def _gradients(self, pairs: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
        """Return the gradients by id of their Keras variable, dense, without the Nones."""
        known = {id(v): v for group in self._variables.trainable for v in group.variables}
        known |= {id(v.value): v for v in known.values()}
        found: dict[int, Any] = {}
        for gradient, target in pairs:
            variable = known.get(id(target))
            if variable is None:
                raise VariablesChanged(
                    f"train_step applies a gradient to {getattr(target, 'path', target)!r}, which "
                    "was not trainable when ctx.distribute(model) was called; distribute after the "
                    "model is complete"
                )
            if gradient is not None:
                found[id(variable)] = self._dense(gradient, variable)
        self._note_missing(
            [v for g in self._variables.trainable for v in g.variables if id(v) not in found]
        )
        if not found and not self._trained_layers:
            raise ValueError("No gradients provided for any variable.")
        return found

    def _dense(self, gradient: Any, variable: Any) -> Any:
        import tensorflow as tf

        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        num_bytes = tf.TensorShape(variable.shape).num_elements() * gradient.dtype.size
        if num_bytes > MAX_DENSIFIED_BYTES:
            line = dense_embeddings.replacement(self._model, variable)
            raise UnsupportedModel(
                f"the gradient of {variable.path!r} {tuple(variable.shape)} is sparse and would be "
                f"{num_bytes} bytes as a dense tensor every step, more than {MAX_DENSIFIED_BYTES}; "
                + (f"write {line}. Or " if line else "")
                + "map the ids to fewer rows (keras.layers.Hashing), make the rows shorter, or set "
                "the layer's trainable=False"
            )
        return tf.convert_to_tensor(gradient)

    def _note_missing(self, missing: Sequence[Any]) -> None:
        """Refuse steps in which a variable without gradient would move."""
        decaying = {
            id(v) for group in self._variables.trainable if group.decays for v in group.variables
        }
        if decayed := [v.path for v in missing if id(v) in decaying]:
            raise UnsupportedModel(
                f"{decayed} get no gradient, but the servers would apply the optimizer's "
                "weight_decay to them; set their layers' trainable=False, or call "
                "optimizer.exclude_from_weight_decay(var_list=[...]) before ctx.distribute(model)"
            )
        if missing and optimizers.moves_without_gradient(self._inner):
            raise UnsupportedModel(
                f"{[v.path for v in missing]} get no gradient, but on the servers "
                f"{type(self._inner).__name__} with these settings changes values whose gradient "
                "is zero; set their layers' trainable=False, or use another optimizer"
            )
        ids = frozenset(id(v) for v in missing)
        if self._without_gradient is None:
            if missing:
                warnings.warn(
                    f"Gradients do not exist for variables {[v.path for v in missing]} when "
                    "minimizing the loss; they stay as they are.",
                    stacklevel=2,
                )
            self._without_gradient = ids
        elif differing := ids ^ self._without_gradient:
            variables = [v for group in self._variables.trainable for v in group.variables]
            raise UnsupportedModel(
                f"{[v.path for v in variables if id(v) in differing]} have gradients in some kinds "
                "of batches and none in others, where the servers' momentum would move them and "
                "Keras would not. Let every batch reach the same variables"
            )

    def _unscale(self, gradients: dict[int, Any]) -> dict[int, Any]:
        import tensorflow as tf

        scale = self._optimizer.dynamic_scale if self._scaled else self._inner.loss_scale_factor
        if scale is None:
            return gradients
        return {key: g / tf.cast(scale, g.dtype) for key, g in gradients.items()}

    def _update_scale(self, finite: Any) -> None:
        """Halve the loss scale after a non-finite step, double it after enough finite ones."""
        import tensorflow as tf

        scale, counter = self._optimizer.dynamic_scale.value, self._optimizer.step_counter.value
        grown = tf.equal(counter, self._optimizer.dynamic_growth_steps - 1)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        count = tf.where(tf.logical_and(finite, tf.logical_not(grown)), counter + 1, 0)
        scale.assign(scale * factor)
        counter.assign(tf.cast(count, counter.dtype))

    def _or_zero(self, gradients: dict[int, Any], variable: Any) -> Any:
        import tensorflow as tf

        found = gradients.get(id(variable))
        return tf.zeros(variable.shape, variable.value.dtype) if found is None else found

    def _check_writes(self) -> None:
        """Refuse a step that writes the model's variables: the next pull would overwrite them."""
        import tensorflow as tf

        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        inside = {id(outer): inner for outer, inner in graph.captures}
        for group in self._variables.trainable:
            for variable in group.variables:
                handle = inside.get(id(variable.value.handle))
                writers = () if handle is None else handle.consumers()
                if any(op.type.startswith(_WRITES) for op in writers):
                    raise UnsupportedModel(
                        f"train_step writes {variable.path!r} itself (a second optimizer, or "
                        "assign); the parameter servers hold this variable, so update it through "
                        "self.optimizer.apply(gradients, variables) only"
                    )


class _InsideRows:
    """The flow of a step that is not compiled: each call looks its rows up."""

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return the rows of a call; see RowFlow."""
        return looked_up(layer, keys, training=True), keys


class _GivenRows:
    """The flow of a compiled step: rows of a prepared batch, in the order of its calls.

    Args:
        rows: by table [distinct + 1 or more, dim].
        positions: of each call that is ahead, [n] int32.
        calls: of the batch's kind.
    """

    def __init__(
        self, rows: dict[str, Any], positions: Sequence[Any], calls: Sequence[LayerCall]
    ) -> None:
        self._rows = rows
        self._positions = iter(positions)
        self._calls = iter(calls)

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return the rows of the next call; see RowFlow."""
        import tensorflow as tf

        call = next(self._calls, None)
        if call is None or call.layer is not layer:
            raise UnsupportedModel(
                f"train_step calls the layer {layer.name!r} in another order than when its ids "
                "were recorded; let it make the same calls in the same order each time it is traced"
            )
        if not call.is_ahead:
            return looked_up(layer, keys, training=True), keys
        positions = next(self._positions)
        return tf.gather(self._rows[layer.table], positions), positions


class Captured:
    """Replacement of the optimizer's `apply` during one step.

    Args:
        optimizer: the model's.
        place: where TensorFlow builds the step; `apply` must be called there.
    """

    def __init__(self, optimizer: Any, place: Any) -> None:
        self._optimizer = optimizer
        self._place = place
        self._pairs: list[tuple[Any, Any]] | None = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients instead of applying them.

        Args:
            grads: one tensor per trainable variable.
            trainable_variables: in the same order; required, though Keras has a default.
        """
        if self._pairs is not None:
            raise UnsupportedModel(
                "train_step applies gradients more than once in a step; the parameter servers take "
                "one gradient per step: add the losses, or the gradients, and apply once"
            )
        if _place() is not self._place:
            raise UnsupportedModel(
                "train_step applies its gradients inside a tf.function, tf.cond or tf.while_loop "
                "inside the step; remove that wrapper: the whole step is compiled anyway"
            )
        if trainable_variables is None:
            raise UnsupportedModel(
                "train_step calls optimizer.apply(gradients) without variables; pass them: "
                "optimizer.apply(gradients, self.trainable_variables)"
            )
        self._pairs = list(zip(list(grads), list(trainable_variables), strict=True))

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) as given to `apply`.

        Raises:
            UnsupportedModel: the step never applied any.
        """
        if self._pairs is None:
            raise UnsupportedModel(
                f"train_step did not call apply or apply_gradients of model.optimizer "
                f"({type(self._optimizer).__name__}), so nothing would reach the parameter "
                "servers; update the model through self.optimizer.apply(gradients, variables)"
            )
        return self._pairs


@contextmanager
def intercepted(optimizer: Any) -> Iterator[Captured]:
    """Make `optimizer.apply` of this one object keep its gradients while the block runs."""
    captured = Captured(optimizer, _place())
    optimizer.__dict__["apply"] = captured.apply  # not setattr: Keras would track it
    try:
        yield captured
    finally:
        del optimizer.__dict__["apply"]


def _place() -> Any:
    """Return the graph that is being built; None when running eagerly."""
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _all_finite(gradients: Sequence[Any]) -> Any:
    """Return a scalar bool, at the cost of one pass over the gradients when they are finite."""
    import tensorflow as tf

    squares = tf.add_n([tf.cast(tf.nn.l2_loss(gradient), tf.float32) for gradient in gradients])
    return tf.cond(
        tf.math.is_finite(squares),
        lambda: tf.constant(value=True),
        lambda: tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
        ),  # overflow?
    )


class Traces:
    """What was made of each kind of batch: nesting, dtypes, shapes without the batch dimension.

    Args:
        trace: makes it from the nested specs of a batch, given one by one.
    """

    def __init__(self, trace: Callable[..., Any]) -> None:
        self._trace = trace
        self._found: list[tuple[Any, list[Any], Any]] = []

    @property
    def newest(self) -> Any:
        """The nested specs of the newest kind of batch; None: there was none."""
        if not self._found:
            return None
        structure, specs, _ = self._found[-1]
        return tree.pack_sequence_as(structure, specs)

    def find(self, data: tuple[Any, ...]) -> Any:
        """Return what takes this batch; make it if there is none."""
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
    return leaf is None if spec is None else bool(spec.is_compatible_with(leaf))


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
