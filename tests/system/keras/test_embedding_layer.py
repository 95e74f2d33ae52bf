"""The layer by itself: ids of every kind, combiners, padding, masks, settings, config."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

from ps import Admission, rules
from ps.errors import IdError
from tfos.errors import SettingsError, UnsupportedModel
from tfos.keras import Embedding, lookup_errors
from tfos.keras.embedding import plain
from tfos.keras.embedding.combine import combined
from tfos.keras.embedding.keys import hashed, keys_of
from tfos.keras.embedding.sources import NO_ROWS, LoadedRows
from tfos.keras.step.table_specs import table_specs

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

DIM = 3


LOADED = LoadedRows(
    np.array([1]), np.ones((1, DIM), "float32"), Embedding(DIM, name="user").settings
)


class Rows:
    """A source in which the row of key k is [k, 2k, 3k], and keys above 99 are unseen."""

    def rows(self, table, keys, *, training=False):
        known = np.where(keys <= 99, keys, 0)
        return np.outer(known, np.arange(1, DIM + 1)).astype("float32")

    def dump(self, table, limit_bytes):
        return None


def bound(**settings):
    layer = Embedding(DIM, **settings)
    layer.bind(Rows())
    return layer


def row(*ids):
    return np.array([[i, 2 * i, 3 * i] for i in ids], "float32")


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"])
def test_integers_of_any_width(dtype):
    ids = np.array([[1, 7], [7, 2]], dtype)
    found = bound()(tf.constant(ids))
    assert found.shape == (2, 2, DIM)
    np.testing.assert_array_equal(found[0], row(1, 7))


def test_a_vector_and_a_scalar_of_ids():
    np.testing.assert_array_equal(bound()(tf.constant([5, 1])), row(5, 1))
    np.testing.assert_array_equal(bound()(tf.constant(5)), row(5)[0])


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_floats_and_bools_are_refused_with_the_next_step(dtype):
    with pytest.raises(UnsupportedModel, match=f"layer 'user' got ids of dtype {dtype}: .*int64"):
        bound(name="user")(tf.cast([1, 0], dtype))


def test_sparse_ids_are_refused_with_the_next_step():
    with pytest.raises(UnsupportedModel, match=r"SparseTensor; give it a RaggedTensor"):
        bound()(tf.sparse.from_dense([[1, 2]]))


def test_the_key_of_a_string_is_farmhash_as_in_an_exported_graph():
    texts = [b"", b"a", "é".encode(), b"\xff\xfe\x00", b"x" * 1000]
    texts += [np.random.default_rng(n).bytes(n) for n in range(1, 40)]
    keys = hashed(tf.constant(texts)).numpy()
    assert (keys >= 0).all()
    layer = keras.layers.Hashing(num_bins=2**63 - 1)
    np.testing.assert_array_equal(keys, layer(tf.constant(texts)).numpy())
    # FarmHash Fingerprint64 of "hello" and of the empty string, modulo 2^63 - 1
    assert hashed(tf.constant([b"", b"hello"])).numpy().tolist() == [
        0x9AE16A3B2F90404F % (2**63 - 1),
        13009744463427800296 % (2**63 - 1),
    ]


def test_strings_are_looked_up_by_their_keys():
    asked = []

    class Noting(Rows):
        def rows(self, table, keys, *, training=False):
            asked.append(keys.copy())
            return super().rows(table, keys)

    layer = Embedding(DIM, pad_id="")
    layer.bind(Noting())
    layer(tf.constant([["a", ""], ["b", "a"]]))
    np.testing.assert_array_equal(asked[0], hashed(tf.constant(["a", "b", "a"])).numpy())


def test_ids_of_64_bits_are_bits():
    keys = keys_of(tf.constant([2**64 - 1, 5], tf.uint64), "x")
    assert keys.flat.numpy().tolist() == [-1, 5]


COMBINED = {
    "sum": lambda r, w: (r * w[:, None]).sum(0),
    "mean": lambda r, w: (r * w[:, None]).sum(0) / w.sum(),
    "sqrtn": lambda r, w: (r * w[:, None]).sum(0) / np.sqrt((w * w).sum()),
}


@pytest.mark.parametrize("combiner", COMBINED)
@pytest.mark.parametrize("weighted", [False, True])
def test_combiners_of_dense_ids(combiner, weighted):
    ids = np.array([[1, 2, 4], [3, 3, 9]])
    weights = np.array([[0.5, 1, 2], [1, 3, 0.25]], "float32")
    layer = bound(combiner=combiner)
    found = layer([ids, weights] if weighted else ids)
    given = weights if weighted else np.ones((2, 3), "float32")
    expected = [COMBINED[combiner](row(*own), w) for own, w in zip(ids, given, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("is_plain", [False, pytest.param(True, marks=pytest.mark.long)])
def test_xla_makes_no_nan_of_the_weights_of_a_list_of_padding(is_plain):
    ids, dense = tf.constant([[0, 0], [1, 2], [1, 2]]), [[0, 0], [1, 2], [1, 2]]
    rows = np.array([row(*each) for each in dense])

    @tf.function(jit_compile=True)
    def gradient(weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            if is_plain:
                found = plain._combined(tf.constant(rows), weights, ids != 0, "sqrtn")
            else:
                flat, is_id = rows.reshape(-1, DIM), tf.reshape(ids != 0, [-1])
                found = combined(flat, keys_of(ids, "x"), weights, "sqrtn", is_id)
        return found, tape.gradient(found, weights)

    found, slopes = gradient(tf.constant([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]))
    assert np.isfinite(slopes).all()
    assert slopes[2].numpy().any()
    expected = COMBINED["sqrtn"](row(1, 2), np.array([3.0, 4.0], "float32"))
    np.testing.assert_allclose(found[2], expected, rtol=1e-6)
    np.testing.assert_array_equal(found[:2], 0)


@pytest.mark.parametrize("combiner", COMBINED)
@pytest.mark.parametrize("weighted", [False, True])
def test_combiners_of_ragged_ids_and_empty_lists(combiner, weighted):
    lists = [[1, 2], [], [5]]
    ids = tf.ragged.constant(lists, dtype="int64")
    weights = tf.ragged.constant([[2.0, 0.5], [], [4.0]])
    found = bound(combiner=combiner)(ids, weights if weighted else None).numpy()
    assert found.shape == (3, DIM)
    np.testing.assert_array_equal(found[1], 0)
    w = np.array([2.0, 0.5] if weighted else [1, 1], "float32")
    np.testing.assert_allclose(found[0], COMBINED[combiner](row(1, 2), w), rtol=1e-6)


def test_ragged_ids_without_a_combiner_stay_ragged():
    found = bound()(tf.ragged.constant([[1, 2], [], [5]], dtype="int64"))
    assert found.row_lengths().numpy().tolist() == [2, 0, 1]
    np.testing.assert_array_equal(found.flat_values, row(1, 2, 5))


def test_nested_ragged_ids_reduce_their_innermost_axis():
    ids = tf.ragged.constant([[[1, 2], [3]], [[]]], dtype="int64")
    found = bound(combiner="sum")(ids)
    assert found.row_lengths().numpy().tolist() == [2, 1]
    np.testing.assert_array_equal(found.flat_values, [row(1, 2).sum(0), row(3)[0], [0, 0, 0]])


def test_padding_is_no_id():
    ids = np.array([[4, -1, 2], [-1, -1, -1]])
    plain = bound(pad_id=-1)(ids)
    np.testing.assert_array_equal(plain[0], row(4, 0, 2))
    mean = bound(pad_id=-1, combiner="mean")(ids)
    np.testing.assert_array_equal(mean, [row(4, 2).mean(0), [0, 0, 0]])


def test_mask_zero_masks_like_keras():
    ids = np.array([[4, 0, 2], [0, 0, 1]])
    layer = bound(mask_zero=True)
    np.testing.assert_array_equal(layer.compute_mask(tf.constant(ids)), ids != 0)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int64"), layer, keras.layers.GlobalAveragePooling1D()]
    )
    np.testing.assert_array_equal(model(ids)[0], row(4, 2).mean(0))


def test_weights_need_a_combiner_and_the_same_shape():
    with pytest.raises(UnsupportedModel, match="got weights but has no combiner"):
        bound()([tf.constant([[1]]), tf.constant([[1.0]])])
    shapes = r"layer 'user' got ids of shape \(1, 2\) and weights of shape \(1, 1\); give one"
    with pytest.raises(UnsupportedModel, match=shapes):
        bound(combiner="sum", name="user")([tf.constant([[1, 2]]), tf.constant([[1.0]])])
    ids, few = keras.Input((3,), dtype="int64"), keras.Input((2,))
    with pytest.raises(UnsupportedModel, match=r"ids of shape \(None, 3\) and weights .*None, 2\)"):
        bound(combiner="sum")(ids, few)
    with pytest.raises(UnsupportedModel, match="ids are dense and their weights ragged"):
        bound(combiner="sum")(tf.constant([[1]]), tf.ragged.constant([[1.0]]))


LISTS = [[1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (LISTS, [[1.0], [1.0, 2.0], [1.0, 1.0, 1.0]]),
        (LISTS, [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]),
        ([[[1], [2, 3]]], [[[1.0, 1.0], [1.0]]]),
        ([[[1]], [[2], [3]]], [[[1.0], [1.0]], [[1.0]]]),
    ],
)
def test_ragged_weights_of_other_lengths_stop_the_step(ids, weights, xla):
    layer = bound(combiner="sum")

    @tf.function(jit_compile=xla, autograph=False)
    def total(weights):
        keys = keys_of(tf.ragged.constant(ids, dtype="int64"), "x")
        found = combined(tf.ones([tf.size(keys.flat), DIM]), keys, weights, "sum", None)
        return getattr(found, "flat_values", found)

    given = tf.ragged.constant(weights)
    if xla:  # which leaves assertions out
        if len(weights) == len(ids):
            assert np.isnan(total(given)).any()
        return
    refusals = tf.errors.InvalidArgumentError, UnsupportedModel
    for call in (total, lambda weights: layer(tf.ragged.constant(ids, dtype="int64"), weights)):
        with pytest.raises(refusals, match="give one weight to each id"):
            call(given)


def test_ragged_weights_of_the_same_lengths_and_other_splits_are_taken():
    ids = tf.ragged.constant(LISTS, dtype="int64")
    weights = tf.ragged.constant([[1.0, 2.0], [3.0], [1.0, 0.0, 2.0]], row_splits_dtype="int32")
    found = bound(combiner="sum")(ids, weights)
    np.testing.assert_array_equal(found[:, 0], [5.0, 9.0, 16.0])
    pairs = tf.RaggedTensor.from_row_lengths(tf.constant([[1, 2]]), [1])
    with pytest.raises(UnsupportedModel, match="ragged_rank 1 and their weights of ragged_rank 2"):
        bound(combiner="sum")(pairs, tf.ragged.constant([[[1.0, 1.0]]]))


def test_dense_weights_are_those_of_ragged_ids_of_one_length_alone():
    ids = tf.ragged.constant([[1, 2], [3, 4]], dtype="int64")
    found = bound(combiner="sum")(ids, tf.constant([[1.0, 2.0], [3.0, 0.5]]))
    np.testing.assert_array_equal(found[:, 0], [5.0, 11.0])
    refusals = tf.errors.InvalidArgumentError, UnsupportedModel
    for others in ([[1, 2], [3]], [[1, 2]], [[1], [2, 3, 4]]):
        ids = tf.ragged.constant(others, dtype="int64")
        with pytest.raises(refusals, match="give one"):
            bound(combiner="sum")(ids, tf.constant([[1.0, 2.0], [3.0, 0.5]]))


@pytest.mark.parametrize("source", [NO_ROWS, LOADED], ids=["never fit", "loaded"])
def test_an_id_out_of_range_is_an_id_error_in_each_call_and_one_line_of_the_log(source, capfd):
    given = keras.Input((2,), dtype="int64")
    model = keras.Model(given, Embedding(DIM, name="who", table="user", combiner="sum")(given))
    model.compile(loss="mse")
    model.get_layer("who").bind(source)
    x = np.array([[1, 2], [3, -5]])
    calls = {
        "predict": lambda: model.predict(x, verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(x),
        "evaluate": lambda: model.evaluate(x, np.zeros((2, DIM)), verbose=0),
        "test_on_batch": lambda: model.test_on_batch(x, np.zeros((2, DIM))),
        "call": lambda: model(x),
    }
    for name, call in calls.items():
        capfd.readouterr()
        with pytest.raises(IdError, match=r"'user' takes .*got -5 at position 3.*\['who'\]"):
            call()
        printed = capfd.readouterr().err
        assert "Traceback" not in printed, name
        assert printed.count("\n") < 12, (name, printed)
    assert model.predict(np.array([[1, 2]]), verbose=0).shape == (1, DIM)


def test_errors_of_lookups_at_the_same_time_do_not_meet():
    texts = [lookup_errors.keep(IdError(f"of thread {number}")) for number in range(2)]
    for number, text in enumerate(texts):
        with pytest.raises(IdError, match=f"^of thread {number}$"), lookup_errors.typed_errors():
            raise tf.errors.InvalidArgumentError(None, None, f"assertion failed: [{text}]")
    with pytest.raises(tf.errors.OpError, match="another"), lookup_errors.typed_errors():
        raise tf.errors.InvalidArgumentError(None, None, "another")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1000, 16), {}),
        ((), {"input_dim": 1000, "output_dim": 16}),
        ((16,), {"embeddings_initializer": "zeros"}),
        ((16,), {"embeddings_regularizer": "l2"}),
    ],
)
def test_arguments_of_kerass_embedding_are_refused_with_what_to_write(args, kwargs):
    with pytest.raises(SettingsError, match=r"no number of rows: write Embedding\(16, table='…'\)"):
        Embedding(*args, **kwargs)


def test_the_matrix_of_kerass_embedding_is_refused_with_what_to_call():
    layer = bound(name="film")
    for _ in ("before it is built", "and then"):
        with pytest.raises(AttributeError, match=r"'film' has no matrix .*Call the layer with the"):
            _ = layer.embeddings
        layer(tf.constant([1]))
    assert not hasattr(layer, "embeddings")


def test_a_layer_that_is_an_embedding_has_arguments_of_its_own():
    class Sized(Embedding):
        def __init__(self, num_rows, dim):
            super().__init__(dim, max_rows=num_rows)

    assert Sized(1000, 16).dim == 16


def test_an_unbound_layer_gives_the_vector_of_unseen_ids():
    np.testing.assert_array_equal(Embedding(2)(tf.constant([1])), [[0, 0]])
    np.testing.assert_array_equal(Embedding(2, unseen=0.5)(tf.constant([1])), [[0.5, 0.5]])
    np.testing.assert_array_equal(Embedding(2, unseen=[1, 2])(tf.constant([1])), [[1, 2]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"combiner": "max"}, r"combiner='max' must be None or one of \('sum', 'mean', 'sqrtn'\)"),
        ({"mask_zero": True, "pad_id": 5}, "mask_zero=True means pad_id=0, got pad_id=5"),
        ({"mask_zero": True, "combiner": "sum"}, "no axis is left to mask"),
        ({"unseen": [1.0]}, "unseen has 1 numbers, a row has 3"),
        ({"initializer": "glorot_uniform"}, r"ps\.initializers\.TruncatedNormal\(stddev=…\)"),
        ({"initializer": "nothing"}, "initializer='nothing'"),
        ({"rule": 5}, "rule=5 is not a rule of ps.rules"),
        ({"seed": -1}, "seed must be in 0"),
        (
            {"seed": 1, "initializer": keras.initializers.RandomNormal(seed=2)},
            "seed=1, but RandomNormal has seed=2; give one of them",
        ),
        (
            {"seed": 1, "initializer": {"class_name": "RandomNormal", "config": {"seed": 2}}},
            "seed=1, but RandomNormal has seed=2; give one of them",
        ),
        (
            {"initializer": keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(2))},
            "seed=.*SeedGenerator.* must be an integer",
        ),
        ({"when_full": "lru"}, "needs a limit; set max_rows or max_bytes"),
        ({"when_full": "LRU"}, "when_full must be 'refuse' or 'lru', got 'LRU'"),
        ({"id_kind": "uint32"}, "id_kind must be 'int64' or 'uint64', got 'uint32'"),
        ({"row_steps": "no"}, "row_steps must be bool, got 'no'"),
        ({"table": 5}, "name must be str, got 5"),
        ({"learning_rate_multiplier": -1.0}, "learning_rate_multiplier must be in 0"),
        ({"rule": rules.Adagrad(), "row_steps": True}, "row_steps=True is for Adam"),
        ({"rule": rules.SGD(global_clipnorm=1.0)}, "global_clipnorm=1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
    with pytest.raises(SettingsError, match=message):
        Embedding(DIM, **settings)


def test_row_steps_wait_for_the_rule_of_the_models_optimizer():
    layer = Embedding(DIM, row_steps=True)
    (spec,) = table_specs([layer], keras.optimizers.Adam(0.01))
    assert (spec.rule, spec.row_steps) == (rules.Adam(), True)
    with pytest.raises(SettingsError, match=r"row_steps=True is for Adam, .*; got SGD"):
        table_specs([layer], keras.optimizers.SGD(0.1))


def test_rows_that_are_excluded_from_weight_decay_keep_it_away_from_their_table():
    layers = [Embedding(DIM, table=name) for name in ("x", "x", "y")]
    for layer in layers:
        layer.build()

    def decays(**excluded: Any) -> list[float | None]:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**excluded)
        specs: Any = table_specs(layers, optimizer)
        return [spec.rule.weight_decay for spec in specs]

    assert decays() == [0.5, 0.5]
    assert decays(var_names=["embeddings"]) == [None, None]
    assert decays(var_list=layers[2].trainable_variables) == [0.5, None]
    with pytest.raises(
        UnsupportedModel, match=r"share the table 'x', .* only .* \['embedding.*'\]"
    ):
        decays(var_list=layers[0].trainable_variables)
    layers.append(Embedding(DIM, table="z"))  # never called
    assert decays(var_list=layers[2].trainable_variables) == [0.5, None, 0.5]


def test_tables_without_a_seed_begin_with_vectors_of_their_own():
    layers = [Embedding(DIM, table=name) for name in ("a", "b")]
    specs = table_specs(layers, keras.optimizers.Adam())
    assert specs[0].row_seed != specs[1].row_seed


def test_a_table_has_the_seed_of_its_keras_initializer():
    uniform = keras.initializers.RandomUniform
    given = [Embedding(DIM, table="a", initializer=uniform(seed=each)) for each in (1, 2, None)]
    assert [each.settings.seed for each in given] == [1, 2, None]
    again = Embedding.from_config(given[0].get_config())
    assert again.settings == given[0].settings
    assert Embedding(DIM, initializer=uniform(seed=2), seed=2).settings.seed == 2
    assert Embedding(DIM, initializer="normal", seed=2).settings.seed == 2


def test_the_config_is_json_and_makes_the_same_layer():
    layer = Embedding(
        DIM,
        table="user",
        combiner="mean",
        initializer=keras.initializers.TruncatedNormal(0.0, 0.1),
        seed=3,
        pad_id=-1,
        unseen=[1, 2, 3],
        rule=rules.RowWiseAdagrad(epsilon=1e-5),
        learning_rate_multiplier=0.5,
        max_rows=1000,
        when_full="lru",
        ttl_s=60.0,
        admission=Admission(min_count=3),
        id_kind="uint64",
        name="users",
    )
    config = json.loads(json.dumps(layer.get_config()))
    again = Embedding.from_config(config)
    assert again.settings == layer.settings
    assert (again.name, again.combiner, again.pad_id) == ("users", "mean", -1)
    assert again.get_config() == layer.get_config()


def test_a_cloned_model_has_layers_of_the_same_tables():
    ids = keras.Input((2,), dtype="int64")
    model = keras.Model(ids, Embedding(DIM, table="x", combiner="sum")(ids))
    twin = keras.models.clone_model(model)
    assert twin.layers[1].settings == model.layers[1].settings
    assert model.count_params() == 0
    assert [each.shape for each in model.get_weights()] == [(0, DIM)]
    model.set_weights(model.get_weights())


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_rows_are_cast_to_the_compute_dtype(policy):
    layer = bound(dtype=policy)
    assert layer(tf.constant([1])).dtype == keras.DTypePolicy(policy).compute_dtype


def test_shapes_are_known_before_any_row():
    ids = keras.Input((4, 2), dtype="int64")
    assert Embedding(DIM)(ids).shape == (None, 4, 2, DIM)
    assert Embedding(DIM, combiner="sum")(ids).shape == (None, 4, DIM)
    ragged = Embedding(DIM)(keras.Input((None,), dtype="int64", ragged=True))
    assert ragged.shape == (None, None, DIM)
    assert ragged.ragged
    with pytest.raises(UnsupportedModel, match="reduces the last axis"):
        Embedding(DIM, combiner="sum")(keras.Input((), dtype="int64"))


def test_a_gradient_outside_of_fit_is_refused():
    layer = bound()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1]), training=True))
    with pytest.raises(UnsupportedModel, match="outside of fit"):
        tape.gradient(loss, layer.trainable_variables[0].value)


def test_pad_id_of_64_bits_is_their_bits():
    layer = bound(pad_id=2**64 - 1, id_kind="uint64")
    found = layer(tf.constant([2**64 - 1, 5], tf.uint64))
    np.testing.assert_array_equal(found, [[0, 0, 0], row(5)[0]])


@pytest.mark.parametrize("pad_id", [0.5, 0.0, [0], 2**64, -(2**63) - 1])
def test_a_pad_id_that_no_id_can_be_is_refused(pad_id):
    with pytest.raises(SettingsError, match=r"pad_id=.* must be"):
        Embedding(DIM, pad_id=pad_id)


@pytest.mark.parametrize(
    ("pad_id", "ids"), [("", [1, 2]), (b"", [1, 2]), (0, ["0", "a"]), (-1, ["0", "a"])]
)
def test_a_pad_id_of_another_kind_than_the_ids_is_refused(pad_id, ids):
    with pytest.raises(UnsupportedModel, match=r"layer 'user' gets .*pad_id=.* is not one"):
        bound(name="user", pad_id=pad_id)(tf.constant(ids))


def test_mask_zero_for_strings_is_refused_when_the_model_is_made():
    with pytest.raises(UnsupportedModel, match="layer 'user' gets strings"):
        Embedding(DIM, name="user", mask_zero=True)(keras.Input((3,), dtype="string"))


def test_strings_after_integers_are_refused():
    layer = bound(name="user")
    layer(tf.constant([5]))
    with pytest.raises(UnsupportedModel, match="gets strings, but got integers before"):
        layer(tf.constant(["5"]))


def test_bytes_that_are_no_text_stay_in_the_config():
    layer = Embedding(DIM, pad_id=b"\xff\x00")
    copy = Embedding.from_config(json.loads(json.dumps(layer.get_config())))
    assert copy.pad_key == layer.pad_key == int(hashed(b"\xff\x00"))


def test_settings_are_numbers_of_numpy_too():
    given: Any = {"pad_id": 1, "seed": 3, "max_rows": 100, "max_bytes": 1 << 20, "max_id": 50}
    of_numpy: Any = {name: np.int64(each) for name, each in {"dim": DIM, **given}.items()}
    floats: Any = {"unseen": np.float32(0.5), "ttl_s": np.float32(9)}
    layer = Embedding(**of_numpy)
    other = Embedding(DIM, **floats, **given)
    assert json.dumps(layer.get_config() | {"name": ""})
    assert layer.settings == Embedding(DIM, name=layer.name, **given).settings
    assert other.settings.unseen == (0.5,) * DIM
    assert other.settings.ttl_s == 9.0


@pytest.mark.parametrize("dim", [2.5, "4", None])
def test_a_dim_that_is_no_integer_is_refused(dim):
    with pytest.raises(SettingsError, match=r"dim=.* must be an integer"):
        Embedding(dim)


def test_rows_of_another_width_in_a_file_are_refused_by_both_widths():
    store = {"keys": np.arange(2), "rows": np.zeros((2, 5), "float32")}
    with pytest.raises(UnsupportedModel, match="has rows of 3 numbers, those of the file have 5"):
        Embedding(DIM).load_own_variables(store)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' save
@pytest.mark.parametrize("save", [keras.Model.save, keras.saving.save_model])
def test_a_file_that_would_lack_the_rows_is_refused(save, tmp_path):
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, Embedding(DIM, table="user")(ids))
    with pytest.raises(UnsupportedModel, match=r"m\.h5 would lack the rows .*\['user'\].*\.keras"):
        save(model, tmp_path / "m.h5")
    assert not list(tmp_path.iterdir())


def test_rows_of_a_file_take_the_ids_of_their_table_alone():
    layer = Embedding(DIM, name="user", max_id=9)
    layer.load_own_variables({"keys": np.arange(2), "rows": np.ones((2, DIM), "float32")})
    np.testing.assert_array_equal(layer(tf.constant([1, 9])), [[1] * DIM, [0] * DIM])
    for bad in (-1, 10):
        with pytest.raises(IdError, match=f"ids 0..9, got {bad}"):
            layer(tf.constant([0, bad]))
