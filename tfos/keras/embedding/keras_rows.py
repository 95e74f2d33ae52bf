"""Rows of a plain Keras model: what its Embedding has learnt, by the ids of its lookup layer.

    vocabulary of the lookup   [mask] [unknown …] id id id …
    rows of the Embedding        0        1 …      the row of each id

Covers: IntegerLookup and StringLookup before a keras.layers.Embedding, or ids that are row numbers.
Does not: load rows into a table (loading).      Threads: the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfos.errors import SettingsError
from tfos.keras.export import load_model

Array = np.ndarray[Any, np.dtype[Any]]
BATCH_ROWS = 1 << 16
_LOOKUPS = (keras.layers.IntegerLookup, keras.layers.StringLookup)


def rows_of(model: Any, embedding: str, lookup: str | None = None) -> KerasRows:
    """Return the rows of a plain Keras model's Embedding, for `ctx.load_rows`.

    The rows of the mask and of unknown ids are left out: `Embedding(unseen=…)` says what those are.

    Args:
        model: a Keras model, or the path or URL of a `.keras` file, read by each loop.
        embedding: name of its keras.layers.Embedding.
        lookup: name of the IntegerLookup or StringLookup before it; None: ids are row numbers.

    Returns:
        Batches of (ids, rows): n integers or strings, and [n, dim] float32 (float64 of a layer of
        those). They may be read again. A loop raises SettingsError: there is no such layer, both do
        not fit together, or the Embedding is quantized; OSError: there is no such file.
    """
    return KerasRows(model, embedding, lookup)


@dataclass(frozen=True)
class KerasRows:
    """What `rows_of` returns."""

    model: Any
    embedding: str
    lookup: str | None

    def __iter__(self) -> Iterator[tuple[Sequence[Any], Array]]:
        model = self.model
        if isinstance(model, str | os.PathLike):
            model = load_model(model, compile=False)
        layer = _layer(model, self.embedding, keras.layers.Embedding)
        ids, first = _ids(model, layer, self.lookup)
        if layer.quantization_mode is not None:
            raise SettingsError(
                f"layer {layer.name!r} is quantized ({layer.quantization_mode}): its weights are "
                "not its vectors; use the model as it was before quantize()"
            )
        table = keras.ops.convert_to_numpy(layer.embeddings)  # of LoRA the sum
        rows = table if table.dtype == np.float64 else np.asarray(table, np.float32)
        for start in range(0, len(ids), BATCH_ROWS):
            some = ids[start : start + BATCH_ROWS]
            yield some, np.ascontiguousarray(rows[first + start : first + start + len(some)])


def _ids(model: Any, layer: Any, lookup: str | None) -> tuple[Sequence[Any], int]:
    """Return the ids in the order of their rows, and the number of the first one's row."""
    if lookup is None:
        return range(layer.input_dim), 0
    found = _layer(model, lookup, _LOOKUPS)
    if found.output_mode != "int":
        raise SettingsError(
            f"layer {lookup!r} has output_mode={found.output_mode!r}, which numbers no rows; name "
            "the lookup layer with output_mode='int' whose output the Embedding takes"
        )
    num_known = len(found.get_vocabulary())
    ids = found.get_vocabulary(include_special_tokens=False)
    if num_known > layer.input_dim:
        raise SettingsError(
            f"layer {lookup!r} numbers {num_known} ids, the Embedding {layer.name!r} has "
            f"{layer.input_dim} rows; name the lookup layer that is in front of it"
        )
    return ids, num_known - len(ids)


def _layer(model: Any, name: str, kinds: Any) -> Any:
    layers = [each for each in model._flatten_layers() if isinstance(each, kinds)]
    found = [each for each in layers if each.name == name]
    if len(found) == 1:
        return found[0]
    wanted = " or ".join(
        kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    )
    known = ", ".join(repr(each.name) for each in layers) or "none"
    raise SettingsError(
        f"the model {model.name!r} has {len(found)} layers {name!r} that are {wanted}, expected 1; "
        f"it has {known}"
    )
