"""Gradient step, compiled: forward, backward, and the flat gradient of each group.

Covers: running the model's own `train_step` (ordinary or overridden) with its optimizer's `apply`
intercepted; clipping, the finite check, the step's scalars.
Does not: send anything or touch variables of the servers (tfos.keras.step.exchange).
Threads: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras import tree

from tfos.errors import UnsupportedModel, VariablesChanged
from tfos.keras.compiled_call import CompiledCall
from tfos.keras.data.label_shapes import check_labels
from tfos.keras.data.lists import explained
from tfos.keras.embedding import dense_embeddings, row_flow
from tfos.keras.embedding.batch_rows import BatchRows, RowGradient
from tfos.keras.embedding.ids_ahead import IdsAhead, LayerCall, record
from tfos.keras.step import optimizers
from tfos.keras.step.gradients.accumulation import Accumulator
from tfos.keras.step.gradients.interception import Captured, intercepted
from tfos.keras.step.gradients.loss_scale import LossScale
from tfos.keras.step.gradients.missing_gradients import MissingGradients
from tfos.keras.step.gradients.own_writes import OwnWrites
from tfos.keras.step.gradients.row_flows import GivenRows, InsideRows
from tfos.keras.step.gradients.skipped_step import MetricsBefore, StatesBefore
from tfos.keras.step.gradients.traces import Traces
from tfos.keras.step.variables import Variables, has_values


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step: tensors that were not sent yet."""

    logs: Any
    gradients: Sequence[Sequence[Any]]
    """Flat tensors of each trainable group, whose concatenation is its gradient."""
    statistics: Sequence[Any]
    """One flat tensor per group of statistics."""
    finite: Any
    """Scalar bool: whether no gradient has a NaN or an infinity."""
    complete: Any
    """Scalar bool: whether to push the gradients, not only accumulate them."""
    scalars: Any
    """float64: the learning rate, then the scalars of `optimizers.step_scalars`."""
    row_gradients: Sequence[RowGradient] = ()
    """Row gradient of each trained Embedding, in the order of `GradientStep.trained_layers`."""


class GradientStep:
    """The compiled step of one model.

    Args:
        model: the compiled model.
        variables: the model's variables, in the servers' groups.
        clips_here: whether the worker clips gradients before they are pushed.
        skips: whether a step whose gradient is not finite is left out, of the metrics as well. The
            statistics of layers skip it, too, also where it is skipped to search a loss scale.

    Attributes:
        trained_layers: the Embeddings whose rows are trained.
    """

    def __init__(self, model: Any, variables: Variables, *, clips_here: bool, skips: bool) -> None:
        import tensorflow as tf

        self._model = model
        self._optimizer = model.optimizer
        self._inner = optimizers.unwrap(model.optimizer)
        self._scale = LossScale(model.optimizer)
        self._variables = variables
        self._clips_here = clips_here
        self._skips = skips
        self._missing = MissingGradients(variables, self._inner)
        self._accumulator: Accumulator | None = None
        if optimizers.batches_per_update(model.optimizer) > 1:
            self._accumulator = Accumulator(model.optimizer, variables.trained)
        self.trained_layers = variables.trained_embeddings
        self._calls: Sequence[LayerCall] = ()
        compiled = tf.function(self._run, jit_compile=bool(model.jit_compile), autograph=False)
        self._traces = Traces(lambda *kind: CompiledCall(compiled.get_concrete_function(*kind)))
        self._ids_ahead = Traces(self._record)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether non-finite steps are expected: a loss scale is being searched."""
        return self._scale.is_searched

    @property
    def accumulates(self) -> bool:
        """Whether a push needs several batches."""
        return self._accumulator is not None

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
            rows: rows of the batch, filled; None: the model has no tables.
        """
        given: tuple[Any, ...] = (data, {}, [])
        if rows is not None:
            self._calls = rows.calls
            given = (data, rows.tensors, rows.positions)
        with explained(self._model, data):
            run = self._run if self._model.run_eagerly else self._traces.find(given)
            return StepOutput(*run(*given))

    def _record(self, data: Any) -> IdsAhead:
        layers = self._variables.embeddings
        if self._model.run_eagerly:
            calls = tuple(LayerCall(layer, "run_eagerly=True") for layer in layers)
            return IdsAhead(calls, lambda _: ())
        if self._model.jit_compile:
            self._refuse_strings(data)
        ids = record(self._own_step, data, layers)
        inside = next((call for call in ids.calls if not call.is_ahead), None)
        if inside is not None and self._model.jit_compile:
            raise UnsupportedModel(
                f"layer {inside.layer.name!r} looks its rows up inside the step, because "
                f"{inside.why_inside}. XLA cannot compile that; compile the model with "
                "jit_compile=False"
            )
        return ids

    def _refuse_strings(self, data: Any) -> None:
        """Refuse strings that the compiled step would get as arguments beside the positions."""
        import tensorflow as tf

        parts = data if isinstance(data, tuple) else (data,)
        named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        strings = [
            "/".join(map(str, path))
            for path, leaf in tree.flatten_with_path(named)
            if getattr(leaf, "dtype", None) == tf.string
        ]
        if strings:
            raise UnsupportedModel(
                f"the batch has the strings {strings}, but XLA takes none. Compile the model with "
                "jit_compile=False, hash features to integers before the model gets them "
                "(keras.layers.Hashing), or drop in map() what it does not use"
            )

    def _own_step(self, data: Any) -> tuple[Any, Captured]:
        if isinstance(data, tuple) and len(data) > 1:  # if traced, once per kind of batch
            check_labels(self._model, data[1])
        with intercepted(self._optimizer) as captured:
            return self._model.train_step(data), captured

    def _run(self, data: Any, rows: dict[str, Any], positions: list[Any]) -> tuple[Any, ...]:
        import tensorflow as tf

        metrics = MetricsBefore(self._model) if self._skips else None
        statistics_before = None
        if self._skips or self._scale.is_searched:
            groups = self._variables.statistics
            statistics_before = StatesBefore(v for group in groups for v in group.variables)
        writes = OwnWrites(self._variables)
        layers = self._variables.embeddings
        flow = (
            InsideRows(layers)
            if self._model.run_eagerly
            else GivenRows(rows, positions, self._calls, layers)
        )
        with row_flow.flowing(flow, layers):
            logs, captured = self._own_step(data)
        pairs, row_gradients = self._split(captured.pairs(), flow.called)
        gradients = self._gradients(pairs)
        writes.check()
        unscaled = self._scale.removed_from
        gradients = {key: unscaled(gradient) for key, gradient in gradients.items()}
        row_gradients = [(unscaled(values), indices) for values, indices in row_gradients]
        finite = _all_finite([*gradients.values(), *(values for values, _ in row_gradients)])
        self._scale.update(finite)
        if metrics is not None:
            logs = metrics.restored_unless(finite, logs)
        if statistics_before is not None:
            statistics_before.restored_unless(finite)
        complete = tf.constant(value=True)
        if self._accumulator is not None:
            gradients, complete = self._accumulator.add(gradients, finite)
        if self._clips_here:
            gradients = self._clipped(gradients)
        parts = [
            group.parts([_or_zero(gradients, variable) for variable in group.variables])
            for group in self._variables.trainable
        ]
        statistics = [group.flatten(group.variables) for group in self._variables.statistics]
        dtypes = [group.dtype for group in self._variables.trainable]
        dtypes += ["float32"] if self._variables.embeddings else []  # for the tables
        scalars = tf.stack(optimizers.step_scalars(self._optimizer, dtypes))
        if self._accumulator is not None:
            self._accumulator.count(finite)
        return logs, parts, statistics, finite, complete, scalars, row_gradients

    def _clipped(self, gradients: dict[int, Any]) -> dict[int, Any]:
        inner = self._inner
        if not (inner.clipnorm or inner.global_clipnorm or inner.clipvalue):
            return gradients
        clipped = inner._clip_gradients(list(gradients.values()))
        return dict(zip(gradients, clipped, strict=True))

    def _split(
        self, pairs: Sequence[tuple[Any, Any]], used: Sequence[Any]
    ) -> tuple[list[tuple[Any, Any]], list[RowGradient]]:
        """Return the pairs without those of anchors, and each trained layer's row gradient.

        Args:
            pairs: pairs of gradient and variable, as the model's train_step gave them.
            used: the layers that the step called.
        """
        import tensorflow as tf

        called = [layer for layer in self.trained_layers if layer.anchor is not None]
        anchors = {id(layer.anchor): layer for layer in called}
        anchors |= {id(layer.anchor.value): layer for layer in called}
        of_layer: dict[int, Any] = {}
        dense = []
        for gradient, target in pairs:
            if (layer := anchors.get(id(target))) is not None:
                if id(layer) in of_layer:
                    raise _given_twice(layer.path or layer.name)
                of_layer[id(layer)] = gradient
            else:
                dense.append((gradient, target))
        found = []
        for layer in self.trained_layers:
            gradient = of_layer.get(id(layer))
            if isinstance(gradient, tf.IndexedSlices):
                found.append((gradient.values, gradient.indices))
            elif gradient is not None and any(layer is each for each in used):
                raise _made_dense(layer)
            else:  # the step does not use its rows
                found.append((tf.zeros([0, layer.dim]), tf.zeros([0], tf.int64)))
        return dense, found

    def _gradients(self, pairs: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
        """Return the gradients by id of their Keras variable, dense, without the Nones."""
        known = {id(v): v for v in self._variables.trained}
        known |= {id(v.value): v for v in known.values()}
        found: dict[int, Any] = {}
        for gradient, target in pairs:
            variable = known.get(id(target))
            if variable is None:
                if not has_values(target):
                    continue
                raise VariablesChanged(
                    f"train_step applies a gradient to {getattr(target, 'path', target)!r}, which "
                    "was not trainable when ctx.distribute(model) was called; distribute after the "
                    "model is complete"
                )
            if id(variable) in found:
                raise _given_twice(variable.path)
            if gradient is not None:
                found[id(variable)] = self._dense(gradient, variable)
        self._missing.check([v for v in self._variables.trained if id(v) not in found])
        if not found and not self.trained_layers:
            raise ValueError("No gradients provided for any variable.")
        return found

    def _dense(self, gradient: Any, variable: Any) -> Any:
        import tensorflow as tf

        if not isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        num_bytes = tf.TensorShape(variable.shape).num_elements() * gradient.dtype.size
        if num_bytes > dense_embeddings.MAX_DENSIFIED_BYTES:
            line = dense_embeddings.replacement(self._model, variable)
            raise UnsupportedModel(
                f"the gradient of {variable.path!r} {tuple(variable.shape)} is sparse and would be "
                f"{num_bytes} bytes as a dense tensor every step, more than "
                f"{dense_embeddings.MAX_DENSIFIED_BYTES}; "
                + (f"write {line}. Or " if line else "")
                + "map the ids to fewer rows (keras.layers.Hashing), make the rows shorter, or set "
                "the layer's trainable=False"
            )
        # As convert_to_tensor does, but also of slices without a shape, as a step may make them.
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def _given_twice(path: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"train_step gives {path!r} twice in one apply, but the parameter servers take one "
        "gradient per variable and step; add the gradients, or differentiate the sum of the losses"
    )


def _made_dense(layer: Any) -> UnsupportedModel:
    return UnsupportedModel(
        f"the step makes the gradient of layer {layer.path!r} a dense tensor, which no longer says "
        "which rows it belongs to. A call inside a loop, an RNN's cell or tf.map_fn does that, and "
        "a sum over model.trainable_variables in the loss, and tf.where, tf.add_n or "
        "ops.nan_to_num on the gradient, and zeros instead of None. Call the layer once, on all "
        f"ids, before a loop, leave its variable of shape {tuple(layer.anchor.shape)} out of such "
        "a sum, change `gradient.values` of the tf.IndexedSlices, and leave None as it is"
    )


def _or_zero(gradients: dict[int, Any], variable: Any) -> Any:
    import tensorflow as tf

    found = gradients.get(id(variable))
    return tf.zeros(variable.shape, variable.value.dtype) if found is None else found


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
