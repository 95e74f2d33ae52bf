"""SavedModel over Arrow: a signature's tensors, and the task that fills columns with its outputs.

Covers: reading names, dtypes and shapes; batches across rows and record batches; the signature's
traced function, loaded once per Python process.
Does not: know spark.ml (tfos.tensorflowonspark.pipeline); call `model.predict`.
Runs in: Spark's Python workers. Threads: one. TensorFlow is imported in functions only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from feeding.arrow.encoder import ArrowEncoder
from feeding.columnar.builder import Collector
from feeding.errors import PathError, RowError
from feeding.filesystem.location import LOCAL, parse
from tfos.errors import SettingsError

DEFAULT_TAGS = "serve"
DEFAULT_SIGNATURE = "serving_default"
Arrays = dict[str, Any]
"""By tensor name: [rows, *shape]."""
_loaded: dict[tuple[str, str, str, str], Any] = {}
"""The one model that this process has loaded, by SavedSignature's identity."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output: dtype as numpy calls it ("object" for text), shape without the rows."""

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sides = ", ".join("?" if each is None else str(each) for each in self.shape)
        return f"{'string' if self.dtype == 'object' else self.dtype}[{sides}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSignature:
    """One signature of a SavedModel, and which bytes it was read from."""

    path: str
    tags: str
    name: str
    digest: str
    """Of the graph and the index of the weights: another export is another model."""
    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]

    def check(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Refuse names that the signature lacks.

        Args:
            inputs: names of the mapped inputs.
            outputs: names of the mapped outputs.

        Raises:
            SettingsError: a name is unknown, or an input is not mapped.
        """
        for what, asked, given in (
            ("input", inputs, self.inputs),
            ("output", outputs, self.outputs),
        ):
            unknown = sorted(set(asked) - set(given))
            missing = sorted(set(given) - set(asked)) if what == "input" else []
            if unknown or missing:
                has = ", ".join(f"{name} {info}" for name, info in sorted(given.items()))
                raise SettingsError(
                    f"{what}_mapping names the {what}s {sorted(asked)}, signature {self.name!r} of "
                    f"{self.path} has {has}"
                )


def read_signature(path: str, tags: str = DEFAULT_TAGS, name: str = "") -> SavedSignature:
    """Return a signature of a SavedModel.

    Args:
        path: path or URL of the directory.
        tags: joined by commas.
        name: of the signature; empty: serving_default.

    Raises:
        SettingsError: there is no SavedModel, or no such signature in it.
    """
    name = name or DEFAULT_SIGNATURE
    with _on_disk(path) as directory:
        function = _signature(_load(directory, tags), path, name)
        digest = _digest(directory)
    _, keywords = function.structured_input_signature
    signature = SavedSignature(
        path=path,
        tags=tags,
        name=name,
        digest=digest,
        inputs={key: _info(spec) for key, spec in keywords.items()},
        outputs={key: _info(spec) for key, spec in function.structured_outputs.items()},
    )
    _keep(signature, function)
    return signature


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictTask:
    """For `df.select(columns).mapInArrow`: the outputs of a signature, row by row."""

    signature: SavedSignature
    inputs: tuple[str, ...]
    """Names of the inputs, by column."""
    outputs: tuple[tuple[str, str], ...]
    """Name of each output, and its column."""
    batch_size: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield record batches of the output columns, one row per row.

        Raises:
            RowError: a value does not fit the signature; names column and value.
        """
        predict = _function(self.signature)
        held: Arrays = {}
        first_row = 0
        for batch in filter(len, batches):
            arrays = self._arrays(batch, first_row)
            first_row += batch.num_rows
            if held:
                arrays = {name: np.concatenate([held[name], arrays[name]]) for name in arrays}
            num_rows = len(next(iter(arrays.values())))
            whole = num_rows - num_rows % self.batch_size
            if whole:
                yield self._results(predict, arrays, whole)
            held = {name: values[whole:] for name, values in arrays.items()}
        rest = len(next(iter(held.values()))) if held else 0
        if rest:
            yield self._results(predict, held, rest)

    def _arrays(self, batch: pa.RecordBatch, first_row: int) -> Arrays:
        names = tuple(batch.schema.names)
        out = Collector(0, first_row)
        ArrowEncoder(names).encode(out, batch)
        found: Arrays = {}
        for column, spec, name in zip(out.columns, out.specs, self.inputs, strict=True):
            info = self.signature.inputs[name]
            if spec.kind in ("str", "bytes"):
                values = _texts(column.values, column.offsets)
            elif spec.kind == "tensor":
                values = column.values
            else:
                raise out.refuse(spec.name, 0, f"lists of several lengths; input {name} is {info}")
            found[name] = _fitted(values, info, f"column {spec.name!r}, input {name!r}")
        return found

    def _results(self, predict: Any, arrays: Arrays, num_rows: int) -> pa.RecordBatch:
        parts: dict[str, list[Any]] = {name: [] for name, _ in self.outputs}
        for start in range(0, num_rows, self.batch_size):
            stop = min(start + self.batch_size, num_rows)
            given = {name: _tensor(values[start:stop]) for name, values in arrays.items()}
            answers = predict(**given)
            for name, part in parts.items():
                part.append(_checked(answers[name].numpy(), stop - start, name))
        columns = [_arrow(np.concatenate(part)) for part in parts.values()]
        return pa.RecordBatch.from_arrays(columns, [column for _, column in self.outputs])


def _on_disk(path: str) -> Any:
    """Return a context manager of the local directory that holds the SavedModel."""
    try:
        source = parse(path)
    except PathError as error:
        raise SettingsError(f"export_dir: {error}") from error
    if source.scheme == LOCAL:
        return contextlib.nullcontext(source.path)
    return _downloaded(source)


def _downloaded(source: Any) -> Any:
    from tfos.files import transfer

    @contextlib.contextmanager
    def download() -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tfos-model-") as staging:
            local = Path(staging) / "model"
            transfer.download(source, local)
            yield str(local)

    return download()


def _load(directory: str, tags: str) -> Any:
    import tensorflow as tf

    try:
        return tf.saved_model.load(directory, tags=[tag for tag in tags.split(",") if tag])
    except (OSError, RuntimeError) as error:
        raise SettingsError(
            f"no SavedModel with tags {tags!r} in {directory}: {error}. Export one by "
            "compat.export_saved_model(model, export_dir, is_chief), and setExportDir(export_dir)"
        ) from error


def _signature(model: Any, path: str, name: str) -> Any:
    if name not in model.signatures:
        raise SettingsError(
            f"{path} has no signature {name!r}, it has {sorted(model.signatures)}; "
            "setSignatureDefKey takes one of these"
        )
    function = model.signatures[name]
    function.tfos_owner = model  # a signature alone does not keep its variables
    return function


def _function(signature: SavedSignature) -> Any:
    found = _loaded.get(_key(signature))
    if found is None:
        with _on_disk(signature.path) as directory:
            model = _load(directory, signature.tags)
        found = _signature(model, signature.path, signature.name)
        _keep(signature, found)
    return found


def _keep(signature: SavedSignature, function: Any) -> None:
    _loaded.clear()
    _loaded[_key(signature)] = function


def _key(signature: SavedSignature) -> tuple[str, str, str, str]:
    return signature.path, signature.tags, signature.name, signature.digest


def _digest(directory: str) -> str:
    digest = hashlib.sha256()
    for name in ("saved_model.pb", "variables/variables.index"):
        path = Path(directory, name)
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def _info(spec: Any) -> TensorInfo:
    shape = spec.shape.as_list()[1:] if spec.shape.rank else []
    return TensorInfo(np.dtype(spec.dtype.as_numpy_dtype).name, tuple(shape))


def _texts(data: Any, offsets: Any) -> Any:
    raw = data.tobytes()
    ends = offsets.tolist()
    return np.array([raw[a:b] for a, b in itertools.pairwise(ends)], object)


def _fitted(values: Any, info: TensorInfo, what: str) -> Any:
    """Return values in the dtype and shape of an input: [rows, *shape]."""
    if (values.dtype == object) != (info.dtype == "object"):
        raise RowError(f"{what}: {values.dtype} does not fit {info}; cast the column")
    if values.dtype != object and values.dtype.name != info.dtype:
        values = _cast(values, info, what)
    if values.ndim == len(info.shape) + 1:
        sides = zip(values.shape[1:], info.shape, strict=True)
        if all(wanted in (None, side) for side, wanted in sides):
            return values
    elif sum(each is None for each in info.shape) < 2:
        shape = [-1 if each is None else each for each in info.shape]
        with contextlib.suppress(ValueError):
            return values.reshape(len(values), *shape)
    raise RowError(f"{what}: rows of shape {values.shape[1:]} do not fit {info}")


def _cast(values: Any, info: TensorInfo, what: str) -> Any:
    """Return values in the dtype of an input; floats may be rounded, integers may not change."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.astype(info.dtype)
    if found.dtype.kind in "iub":
        changed = values[found != values]
        if changed.size:
            raise RowError(f"{what}: value {changed.flat[0]} does not fit {info}; cast the column")
    return found


def _tensor(values: Any) -> Any:
    import tensorflow as tf

    return tf.constant(values)


def _checked(values: Any, num_rows: int, name: str) -> Any:
    if values.ndim == 0 or len(values) != num_rows:
        raise RowError(
            f"output {name!r} has shape {values.shape} for {num_rows} rows; its first dimension "
            "must be the rows"
        )
    return values


def _arrow(values: Any) -> pa.Array:
    """Return an Arrow array: a list level for each dimension behind the rows."""
    if values.ndim == 1:
        return pa.array(values, pa.binary()) if values.dtype == object else pa.array(values)
    num_rows, width = values.shape[:2]
    inner = _arrow(values.reshape(num_rows * width, *values.shape[2:]))
    offsets = np.arange(num_rows + 1, dtype=np.int32) * np.int32(width)
    return pa.ListArray.from_arrays(pa.array(offsets), inner)
