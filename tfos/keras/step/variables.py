"""Variables: which of them the servers hold, in which flat group, and compiled copies in and out.

Covers: groups (trainable, statistics, frozen), names, the manifest, flatten and assign.
Does not: push or pull (tfos.keras.step.exchange), compute gradients (tfos.keras.step.gradients).
Threads: immutable after construction.

Groups, each one flat buffer in order of the model's variables:
    trainable        pushes gradients, pulls values
    trainable.exempt the same, without the optimizer's weight decay
    statistics       float variables that layers update (BatchNorm): pushes and pulls values
    frozen           float weights that no step updates: seeded by the chief, pulled once
Variables of another dtype have a separate group ("trainable.float64"). float16 and bfloat16
variables have float32 masters on the servers. Seed generators and integers stay local.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from ps.compression.format import Compression
from ps.manifest.manifest import (
    Average,
    Consistency,
    Frozen,
    GroupSpec,
    Manifest,
    ParamSpec,
    RuleConfig,
)
from tfos.errors import UnsupportedModel, VariablesChanged
from tfos.keras.embedding.layer import Embedding
from tfos.keras.step import optimizers
from tfos.keras.step.table_specs import embeddings_of, table_specs

MASTER_DTYPES = {
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float64",
}
"""Dtype on the servers by dtype of the variable."""
LEAST_PART_ELEMENTS = 1 << 14
"""Elements of the smallest gradient that is sent from its own memory: copying a smaller one costs
less than one more part of a message."""
LEAST_ALONE_ELEMENTS = 1 << 12
"""Elements of the smallest variable that one operation cuts alone: copying a smaller one, because a
neighbour is not aligned, costs less."""
MOVING_COPY = (
    "For a copy that changes while the model trains (a teacher, a target network), compile with "
    "use_ema=True: the servers then keep the average of the weights. Or hold the copy's values in "
    "the model itself, with self.add_weight(trainable=False): these values are pushed and saved"
)
"""Advice for frozen weights that change."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class VariableGroup:
    """Variables in one flat buffer on the servers, in the order of the model's variables.

    Attributes:
        name: name of the group in the manifest.
        dtype: dtype of the flat buffer.
        variables: Keras variables, each with any shape.
        names: their unique names on the servers.
        trainable: whether gradients are pushed; otherwise values are.
        decays: whether the optimizer's weight decay applies.
    """

    name: str
    dtype: Literal["float32", "float64"]
    variables: tuple[Any, ...]
    names: tuple[str, ...]
    trainable: bool
    decays: bool

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each variable."""
        return [int(np.prod(variable.shape, dtype=np.int64)) for variable in self.variables]

    @property
    def ranges(self) -> list[tuple[Any, slice]]:
        """Each variable with its part of the flat buffer."""
        ends = np.cumsum(self.sizes).tolist()
        parts = zip(self.variables, self.sizes, ends, strict=True)
        return [(variable, slice(end - size, end)) for variable, size, end in parts]

    def values(self) -> Array:
        """Return the current values as a new array of shape [elements] and the group's dtype."""
        import tensorflow as tf

        flat = np.empty(sum(self.sizes), self.dtype)
        for variable, part in self.ranges:  # `variable.numpy()` would be one more copy
            flat[part] = np.asarray(tf.reshape(variable.value, [-1]))
        return flat

    def flatten(self, tensors: Sequence[Any]) -> Any:
        """Return one tensor of shape [elements] and the group's dtype; for compiled functions."""
        import tensorflow as tf

        flat = [tf.reshape(tf.cast(tensor, self.dtype), [-1]) for tensor in tensors]
        return flat[0] if len(flat) == 1 else tf.concat(flat, 0)

    def parts(self, tensors: Sequence[Any]) -> list[Any]:
        """Return flat tensors that `flatten` would join; for compiled functions.

        Joining large ones copies all of them into memory that is new in each step.
        """
        runs: list[list[Any]] = []
        is_open = False
        for tensor, size in zip(tensors, self.sizes, strict=True):
            is_small = size < LEAST_PART_ELEMENTS
            if is_small and is_open:
                runs[-1].append(tensor)
            else:
                runs.append([tensor])
            is_open = is_small
        return list(map(self.flatten, runs))

    def assign(self, flat: Any) -> None:
        """Assign the parts of a tensor of shape [elements], which may share its memory.

        Small variables next to each other are cut by one operation: of hundreds, cutting each took
        most of the time before the first step.
        """
        import tensorflow as tf

        for is_small, run in itertools.groupby(self.ranges, lambda each: _is_small(each[1])):
            members = list(run)
            cuts = [part_range for _, part_range in members]
            if is_small and len(cuts) > 1:
                sizes = [cut.stop - cut.start for cut in cuts]
                parts = tf.split(flat[cuts[0].start : cuts[-1].stop], sizes)
            else:
                parts = [flat[cut] for cut in cuts]
            for (variable, _), part in zip(members, parts, strict=True):
                value = tf.cast(tf.reshape(part, variable.shape), variable.value.dtype)
                variable.value.assign(value, read_value=False)


@dataclass(frozen=True, slots=True)
class Variables:
    """All variables of a model that concern the servers."""

    groups: tuple[VariableGroup, ...]
    """Groups that a push and a pull move."""
    frozen: tuple[VariableGroup, ...]
    """What is pulled once."""
    embeddings: tuple[Embedding, ...]
    """The layers whose rows live in tables."""
    trained_embeddings: tuple[Embedding, ...]
    """Those whose rows are trained."""

    @property
    def trainable(self) -> tuple[VariableGroup, ...]:
        """The groups whose gradients are pushed."""
        return tuple(group for group in self.groups if group.trainable)

    @property
    def trained(self) -> list[Any]:
        """The variables in those groups."""
        return [variable for group in self.trainable for variable in group.variables]

    @property
    def held(self) -> list[Any]:
        """The variables that no step changes."""
        return [variable for group in self.frozen for variable in group.variables]

    @property
    def statistics(self) -> tuple[VariableGroup, ...]:
        """The groups whose values are pushed."""
        return tuple(group for group in self.groups if not group.trainable)

    def manifest(
        self,
        optimizer: Any,
        *,
        consistency: Consistency,
        reduction: Literal["mean", "sum"],
        staleness_bound: int,
        staleness_aware: bool,
        compression: Compression,
    ) -> Manifest:
        """Return the manifest of the groups.

        Args:
            optimizer: the model's optimizer; its rule becomes that of the trainable groups.
            consistency: the training mode.
            reduction: at a barrier, "mean" weighted by rows, or "sum".
            staleness_bound: ssp only: number of steps that a worker may be ahead of the slowest.
            staleness_aware: whether the servers divide the rate by 1 + staleness.
            compression: format of pushed float32 gradients.

        Raises:
            UnsupportedModel: compression is set, and no gradient is float32.
        """
        if compression != "none" and all(group.dtype != "float32" for group in self.trainable):
            reason = "all trainable variables are float64; leave it out, or train in float32"
            if not self.trainable:
                reason = "the model trains only tables, whose rows it does not pack; leave it out"
            raise UnsupportedModel(
                f"compression={compression!r} packs dense float32 gradients, but {reason}"
            )
        specs = []
        for group in (*self.groups, *self.frozen):
            rule: RuleConfig = Frozen() if group in self.frozen else Average()
            if group.trainable:
                rule = optimizers.rule_of(optimizer, consistency=consistency, decays=group.decays)
            shapes = [tuple(int(dim) for dim in v.shape) for v in group.variables]
            named = tuple(map(ParamSpec, group.names, shapes))
            is_packed = group.trainable and group.dtype == "float32"
            packing = compression if is_packed else "none"
            specs.append(GroupSpec(group.name, group.dtype, rule, named, packing))
        return Manifest(
            groups=tuple(specs),
            tables=table_specs(self.embeddings, optimizer),
            consistency=consistency,
            reduction=reduction,
            staleness_bound=staleness_bound,
            staleness_aware=staleness_aware,
        )

    def check_unchanged(self, model: Any, since: str, place: str) -> None:
        """Refuse a model whose variables have changed.

        Args:
            model: the model that had these variables.
            since: call that bound the model to its servers, for the message.
            place: where a changed model can be trained, for the message.

        Raises:
            VariablesChanged: the text names the new and the missing variables and Embeddings.
        """
        bound = self.trained
        now = [v for v in model.trainable_variables if has_values(v)]
        trained = [layer for layer in embeddings_of(model) if layer.trainable]
        if {id(v) for v in bound} == {id(v) for v in now} and trained == [*self.trained_embeddings]:
            return
        before = {id(v): v.path for v in bound} | _paths(self.trained_embeddings)
        after = {id(v): v.path for v in now} | _paths(trained)
        added = [path for key, path in after.items() if key not in before]
        gone = [path for key, path in before.items() if key not in after]
        raise VariablesChanged(
            f"the model's trainable variables changed after {since}: new {added}, no longer "
            f"trainable {gone}. Add layers and set `trainable` before that, then compile. To train "
            "the trained model with other layers (unfrozen, enable_lora), save it, load it, change "
            f"and compile it, and train it {place}"
        )


def collect(model: Any, optimizer: Any) -> Variables:
    """Sort the variables of a built model into groups.

    Args:
        model: a built Keras model.
        optimizer: the model's optimizer, which decides what has weight decay.

    Raises:
        UnsupportedModel: the servers cannot hold a variable, or there is none to train.
    """
    embeddings = embeddings_of(model)
    trainable = [v for v in model.trainable_variables if has_values(v)]
    if not trainable and not any(layer.trainable for layer in embeddings):
        raise UnsupportedModel(
            "the model has no trainable variables, so a fit would change nothing: set "
            "trainable=True on a layer or tfos.keras.Embedding, or call evaluate or predict"
        )
    for variable in trainable:
        _check_trainable(variable)
    statistics, frozen = _not_trainable(model)
    names = _unique_names([*trainable, *statistics, *frozen])
    inner = optimizers.unwrap(optimizer)
    decays = bool(inner.weight_decay)
    buckets: dict[tuple[str, str], list[Any]] = {}
    for variable in trainable:
        exempt = decays and not inner._use_weight_decay(variable.value)
        kind = "trainable.exempt" if exempt else "trainable"
        buckets.setdefault((kind, master_dtype(variable)), []).append(variable)
    for kind, members in (("statistics", statistics), ("frozen", frozen)):
        for variable in members:
            buckets.setdefault((kind, master_dtype(variable)), []).append(variable)
    groups = tuple(
        VariableGroup(
            name=kind if dtype == "float32" else f"{kind}.{dtype}",
            dtype="float32" if dtype == "float32" else "float64",
            variables=tuple(members),
            names=tuple(names[id(variable)] for variable in members),
            trainable=kind not in ("statistics", "frozen"),
            decays=decays and kind == "trainable",
        )
        for (kind, dtype), members in buckets.items()
    )
    moving = tuple(group for group in groups if not group.name.startswith("frozen"))
    trained = tuple(layer for layer in embeddings if layer.trainable)
    return Variables(moving, groups[len(moving) :], embeddings, trained)  # the frozen are the last


def raw_bytes(values: Any, dtype: Any = None) -> Array:
    """Return the bytes of values, uint8, for a bitwise comparison; over their memory, no copy.

    Args:
        values: a tensor or an array.
        dtype: numpy dtype to which the values are cast first; None: their own.
    """
    array = np.asarray(values if values.ndim else values[None])  # numpy takes no bfloat16 scalar
    if dtype is not None:
        array = array.astype(dtype, copy=False)
    return array.reshape(-1).view(np.uint8)


def _paths(layers: Sequence[Embedding]) -> dict[int, str]:
    return {id(layer): layer.path or layer.name for layer in layers}


def has_values(variable: Any) -> bool:
    """Return whether servers hold anything of it; the anchor of an Embedding has no elements.

    Args:
        variable: a Keras variable, or TensorFlow's.
    """
    return 0 not in variable.shape


def _not_trainable(model: Any) -> tuple[list[Any], list[Any]]:
    """Split float non-trainable weights into those that layers update and those that are frozen."""
    own: set[int] = set()
    for layer in model._flatten_layers():
        if layer.trainable and not isinstance(layer, keras.layers.Normalization):  # by `adapt` only
            own.update(id(variable) for variable in layer._non_trainable_variables)
    statistics: list[Any] = []
    frozen: list[Any] = []
    for variable in model.non_trainable_weights:
        if keras.backend.standardize_dtype(variable.dtype) in MASTER_DTYPES:
            (statistics if id(variable) in own else frozen).append(variable)
    return statistics, frozen


def _check_trainable(variable: Any) -> None:
    if keras.backend.standardize_dtype(variable.dtype) not in MASTER_DTYPES:
        raise UnsupportedModel(
            f"trainable variable {variable.path!r} is {variable.dtype}; the parameter servers hold "
            f"{', '.join(MASTER_DTYPES)}"
        )
    if variable.constraint is not None:
        raise UnsupportedModel(
            f"variable {variable.path!r} has the constraint {variable.constraint!r}, which the "
            "parameter servers cannot apply after their update; remove it, or use a regularizer"
        )
    if getattr(variable, "overwrite_with_gradient", False):
        raise UnsupportedModel(
            f"variable {variable.path!r} is overwritten with its gradient (float8 training), which "
            "the parameter servers do not do; use mixed_bfloat16 or mixed_float16"
        )


def _is_small(part: slice) -> bool:
    return int(part.stop - part.start) < LEAST_ALONE_ELEMENTS


def master_dtype(variable: Any) -> str:
    """Return the dtype in which the servers hold a variable, and in which gradients are summed."""
    return MASTER_DTYPES[keras.backend.standardize_dtype(variable.dtype)]


def _unique_names(variables: Sequence[Any]) -> dict[int, str]:
    names: dict[int, str] = {}
    taken: set[str] = set()
    for position, variable in enumerate(variables):
        name = variable.path if variable.path not in taken else f"{variable.path}#{position}"
        taken.add(name)
        names[id(variable)] = name
    return names
