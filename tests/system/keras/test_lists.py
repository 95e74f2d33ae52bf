"""Lists of any length from a feed to `fit`: dense batches before ragged ones, other models."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from feeding.arrow.packer import ArrowPacker
from feeding.config import FeedConfig
from tests.support.keras_training import feed_epochs, serving
from tfos.errors import UnsupportedModel
from tfos.keras.data.columns import ColumnRoles
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.embedding.layer import Embedding
from tfos.keras.fit.distribute import distribute

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 8
ROLES = ColumnRoles(feature_cols="items", label_cols="y")


def rows(num_rows=61, *, uniform=0):
    """Rows whose label is the mean of their ids' values; the first `uniform` lists have 2 ids."""
    random = np.random.default_rng(3)
    worth = random.normal(size=40)
    lists = [random.integers(0, 40, 2 if n < uniform else n % 6).tolist() for n in range(num_rows)]
    return [{"items": ids, "y": float(np.mean(worth[ids])) if ids else 0.0} for ids in lists]


class Tower(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model with code of its own, built by its first batch."""

    def __init__(self):
        super().__init__()
        self.items = Embedding(4, table="items", combiner="mean")
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        return self.out(self.items(ids))


def functional():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    found = Embedding(4, table="items", combiner="mean")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(found))


def compiled(model):
    model.compile(keras.optimizers.Adagrad(0.3), "mse")
    return model


@pytest.mark.parametrize(
    ("make", "uniform"),
    [
        pytest.param(functional, 20, marks=pytest.mark.long),
        pytest.param(Tower, 20, marks=pytest.mark.long),
        (Tower, 0),
    ],
)
def test_a_model_trains_on_lists_of_any_length(make, uniform):
    keras.utils.set_random_seed(0)
    epoch = rows(uniform=uniform)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [epoch] * 6, finish=True)
        model = distribute(compiled(make()), ctx, consistency="sync")
        history = model.fit(FeedDataset(ctx, BATCH, ROLES), epochs=6, verbose=0).history
        assert history["loss"][-1] < 0.7 * history["loss"][0]
        assert cluster.rows(0) == 6 * len(epoch)
        distinct = {each for row in epoch for each in row["items"]}
        assert cluster.servers[0].stats().tables[0].rows == len(distinct)
        traces = model._tfos_trainer._attached.step._traces._found
        assert len(traces) == 1 + bool(uniform), "no trace for each number of rows"


def of_texts():
    tags = keras.Input((None,), dtype="string", ragged=True)
    found = Embedding(4, table="items", combiner="mean")(tags)
    return keras.Model(tags, keras.layers.Dense(1)(found))


@pytest.mark.parametrize("make", [of_texts, pytest.param(Tower, marks=pytest.mark.long)])
def test_a_model_trains_on_the_lists_of_strings_of_a_dataframe(make):
    """With the rows, losses and number of traces of the same lists given as one ragged tensor."""
    lists = [[f"tag {number}" for number in row["items"]] for row in rows(100)]
    labels = np.arange(100, dtype="float32") % 3
    batch = pa.RecordBatch.from_pydict(
        {"tags": pa.array(lists, pa.list_(pa.string())), "y": labels}
    )
    losses = []
    with serving(num_servers=2) as cluster:
        ctx = cluster.contexts[0]
        for epoch in range(2):
            packer = ArrowPacker(FeedConfig(chunk_rows=7), feed="input", epoch=epoch)
            with ctx.feed_channel._state.changed:
                for chunk in packer.chunks(iter([batch.slice(0, 40), batch.slice(40)])):
                    ctx.feed_channel._state.queue("input").offer(chunk)
            ctx.feed_channel.flush("input", epoch)
        ctx.feed_channel.finish("input")
        keras.utils.set_random_seed(0)
        model = distribute(compiled(make()), ctx, consistency="sync")
        data = FeedDataset(ctx, BATCH, ColumnRoles(feature_cols="tags", label_cols="y"))
        losses.append(model.fit(data, epochs=2, verbose=0).history["loss"])
        distinct = {tag for tags in lists for tag in tags}
        assert sum(server.stats().tables[0].rows for server in cluster.servers) == len(distinct)
        assert len(model._tfos_trainer._attached.step._traces._found) == 1
    with serving() as cluster:
        keras.utils.set_random_seed(0)
        model = distribute(compiled(make()), cluster.contexts[0], consistency="sync")
        given = tf.data.Dataset.from_tensor_slices((tf.ragged.constant(lists), labels))
        fitted = model.fit(given.batch(BATCH), epochs=2, shuffle=False, verbose=0)
        losses.append(fitted.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


PAIRS = [[f"tag {n % 7}", f"tag {n % 3}"] for n in range(40)]


def weighted_lists():
    tags = keras.Input((None,), dtype="string", ragged=True, name="tags")
    weights = keras.Input((None,), ragged=True, name="weights")
    return [tags, weights], Embedding(4, table="items", combiner="mean")(tags, weights)


def weighted_pairs():
    tags = keras.Input((2,), dtype="string", name="tags")
    weights = keras.Input((2,), name="weights")
    return {"tags": tags, "weights": weights}, Embedding(4, table="items", combiner="sum")(
        tags, weights
    )


def pairs_side_by_side():
    tags = keras.Input((2,), dtype="string", name="tags")
    return [tags], keras.layers.Flatten()(Embedding(4, table="items")(tags))


def pairs_of_a_vocabulary():
    tags = keras.Input((2,), dtype="string", name="tags")
    places = keras.layers.StringLookup(vocabulary=[f"tag {n}" for n in range(7)])(tags)
    return [tags], keras.layers.Flatten()(keras.layers.Embedding(8, 4)(places))


@pytest.mark.parametrize(
    "parts", [weighted_lists, weighted_pairs, pairs_side_by_side, pairs_of_a_vocabulary]
)
def test_lists_of_strings_of_one_length_train_as_a_matrix_of_strings(parts):
    weights = [[1.0 + n % 2, 0.5] for n in range(len(PAIRS))]
    labels = np.arange(len(PAIRS), dtype="float32") % 3
    columns = {"tags": PAIRS, "weights": pa.array(weights, pa.list_(pa.float32())), "y": labels}
    found = []
    for is_fed in (True, False):
        keras.utils.set_random_seed(0)
        inputs, features = parts()
        names = [each.name for each in keras.tree.flatten(inputs)]
        model = keras.Model(inputs, keras.layers.Dense(1)(features))
        with serving() as cluster:
            ctx = cluster.contexts[0]
            model = distribute(compiled(model), ctx, consistency="sync")
            if is_fed:
                feed_arrow(ctx.feed_channel, pa.RecordBatch.from_pydict(columns), num_epochs=2)
                roles = ColumnRoles(feature_cols={each: each for each in names}, label_cols="y")
                data = FeedDataset(ctx, BATCH, roles)
            else:
                given = {"tags": tf.constant(PAIRS), "weights": tf.constant(weights)}
                if parts is weighted_lists:
                    given = {name: tf.ragged.constant(each.numpy()) for name, each in given.items()}
                given = {name: given[name] for name in names}
                data = tf.data.Dataset.from_tensor_slices((given, labels)).batch(BATCH)
            fitted = model.fit(data, epochs=1, shuffle=False, verbose=0).history["loss"]
            found.append([*fitted, model.evaluate(data, verbose=0)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def feed_arrow(channel, batch, num_epochs):
    for epoch in range(num_epochs):
        packer = ArrowPacker(FeedConfig(chunk_rows=7), feed="input", epoch=epoch)
        with channel._state.changed:
            for chunk in packer.chunks(iter([batch])):
                channel._state.queue("input").offer(chunk)
        channel.flush("input", epoch)
    channel.finish("input")


def test_lists_of_strings_come_joined_and_are_split_by_map_fn():
    """The way that the refusal of lists of texts in rows of an RDD names."""
    lists = [["a", "b c"], [], ["b c"], ["d"], ["a"]]
    joined = [{"items": "\n".join(tags), "y": float(len(tags))} for tags in lists]
    roles = ColumnRoles(
        feature_cols="items", label_cols="y", map_fn=lambda x, y: (tf.strings.split(x, "\n"), y)
    )
    tags = keras.Input((None,), dtype="string", ragged=True)
    found = Embedding(4, table="tags", combiner="sum", pad_id="", initializer="ones")(tags)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [joined], finish=True)
        model = distribute(compiled(keras.Model(tags, keras.layers.Dense(1)(found))), ctx)
        model.fit(FeedDataset(ctx, BATCH, roles), verbose=0)
        assert cluster.servers[0].stats().tables[0].rows == 3


def test_lists_are_padded_by_map_fn():
    """The way that docs/guides/feeding.md names, for a model with inputs of one length."""
    epochs = rows(BATCH, uniform=BATCH), rows(20)  # a matrix, then differing lengths

    def padded(ids, y):
        if isinstance(ids, np.ndarray):
            lists = tf.RaggedTensor.from_tensor(ids)
        else:
            lists = tf.RaggedTensor.from_row_splits(ids.values, ids.offsets)
        return tf.strings.as_string(lists.to_tensor(99, shape=(None, 3))), y

    ids = keras.Input((3,), dtype="string")
    found = Embedding(4, table="items", combiner="sum", pad_id="99")(ids)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, epochs, finish=True)
        model = distribute(compiled(keras.Model(ids, keras.layers.Dense(1)(found))), ctx)
        roles = ColumnRoles(feature_cols="items", label_cols="y", map_fn=padded)
        model.fit(FeedDataset(ctx, BATCH, roles), epochs=2, verbose=0)
        kept = {each for epoch in epochs for row in epoch for each in row["items"][:3]}
        assert cluster.servers[0].stats().tables[0].rows == len(kept)


def test_a_batch_holds_each_rows_list():
    epoch = rows(20)
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [epoch], finish=True)
        found = [x for x, _ in FeedDataset(ctx, BATCH, ROLES)]
    assert all(isinstance(x, tf.RaggedTensor) and x.row_splits.dtype == tf.int64 for x in found)
    assert [len(x.to_list()) for x in found] == [8, 8, 4]
    assert [ids for x in found for ids in x.to_list()] == [row["items"] for row in epoch]


class Plain(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Code of its own, without any part for lists."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)


MODELS = {
    "declared": lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
    "unbuilt": lambda: keras.Sequential([keras.layers.Dense(1)]),
    "own code": Plain,
}


@pytest.mark.parametrize("uniform", [0, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_part_for_lists_is_told_what_to_do(name, uniform):
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows(uniform=uniform)], finish=True)
        model = distribute(compiled(MODELS[name]()), ctx)
        with pytest.raises(
            UnsupportedModel, match=r"differing lengths.* Pad them in map_fn.*ragged=True"
        ):
            model.fit(FeedDataset(ctx, BATCH, ROLES), verbose=0)


def test_a_model_that_is_not_distributed_is_told_it_too():
    with serving() as cluster:
        ctx = cluster.contexts[0]
        feed_epochs(ctx.feed_channel, [rows()], finish=True)
        model = compiled(MODELS["declared"]())
        with pytest.raises(UnsupportedModel, match="Pad them in map_fn"):
            model.fit(FeedDataset(ctx, BATCH, ROLES), verbose=0)
