"""Predictor: turns a partition's record batches into columns of a model's outputs.

    record batches ─► inputs (views) ─► batches of `batch_size` rows, across record batches
        ─► the model's traced function ─► output columns, one row per row, in order

Covers: which columns fill which input, batches, the output columns.
Does not: read models (tfos.predict.loading), convert values (tfos.predict.tensors), know Spark.
Runs in: Spark's Python workers.      Threads: one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from feeding.arrow.spark_vectors import holds_sparse
from feeding.columnar.batch import BatchColumn, Ragged, check_batch_size
from feeding.columnar.ops import Columns, joined, num_rows, split_rows
from feeding.sender.arrow_inference import UnansweredBatches
from tfos.errors import SettingsError
from tfos.feed.dataframe_columns import quoted
from tfos.predict.fitting import MOST_EXACT, Array, check_columns, in_order, is_wide
from tfos.predict.loading import loaded
from tfos.predict.signature import ModelSignature, TensorInfo
from tfos.predict.tensors import Inputs, arrow_column, column_type

ANSWER_BYTES = 64 << 20
"""Bytes of outputs that wait for the other rows of their record batch, which may be 10,000."""
_MOST_VALUES = (1 << 31) - 1
"""Largest number of values in an array: offsets of Spark's arrays are int32."""
_PYTHONS = {
    **dict.fromkeys(("float16", "bfloat16", "float32"), "float64"),
    **dict.fromkeys(("int8", "uint8", "int16", "uint16", "int32", "uint32"), "int64"),
}
"""Dtype of Python's numbers, by the dtype of an output."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One output of a model as a column."""

    output: str
    column: str
    form: Literal["tensor", "python", "number", "value", "class"] = "tensor"
    """"python": numbers as wide as Python's, double and bigint; "number": an output [rows, 1] as
    a double, refused if that would round an integer; "value": its own type; "class": the
    position of its largest number, or whether its one number is above 0.5, as a double; NaN if
    an output is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Fills columns with a model's outputs."""

    signature: ModelSignature
    columns: tuple[str, ...]
    """Names of the columns of the record batches, for errors."""
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    """Each input with the positions of its columns; several are joined as one matrix."""
    outputs: tuple[OutputColumn, ...]
    batch_size: int
    """Rows that the model takes at once; only a partition's last batch is smaller."""

    def schema(self) -> str:
        """Return the output columns with their types, in Spark's notation.

        Raises:
            SettingsError: no column can hold an output.
        """
        return ", ".join(
            f"{quoted(each.column)} {column_type(each.output, self._info(each))}"
            for each in self.outputs
        )

    def results(
        self, partition: int, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield record batches of the output columns, one row per row, in the rows' order.

        Args:
            partition: number of the partition, for errors.
            batches: its rows, with a column for each of `columns`.

        Raises:
            RowError: a value does not fit; names partition, row and column.
            SettingsError: the model has changed, or an output does not have one row per row.
            IdError: an id is outside a table's range; names the layer.
        """
        model = loaded(self.signature)
        places = list(model.outputs)
        taken = [places.index(each.output) for each in self.outputs]
        names = [name for name, _ in self.inputs]
        infos = [self.signature.inputs[name] for name in names]
        inputs = Inputs(self.columns, self.inputs, infos, partition)
        order = [names.index(name) for name in model.inputs]
        rows = _WaitingRows()
        for batch in itertools.chain(filter(len, batches), [None]):
            answers: list[tuple[Array, ...]] = []
            num_bytes = 0
            for given in self._given(inputs, rows, batch):
                found = model.call([_tensor(given[place]) for place in order])
                answer = tuple(found[place].numpy() for place in taken)
                self._check(answer, num_rows(given))
                if answers and not _fit(answers[-1], answer):
                    yield self._joined(answers)
                    answers, num_bytes = [], 0
                answers.append(answer)
                num_bytes += sum(each.nbytes for each in answers[-1])
                if num_bytes >= ANSWER_BYTES:
                    yield self._joined(answers)
                    answers, num_bytes = [], 0
            if answers:
                yield self._joined(answers)

    def beside(
        self,
        partition: int,
        batches: Iterable[pa.RecordBatch],
        names: Sequence[str],
        places: Sequence[int],
    ) -> Iterator[pa.RecordBatch]:
        """Yield each record batch with the output columns appended.

        Args:
            partition: number of the partition, for errors.
            batches: record batches of the partition.
            names: names of the batches' columns in the result.
            places: positions of the columns that fill the inputs.

        Raises:
            RowError, SettingsError, IdError: as in `results`.
        """
        waiting = UnansweredBatches(iter(batches), names)
        for results in self.results(partition, (batch.select(places) for batch in waiting)):
            yield from waiting.answered(results)

    def _given(
        self, inputs: Inputs, rows: _WaitingRows, batch: pa.RecordBatch | None
    ) -> Iterator[Columns]:
        """Yield the model batches that a record batch fills; None: the partition's last one."""
        if batch is None:
            yield from rows.take(self.batch_size, is_last=True)
            return
        # Spark's batches have 10,000 rows; as dense rows they may be thousands of times larger.
        is_sparse = holds_sparse(batch)
        while batch.num_rows:
            count = self.batch_size - rows.num_rows if is_sparse else batch.num_rows
            part, batch = batch.slice(0, count), batch.slice(count)
            rows.add(inputs.of(part))
            yield from rows.take(self.batch_size, is_last=False)

    def _info(self, column: OutputColumn) -> TensorInfo:
        info = self.signature.outputs[column.output]
        if column.form == "tensor" or info.is_ragged:  # no column holds these in any form
            return info
        if column.form == "python":
            return replace(info, dtype=_PYTHONS.get(info.dtype, info.dtype))
        if column.form == "class":
            fits = info.dtype != "object" and len(info.shape) < 2
        else:
            own = form_of(info)
            fits = own != "tensor" and column.form in (own, "value")
        if not fits:
            raise SettingsError(
                f"output {column.output!r} is {info}, not one {column.form} per row; read it as an "
                "array"
            )
        return TensorInfo(info.dtype if column.form == "value" else "float64", ())

    def _check(self, found: Sequence[Array], num_rows: int) -> None:
        for each, values in zip(self.outputs, found, strict=True):
            info = self.signature.outputs[each.output]
            if values.ndim != len(info.shape) + 1 or len(values) != num_rows:
                raise SettingsError(
                    f"output {each.output!r} has shape {values.shape} for {num_rows} rows of "
                    f"{info}; its first dimension must be the rows"
                )

    def _joined(self, answers: Sequence[Sequence[Array]]) -> pa.RecordBatch:
        columns = []
        for each, parts in zip(self.outputs, zip(*answers, strict=True), strict=True):
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if values.size > _MOST_VALUES:
                raise SettingsError(
                    f"output {each.output!r}: {len(values)} rows of {values.shape[1:]} are "
                    f"{values.size} values, but a column batch holds at most {_MOST_VALUES}. Let "
                    f"the model take fewer than {self.batch_size} rows at once"
                )
            if each.form == "number":
                _check_exact(values, each.output)
            columns.append(arrow_column(_formed(values, each.form), self._info(each)))
        return pa.RecordBatch.from_arrays(columns, [each.column for each in self.outputs])


def _formed(values: Array, form: str) -> Array:
    if form in ("tensor", "python"):
        return values
    if form in ("number", "value"):
        return values.reshape(len(values))
    flat: Array = values.reshape(len(values), -1)
    classes = np.argmax(flat, axis=1) if flat.shape[1] > 1 else flat[:, 0] > 0.5
    return np.where(np.isnan(flat).any(axis=1), np.nan, classes)


def _check_exact(values: Array, output: str) -> None:
    """Refuse integers so large that two share one double."""
    if not is_wide(values):
        return
    rounded = (values > MOST_EXACT) | (values < -MOST_EXACT)
    if rounded.any():
        found = values.reshape(-1)[int(np.argmax(rounded.reshape(-1)))]
        raise SettingsError(
            f"output {output!r} is {found} in a row, but the column of one number per row is a "
            "double, as Spark's evaluators expect, and would round integers of this size. Set "
            "predictionCols, which keeps int64 as bigint"
        )


def form_of(info: TensorInfo) -> Literal["tensor", "number", "value"]:
    """Return the form of an output: one number per row is a double, as Spark's evaluators expect.

    Args:
        info: dtype and shape of the output.
    """
    if info.shape not in ((), (1,)):
        return "tensor"
    return "value" if info.dtype == "object" else "number"


def predictor_of(
    signature: ModelSignature,
    columns: Sequence[str],
    outputs: Iterable[OutputColumn],
    batch_size: int,
    inputs: Sequence[str] | None = None,
) -> Predictor:
    """Return a predictor whose columns fill one input each, or together fill the only input.

    Args:
        signature: signature of the model.
        columns: columns that fill the inputs.
        outputs: outputs that become columns.
        batch_size: rows that the model takes at once.
        inputs: names of the inputs in the columns' order; None: by name if the columns have all of
            them, else in the model's own order.

    Raises:
        SettingsError: the number of columns is wrong, the inputs' order is unknown, a column has
            the name of another input, or batch_size is not a number of rows.
    """
    names = list(columns if inputs is None else inputs)
    if inputs is None and sorted(columns) != sorted(signature.inputs):
        names = signature.ordered_inputs()
        by_place = f"; predict_column(…, inputs={names}) takes these columns by position"
        in_order("columns", columns, "input", names, by_place)
    return Predictor(
        signature=signature,
        columns=tuple(columns),
        inputs=_places(signature, names, len(columns)),
        outputs=tuple(outputs),
        batch_size=check_batch_size(batch_size),
    )


def _places(
    signature: ModelSignature, inputs: Sequence[str], count: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return which of `count` columns fill each input; see Predictor.inputs."""
    if count == len(inputs):
        return tuple((name, (place,)) for place, name in enumerate(inputs))
    if count and len(inputs) == 1:
        info = signature.inputs[inputs[0]]
        check_columns(f"input {inputs[0]!r}, {info}", count, is_ragged=info.is_ragged)
        return ((inputs[0], tuple(range(count))),)
    has = ", ".join(f"{name} {signature.inputs[name]}" for name in inputs)
    raise SettingsError(
        f"{count} columns are given, but the model {signature.source} takes {has}. Name one column "
        "per input, in this order"
    )


class _WaitingRows:
    """Rows of a partition, as inputs, that wait for their prediction."""

    def __init__(self) -> None:
        self._parts: deque[Columns] = deque()
        self.num_rows = 0

    def add(self, part: Columns) -> None:
        """Append rows."""
        self._parts.append(part)
        self.num_rows += num_rows(part)

    def take(self, batch_size: int, *, is_last: bool) -> Iterator[Columns]:
        """Yield full batches, and the rest if there are no more rows."""
        while self.num_rows >= batch_size or (is_last and self.num_rows):
            yield self._next(batch_size)

    def _next(self, most_rows: int) -> Columns:
        parts: list[Columns] = []
        # Lists of different lengths: rows that do not fit one tensor go into the next batch.
        while most_rows and self._parts and (not parts or _fit(parts[0], self._parts[0])):
            part, rest = split_rows(self._parts.popleft(), most_rows)
            if rest is not None:
                self._parts.appendleft(rest)
            parts.append(part)
            most_rows -= num_rows(part)
        found = joined(parts)
        self.num_rows -= num_rows(found)
        return found


def _fit(first: Columns, second: Columns) -> bool:
    return all(
        isinstance(a, Ragged) or isinstance(b, Ragged) or a.shape[1:] == b.shape[1:]
        for a, b in zip(first, second, strict=True)
    )


def _tensor(column: BatchColumn) -> Any:
    import tensorflow as tf

    if isinstance(column, Ragged):
        return tf.RaggedTensor.from_row_splits(column.values, column.offsets, validate=False)
    if column.dtype == object:
        return tf.constant(column)
    # An op uses an array as it is, or copies it once to memory that its kernels can read.
    # tf.constant would copy it once more.
    return tf.raw_ops.Identity(input=column)
