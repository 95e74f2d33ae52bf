"""Model signature: where a model is, and the names, dtypes and shapes of its inputs and outputs.

Covers: ModelSource, TensorInfo, ModelSignature and the check of the user's names.
Does not: read models (tfos.predict.loading).
Threads: any; pure data, which travels to Spark's Python workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from tfos.errors import SettingsError

DEFAULT_TAGS = "serve"
DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output: dtype as numpy calls it ("object" for text), shape without the rows."""

    dtype: str
    shape: tuple[int | None, ...]
    is_ragged: bool = False
    """Rows are lists of any length, and reach the model as tf.RaggedTensor."""
    is_id: bool = False
    """Whether an Embedding of tfos may get its integers."""
    has_rank: bool = True
    """Whether the number of dimensions is known; if not, `shape` is empty."""

    @property
    def is_float(self) -> bool:
        """Whether it takes floats, which round large integers."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def keras_dtype(self) -> str:
        """The dtype in Keras' notation."""
        return "string" if self.dtype == "object" else self.dtype

    def __str__(self) -> str:
        if not self.has_rank:
            return f"{self.keras_dtype} of unknown shape"
        sides = ", ".join("?" if each is None else str(each) for each in self.shape)
        return f"{self.keras_dtype}[{sides}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model is: at a path or URL that every executor sees, or its bytes."""

    path: str = ""
    """A `.keras` file, a SavedModel's directory, or an export with tables beside the model."""
    content: bytes = field(default=b"", repr=False)
    """Bytes of a `.keras` file, instead of a path."""
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    """The user's classes and functions that a `.keras` file names."""
    tags: str = DEFAULT_TAGS
    """Tags of a SavedModel, joined by commas."""
    name: str = DEFAULT_SIGNATURE
    """Name of the signature in a SavedModel."""
    custom_digest: str = field(default="", init=False, repr=False)
    """Digest of the custom objects' code: a file with another function is another model."""

    def __post_init__(self) -> None:
        if self.custom_objects:
            code = cloudpickle.dumps(dict(self.custom_objects))
            object.__setattr__(self, "custom_digest", hashlib.sha256(code).hexdigest())

    def __str__(self) -> str:
        return self.path or f"a model of {len(self.content)} bytes"


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of one model, as a task reports them."""

    digest: str
    """Digest of the model's files: another export at the same path is another model."""
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    is_ordered: bool = True
    """Whether `inputs` are in the model's own order; a SavedModel may not record it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature(ModelTensors):
    """The tensors of one model, and which bytes it was read from."""

    source: ModelSource

    @classmethod
    def of(cls, source: ModelSource, found: ModelTensors) -> ModelSignature:
        """Return the signature of a model that was read.

        Args:
            source: where the model is.
            found: its tensors.
        """
        return cls(
            source=source,
            digest=found.digest,
            inputs=found.inputs,
            outputs=found.outputs,
            is_ordered=found.is_ordered,
        )

    def ordered_inputs(self) -> list[str]:
        """Return the inputs' names in the model's own order.

        Raises:
            SettingsError: the order is unknown.
        """
        names = list(self.inputs)
        if not self.is_ordered and len(names) > 1:
            raise SettingsError(
                f"the SavedModel {self.source} does not record the order of its inputs "
                f"{', '.join(names)}. Name them in the order of the columns: "
                f"predict_column(path, inputs={names}). Or name the columns as the inputs are"
            )
        return names

    def check(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Refuse names that the model lacks.

        Args:
            inputs: names of the inputs that have columns.
            outputs: names of the outputs that become columns.

        Raises:
            SettingsError: a name is unknown or there twice, or an input has no column.
        """
        for what, asked, given in (
            ("input", inputs, self.inputs),
            ("output", outputs, self.outputs),
        ):
            unknown = set(asked) - set(given)
            missing = set(given) - set(asked) if what == "input" else ()
            if unknown or missing or not asked or len(set(asked)) != len(asked):
                has = ", ".join(f"{name} {info}" for name, info in sorted(given.items()))
                raise SettingsError(
                    f"{what}s {sorted(asked)} are named, but the model {self.source} has {has}; "
                    "name "
                    + ("each of these once" if what == "input" else "some of these, each once")
                )
