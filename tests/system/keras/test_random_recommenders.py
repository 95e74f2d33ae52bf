"""Random models of what `tfos.keras.Embedding` can do, against dense Keras with all rows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.keras_training import serving
from tests.support.summed_gradients import SummedGradients
from tfos.keras import Embedding
from tfos.keras.embedding.combine import Combiner
from tfos.keras.embedding.keys import hashed
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(230)]

IDS, BATCH, STEPS, LONGEST = 30, 8, 6, 4
OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}


@dataclass(frozen=True)
class Table:
    dim: int
    of_strings: bool

    def ids(self, numbers: np.ndarray) -> Any:
        return np.char.add("id", numbers.astype(str)) if self.of_strings else numbers

    @property
    def keys(self) -> np.ndarray:
        every = self.ids(np.arange(IDS))
        return hashed(tf.constant(every)).numpy() if self.of_strings else every

    def number(self, ids: Any) -> Any:
        """The number of each id, as the reference indexes its rows."""
        if not self.of_strings:
            return tf.cast(ids, tf.int64)
        return tf.strings.to_number(tf.strings.substr(ids, 2, -1), tf.int64)


@dataclass(frozen=True)
class Feature:
    table: int
    shape: str
    combiner: Combiner | None
    is_padded: bool
    is_weighted: bool
    integers: str


@dataclass(frozen=True)
class Recommender:
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    optimizer: str
    accumulated: int
    steps_per_execution: int
    num_servers: int
    """0: without a cluster."""

    def make_optimizer(self) -> Any:
        more = {"gradient_accumulation_steps": self.accumulated} if self.accumulated > 1 else {}
        return OPTIMIZERS[self.optimizer](0.3, **more)


@st.composite
def recommenders(draw: Any) -> Recommender:
    tables = draw(
        st.lists(
            st.builds(Table, st.sampled_from([1, 3, 8]), st.booleans()), min_size=1, max_size=2
        )
    )

    def feature() -> Feature:
        shape = draw(st.sampled_from(["single", "list", "ragged"]))
        among = ["sum", "mean", "sqrtn"] + [None] * (shape == "list")
        combiner = None if shape == "single" else draw(st.sampled_from(among))
        return Feature(
            table=draw(st.integers(0, len(tables) - 1)),
            shape=shape,
            combiner=combiner,
            is_padded=draw(st.booleans()),
            is_weighted=combiner is not None and draw(st.booleans()),
            integers=draw(st.sampled_from(["int32", "int64"])),
        )

    return Recommender(
        tables=tuple(tables),
        features=tuple(feature() for _ in range(draw(st.integers(1, 3)))),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        accumulated=draw(st.sampled_from([1, 1, 2])),
        steps_per_execution=draw(st.sampled_from([1, 3])),
        num_servers=draw(st.integers(0, 2)),
    )


class DenseRows(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """What the layer means, written with a matrix of all rows and padded lists."""

    def __init__(self, feature: Feature, table: Table, rows: Any) -> None:
        super().__init__()
        self.feature, self.table, self.rows = feature, table, rows

    def call(self, ids: Any, weights: Any = None) -> Any:
        numbers = self.table.number(ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids)
        if isinstance(ids, tf.RaggedTensor):
            numbers = ids.with_flat_values(numbers).to_tensor(-1)
            weights = None if weights is None else weights.to_tensor(0.0)
        found = self.rows(tf.maximum(numbers, 0))
        if self.feature.combiner is None:
            return found
        w = tf.cast(numbers >= 0, tf.float32)
        if self.feature.is_padded:
            w *= tf.cast(numbers != 0, tf.float32)
        if weights is not None:
            w *= weights
        total = tf.einsum("bn,bnd->bd", w, found)
        below = {
            "sum": tf.ones_like(total[:, :1]),
            "mean": tf.reduce_sum(w, 1, keepdims=True),
            "sqrtn": tf.sqrt(tf.reduce_sum(w * w, 1, keepdims=True)),
        }[self.feature.combiner]
        return tf.math.divide_no_nan(total, below)

    def compute_output_spec(self, ids: Any, weights: Any = None) -> Any:
        lists = self.feature.shape == "list" and self.feature.combiner is None
        return keras.KerasTensor((None, *([LONGEST] if lists else []), self.table.dim))


def build(wanted: Recommender, layer_of: Any, kind: Any = keras.Model) -> Any:
    keras.utils.set_random_seed(3)
    inputs, parts = {}, []
    for at, feature in enumerate(wanted.features):
        table = wanted.tables[feature.table]
        dtype = "string" if table.of_strings else feature.integers
        shape = {"single": (), "list": (LONGEST,), "ragged": (None,)}[feature.shape]
        is_ragged = feature.shape == "ragged"
        ids = keras.Input(shape, dtype=dtype, ragged=is_ragged, name=f"f{at}")
        inputs[f"f{at}"] = ids
        call = [ids]
        if feature.is_weighted:
            inputs[f"w{at}"] = keras.Input(shape, dtype="float32", ragged=is_ragged, name=f"w{at}")
            call.append(inputs[f"w{at}"])
        found = layer_of(feature)(*call)
        parts.append(keras.layers.Flatten()(found) if len(found.shape) == 3 else found)
    joined = keras.layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
    model = kind(inputs, keras.layers.Dense(1, kernel_initializer="ones")(joined))
    model.compile(
        wanted.make_optimizer(),
        "mse",
        steps_per_execution=wanted.steps_per_execution,
        jit_compile=False,
    )
    return model


def batches_of(wanted: Recommender, seed: int) -> Any:
    random = np.random.default_rng(seed)
    rows = STEPS * BATCH
    x: dict[str, Any] = {}
    for at, feature in enumerate(wanted.features):
        table = wanted.tables[feature.table]
        lengths = random.integers(0, LONGEST + 1, rows)
        width = {"single": (rows,), "list": (rows, LONGEST), "ragged": (int(lengths.sum()),)}
        # Without a combiner, the reference has no vector for padding.
        first = 0 if feature.combiner else 1
        numbers = random.integers(first, IDS, width[feature.shape])
        ids = table.ids(numbers if table.of_strings else numbers.astype(feature.integers))
        weights = random.uniform(0.25, 2, numbers.shape).astype("float32")
        for name, values in (("f", ids), ("w", weights)):
            if name == "f" or feature.is_weighted:
                is_ragged = feature.shape == "ragged"
                x[f"{name}{at}"] = (
                    tf.RaggedTensor.from_row_lengths(values, lengths) if is_ragged else values
                )
    y = random.normal(size=(rows, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def check(wanted: Recommender, seed: int) -> None:
    tables = wanted.tables
    with (
        serving(num_servers=wanted.num_servers) if wanted.num_servers else nullcontext() as cluster
    ):

        def layer_of(feature: Feature) -> Any:
            table = tables[feature.table]
            pad = {"pad_id": table.ids(np.array([0]))[0].item()} if feature.is_padded else {}
            return Embedding(
                table.dim, table=f"t{feature.table}", combiner=feature.combiner, seed=5, **pad
            )

        model = build(wanted, layer_of)
        if cluster is None:
            model.make_train_function()  # makes the tables in this process
        else:
            distribute(model, cluster.contexts[0], consistency="sync")
        first = rows_of(wanted, model)
        dense = [
            keras.layers.Embedding(IDS, table.dim, weights=None if rows is None else [rows])
            for table, rows in zip(tables, first, strict=True)
        ]
        reference = build(
            wanted,
            lambda feature: DenseRows(feature, tables[feature.table], dense[feature.table]),
            SummedGradients,
        )
        for each in (model, reference):
            each.fit(batches_of(wanted, seed), shuffle=False, verbose=0)
        for table, rows in enumerate(rows_of(wanted, model)):
            if rows is not None:
                np.testing.assert_allclose(
                    rows, dense[table].get_weights()[0], rtol=1e-4, atol=1e-5, err_msg=str(wanted)
                )
        for mine, other in zip(model.layers[-1].weights, reference.layers[-1].weights, strict=True):
            np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def rows_of(wanted: Recommender, model: Any) -> list[Any]:
    """All rows of each table that a feature uses, as a training step would get them."""
    layers = {each.table: each for each in model._flatten_layers() if isinstance(each, Embedding)}
    return [
        layers[name].source.rows(name, table.keys, training=True) if name in layers else None
        for name, table in zip(("t0", "t1"), wanted.tables)  # noqa: B905 - one or two
    ]


@pytest.mark.long
@settings(max_examples=4, derandomize=True, phases=[Phase.generate])  # an example takes 1.5 s
@given(recommenders(), st.integers(0, 9))
def test_random_models_have_the_numbers_of_dense_keras(wanted: Recommender, seed: int) -> None:
    check(wanted, seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=150)
@given(recommenders(), st.integers(0, 1 << 30))
def test_many_random_models_have_the_numbers_of_dense_keras(wanted: Recommender, seed: int) -> None:
    check(wanted, seed)
