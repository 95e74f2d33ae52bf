"""Kinds of models, steps and settings that `distribute` serves, or refuses with a sentence."""

from __future__ import annotations

import contextlib
from functools import partial

import keras
import numpy as np
import pytest

from ps.errors import ManifestMismatch, NonFiniteGradient
from tests.support.keras_training import blobs, serving, together
from tfos.errors import (
    NotCompiled,
    SettingsError,
    UnsupportedModel,
    UnsupportedOptimizer,
    VariablesChanged,
)
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    # Keras' own conversion of variables under numpy 2, when it saves.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = blobs(256)


@pytest.fixture
def cluster():
    with serving() as servers:
        yield servers


@pytest.fixture(autouse=True)
def float32_policy():
    yield
    keras.config.set_dtype_policy("float32")


def compiled(model, optimizer="adam", **options):
    model.compile(optimizer, LOSS, **options)
    return model


def small(*, built=True, **options):
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
    return keras.Sequential(([keras.Input((20,))] if built else []) + layers, **options)


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Built by its first batch; applies its gradients itself."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(16, "relu")
        self.drop = keras.layers.Dropout(0.1)
        self.out = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "own": loss * 2}


def test_unbuilt_subclassed_model_with_its_own_train_step(cluster):
    model = distribute(compiled(Subclassed(), keras.optimizers.Adam(0.05)), cluster.contexts[0])
    history = model.fit(X, Y, batch_size=32, epochs=3, verbose=0).history
    assert set(history) == {"loss", "own"}
    assert cluster.pushes == 24
    found = model.predict(X, batch_size=256, verbose=0).argmax(1)
    assert (found == Y).mean() > 0.8
    np.testing.assert_array_equal(cluster.values()[model.out.kernel.path], model.out.kernel.numpy())


class LossOfEachRow(Subclassed):
    def train_step(self, data):
        return {"loss": tf.repeat(super().train_step(data)["loss"], 32)}


def test_a_step_may_log_a_loss_of_each_row_and_its_progress_has_none(cluster):
    model = distribute(compiled(LossOfEachRow(), "sgd"), cluster.contexts[0])
    model.fit(X, Y, batch_size=32, verbose=0)
    *_, last_step, _ = cluster.contexts[0].progress
    assert last_step == (8, 256, None)


class GivenInBuild(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws, derives and assigns first values when it is built."""

    def build(self, shape):
        def make(initializer):
            return self.add_weight(shape=(shape[-1],), initializer=initializer)

        self.drawn = make(lambda shape, dtype: keras.random.normal(shape, dtype=dtype))
        self.derived = make(lambda shape, dtype: tf.abs(self.drawn))
        self.given = make("zeros")
        self.given.assign(self.given + 2.0)

    def call(self, x):
        return x * self.drawn * self.derived * self.given


def test_an_unbuilt_model_begins_with_what_its_build_computes_and_assigns(cluster):
    layer = GivenInBuild()
    model = compiled(keras.Sequential([layer, keras.layers.Dense(2)]), keras.optimizers.SGD(0.0))
    distribute(model, cluster.contexts[0]).fit(X, Y, batch_size=64, verbose=0)
    assert (layer.drawn.numpy() != 0).all()
    np.testing.assert_array_equal(layer.derived, np.abs(layer.drawn.numpy()))
    np.testing.assert_array_equal(layer.given, 2.0 * np.ones(20))


class Prompted(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds the sum of trained rows, of which a setting may leave none."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(0, shape[-1]), name="rows")

    def call(self, x):
        return x + tf.reduce_sum(self.rows, 0)


def test_a_trainable_weight_without_elements_is_trained_with_the_others(cluster):
    layers = [keras.Input((20,)), Prompted(), keras.layers.Dense(2)]
    model = distribute(compiled(keras.Sequential(layers)), cluster.contexts[0])
    model.fit(X, Y, batch_size=64, verbose=0)
    assert cluster.pushes == 4
    assert set(cluster.values()) == {each.path for each in model.layers[-1].weights}


def test_functional_model_with_batchnorm_dropout_and_two_inputs(cluster):
    left, right = keras.Input((10,), name="left"), keras.Input((10,), name="right")
    joined = keras.layers.Concatenate()([left, right])
    normalised = keras.layers.BatchNormalization(momentum=0.5)(joined)
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(16, "relu")(normalised))
    model = keras.Model([left, right], keras.layers.Dense(2)(hidden))
    distribute(compiled(model), cluster.contexts[0], consistency="sync")
    data = {"left": X[:, :10] + 3, "right": X[:, 10:]}
    model.fit(data, Y, batch_size=32, epochs=2, verbose=0)
    assert [group.name for group in cluster.manifest.groups] == ["trainable", "statistics"]
    moving = next(w for w in model.weights if w.path.endswith("moving_mean"))
    np.testing.assert_allclose(moving.numpy()[:10], 3, atol=0.3)
    np.testing.assert_array_equal(cluster.values()[moving.path], moving.numpy())
    assert model.predict(data, verbose=0).shape == (256, 2)


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"steps_per_execution": 3}, {"run_eagerly": True}],
    ids=lambda options: next(iter(options)),
)
def test_compile_options(cluster, options):
    model = distribute(compiled(small(), **options), cluster.contexts[0])
    steps = []
    counting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: steps.append(b))
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[counting])
    assert cluster.pushes == 16, "also the steps of the last, incomplete execution"
    assert len(steps) == (6 if "steps_per_execution" in options else 16)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.long), "float64"]
)
def test_precision_policies_keep_masters_on_the_servers(cluster, policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = distribute(compiled(small()), cluster.contexts[0], consistency="sync")
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    history = model.fit(X, Y, batch_size=32, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    masters = {group.dtype for group in cluster.manifest.groups}
    assert masters == {"float64" if policy == "float64" else "float32"}
    assert cluster.pushes == 24
    model.save(tmp_path / "m.keras")
    saved = keras.models.load_model(tmp_path / "m.keras")  # a complaint would be an error here
    assert int(saved.optimizer.iterations) == 0, "as its slots"
    assert int(model.optimizer.iterations) == 24


@pytest.mark.fault("F48")
def test_float16_skips_non_finite_steps_and_halves_the_scale(cluster):
    keras.config.set_dtype_policy("mixed_float16")
    model = distribute(compiled(small()), cluster.contexts[0], consistency="sync")
    poisoned = X[:64].copy()
    poisoned[:32] = np.inf
    model.fit(poisoned, Y[:64], batch_size=32, shuffle=False, verbose=0)
    assert model._tfos_trainer.skipped_steps == 1
    assert (cluster.pushes, cluster.null_pushes()) == (1, 1)
    assert float(model.optimizer.dynamic_scale.numpy()) == 2.0**14
    assert all(np.isfinite(w.numpy()).all() for w in model.weights)


def half_precision_head(scale, rate, accumulates=None):
    """A float16 layer of its own, whose gradients are small, in front of a float32 one."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4, dtype="float16"), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    inner = keras.optimizers.SGD(rate, gradient_accumulation_steps=accumulates)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("accumulates", [None, 2])
def test_a_loss_scale_beyond_float16_does_not_stop_its_variables(cluster, accumulates):
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(64, n)).astype("float32") * 0.03 for n in (8, 1))
    model, plain = (
        half_precision_head(2.0**17, 10.0, accumulates),
        half_precision_head(2.0**17, 10.0),
    )
    first = model.layers[0].kernel.numpy()
    distribute(model, cluster.contexts[0], consistency="sync")
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=64 if accumulates else 32, shuffle=False, verbose=0)
    assert model._tfos_trainer.skipped_steps == 0
    ours, theirs = (each.layers[0].kernel.numpy() for each in (model, plain))
    assert np.abs(ours - first).max() > 0.004
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.fault("F48")
def test_non_finite_gradient_is_an_error_before_anything_is_sent(cluster):
    model = distribute(compiled(small()), cluster.contexts[0])
    before = [weight.numpy() for weight in model.weights]
    poisoned = X.copy()
    poisoned[40] = np.nan
    with pytest.raises(NonFiniteGradient, match=r"kernel.*worker:0, step 2 "):
        model.fit(poisoned, Y, batch_size=32, shuffle=False, verbose=0)
    assert cluster.pushes == 1
    assert not np.array_equal(before[0], model.weights[0].numpy())


@pytest.mark.fault("F48")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(0, id="first"),
        pytest.param(40, marks=pytest.mark.long, id="second"),
        pytest.param(255, marks=pytest.mark.long, id="last"),
    ],
)
def test_a_non_finite_gradient_can_be_skipped_and_its_batch_is_in_no_metric(cluster, row, eagerly):
    model = small()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"], run_eagerly=eagerly)
    kept = np.delete(np.arange(256), np.s_[row // 32 * 32 : row // 32 * 32 + 32])
    other = keras.models.clone_model(model)  # evaluated, its metrics would have their variables
    other.set_weights(model.get_weights())
    other.compile(loss=loss, metrics=["accuracy"], run_eagerly=eagerly)
    expected = other.evaluate(X[kept], Y[kept], verbose=0, return_dict=True)
    distribute(model, cluster.contexts[0], on_nonfinite="skip")
    poisoned = X.copy()
    poisoned[row] = np.nan
    seen: list[dict[str, float]] = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    guard = keras.callbacks.TerminateOnNaN()
    fitted = model.fit(
        poisoned, Y, batch_size=32, shuffle=False, verbose=0, callbacks=[watch, guard]
    )
    assert model._tfos_trainer.skipped_steps == 1
    assert cluster.pushes == 7
    assert len(seen) == 8
    assert {name: value for name, (value,) in fitted.history.items()} == pytest.approx(expected)
    assert all(np.isfinite(list(logs.values())).all() for logs in seen)


@pytest.mark.fault("F48")
@pytest.mark.parametrize("settings", [{}, {"on_nonfinite": "skip"}], ids=["error", "skip"])
def test_finite_gradients_whose_squares_overflow_are_pushed(cluster, settings):
    def huge(_, outputs):
        return 1e25 * keras.ops.mean(outputs)

    model = small()
    model.compile(keras.optimizers.SGD(1e-25), huge)
    distribute(model, cluster.contexts[0], **settings)
    before = model.get_weights()
    model.fit(X[:64], Y[:64], batch_size=32, verbose=0)
    assert cluster.pushes == 2
    assert not np.array_equal(model.get_weights()[-1], before[-1])
    with pytest.raises(NonFiniteGradient) if not settings else contextlib.nullcontext():
        model.fit(np.full_like(X[:32], np.inf), Y[:32], batch_size=32, verbose=0)
    assert cluster.pushes == 2


@pytest.mark.fault("F48")
def test_an_epoch_of_skipped_steps_alone_has_no_loss(cluster):
    model = distribute(compiled(small()), cluster.contexts[0], on_nonfinite="skip")
    history = model.fit(np.full_like(X, np.nan), Y, batch_size=64, epochs=2, verbose=0).history
    assert model._tfos_trainer.skipped_steps == 8
    assert history == {}, "as an epoch without rows"
    history = model.fit(X, Y, batch_size=64, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def normalized(optimizer):
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return compiled(keras.Sequential([keras.Input((20,)), *layers]), optimizer)


def accumulating():
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.fault("F48")
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (lambda: keras.optimizers.SGD(0.1), {"on_nonfinite": "skip"}),
        (accumulating, {"on_nonfinite": "skip", "consistency": "sync"}),
        (scaled, {}),
    ],
    ids=["async", "accumulation", "loss scale"],
)
def test_a_skipped_step_leaves_the_statistics_of_layers_as_they_were(cluster, optimizer, settings):
    model = distribute(normalized(optimizer()), cluster.contexts[0], **settings)
    model.fit(X[:128], Y[:128], batch_size=32, shuffle=False, verbose=0)
    norm = model.layers[0]
    before = [norm.moving_mean.numpy(), norm.moving_variance.numpy()]
    model.fit(np.full_like(X[:32], np.nan), Y[:32], batch_size=32, verbose=0)
    assert model._tfos_trainer.skipped_steps == 1
    np.testing.assert_array_equal(norm.moving_mean.numpy(), before[0])
    np.testing.assert_array_equal(norm.moving_variance.numpy(), before[1])
    poisoned = X[:128].copy()
    poisoned[3] = np.nan
    model.fit(poisoned, Y[:128], batch_size=32, shuffle=False, verbose=0)
    assert model._tfos_trainer.skipped_steps == 2
    assert all(np.isfinite(values).all() for values in cluster.values().values())
    assert not np.array_equal(norm.moving_mean.numpy(), before[0])


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"weight_decay": 0.0}])
def test_variable_without_gradient_keeps_its_value(cluster, settings):
    class Unused(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def build(self, shape):
            self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((20,)), Unused(), keras.layers.Dense(2)])
    distribute(compiled(model, keras.optimizers.SGD(0.1, **settings)), cluster.contexts[0])
    with pytest.warns(UserWarning, match="idle"):
        model.fit(X, Y, batch_size=32, verbose=0)
    np.testing.assert_array_equal(model.layers[0].idle.numpy(), np.ones(3, "float32"))
    assert cluster.pushes == 8


class Towers(keras.Model):  # type: ignore[misc]  # Keras has no types
    """One layer per key of the batch."""

    def __init__(self):
        super().__init__()
        self.towers = {name: keras.layers.Dense(2, name=name) for name in "ab"}
        for tower in self.towers.values():
            tower.build((None, 20))
        self.built = True

    def call(self, x):
        return sum(self.towers[name](part) for name, part in x.items())


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_loss_that_reaches_no_variable_is_keras_own_error(cluster, is_distributed):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(2)])
    model.compile("sgd", lambda true, _: keras.ops.mean(keras.ops.cast(true, "float32")))
    if is_distributed:
        distribute(model, cluster.contexts[0])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        model.fit(X, Y, batch_size=32, verbose=0)
    assert cluster.pushes == 0


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("first", ["a", "ab"])
def test_variables_that_some_batches_do_not_reach_are_refused(cluster, first):
    """The compiled step of a batch that does not reach them may run again at any time."""
    model = compiled(Towers(), keras.optimizers.SGD(0.1, momentum=0.9))
    distribute(model, cluster.contexts[0])
    model.train_on_batch(dict.fromkeys(first, X[:32]), Y[:32])
    other = "ab" if first == "a" else "a"
    with pytest.raises(UnsupportedModel, match=r"b/kernel.*in some kinds of batches only"):
        model.train_on_batch(dict.fromkeys(other, X[:32]), Y[:32])
    assert cluster.pushes == 1


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        partial(keras.optimizers.SGD, 0.1),
        partial(keras.optimizers.Adagrad, 0.1),
        partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.1),
    ],
)
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_rules_that_a_zero_gradient_leaves_alone_train_what_a_batch_reaches(
    cluster, make, consistency
):
    model, plain = Towers(), Towers()
    plain.set_weights(model.get_weights())
    compiled(plain, make())
    distribute(compiled(model, make()), cluster.contexts[0], consistency=consistency)
    for each in (model, plain):
        for name in ("a", "b", "ab", "b", "a"):
            each.train_on_batch(dict.fromkeys(name, X[:32]), Y[:32])
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.RMSprop(0.1),
        keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2),
    ],
)
def test_rules_and_sums_that_go_on_without_a_gradient_are_refused(cluster, optimizer):
    model = distribute(compiled(Towers(), optimizer), cluster.contexts[0])
    model.train_on_batch({"a": X[:32]}, Y[:32])
    with pytest.raises(UnsupportedModel, match="or use SGD without momentum or Adagrad"):
        model.train_on_batch({"b": X[:32]}, Y[:32])


def test_weight_decay_spares_excluded_variables(cluster):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model = distribute(compiled(small(), optimizer), cluster.contexts[0], consistency="sync")
    plain = small()
    plain.set_weights(model.get_weights())
    reference = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    reference.exclude_from_weight_decay(var_names=["bias"])
    compiled(plain, reference)
    for each in (model, plain):
        each.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    rules = {group.name: group.rule.weight_decay for group in cluster.manifest.groups}
    assert rules == {"trainable": 0.5, "trainable.exempt": None}
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("clip", "consistency"),
    [
        ({"clipnorm": 0.01}, "sync"),
        ({"global_clipnorm": 0.01}, "async"),
        ({"clipvalue": 0.01}, "sync"),
        pytest.param({"clipnorm": 0.01}, "async", marks=pytest.mark.long),
        pytest.param({"global_clipnorm": 0.01}, "sync", marks=pytest.mark.long),
        pytest.param({"clipvalue": 0.01}, "async", marks=pytest.mark.long),
    ],
)
def test_clipping_is_that_of_keras(cluster, clip, consistency):
    model = compiled(small(), keras.optimizers.SGD(0.5, **clip))
    plain = small()
    plain.set_weights(model.get_weights())
    compiled(plain, keras.optimizers.SGD(0.5, **clip))
    distribute(model, cluster.contexts[0], consistency=consistency)
    for each in (model, plain):
        each.fit(X[:96], Y[:96], batch_size=32, shuffle=False, verbose=0)
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6, atol=1e-7)


def test_embedding_gradients_are_densified_up_to_a_size(cluster, monkeypatch):
    def embedding():
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )

    ids = np.random.default_rng(0).integers(0, 50, (64, 3))
    model = distribute(compiled(embedding()), cluster.contexts[0])
    model.fit(ids, Y[:64], batch_size=32, verbose=0)
    assert cluster.pushes == 2
    monkeypatch.setattr("tfos.keras.embedding.dense_embeddings.MAX_DENSIFIED_BYTES", 799)
    with serving() as second:
        model = distribute(compiled(embedding()), second.contexts[0])
        name = model.layers[0].name
        line = rf"Embedding\(4, table='{name}'\) instead of .*\(50, 4\), layer '{name}'"
        with pytest.raises(UnsupportedModel, match=r"800 bytes.*" + line + r".*Hashing"):
            model.fit(ids, Y[:64], batch_size=32, verbose=0)
        assert second.pushes == 0


class Slices(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Changes the values of sparse gradients; the slices that it makes do not know their shape."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        halves = [
            tf.IndexedSlices(each.values / 2, each.indices)
            if isinstance(each, tf.IndexedSlices)
            else each / 2
            for each in tape.gradient(loss, self.trainable_variables)
        ]
        self.optimizer.apply(halves, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("eagerly", [True, False])
def test_slices_of_a_step_that_leave_out_their_shape_are_taken_as_by_keras(cluster, eagerly):
    """TensorFlow makes no tensor of them, and its own error ended the fit."""
    ids = np.random.default_rng(0).integers(0, 50, (64, 3))

    def made():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
        model = Slices([keras.Input((3,), dtype="int32"), *layers])
        return compiled(model, keras.optimizers.SGD(0.5), run_eagerly=eagerly)

    model, plain = distribute(made(), cluster.contexts[0]), made()
    for each in (model, plain):
        each.fit(ids, Y[:64], batch_size=32, shuffle=False, verbose=0)
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6, atol=1e-7)


class Wrong(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    """Steps that cannot be split; `how` says in which way."""

    how = "nothing"

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))

        def assign():
            for gradient, variable in pairs:
                variable.assign_sub(0.1 * gradient)
            return loss

        def average():
            target, online = self.layers[0].kernel, self.layers[1].kernel
            target.assign(0.9 * target + 0.1 * tf.reduce_mean(online))

        branch = tf.function(lambda: tf.cond(loss > 0, assign, lambda: loss), autograph=False)
        one_round = lambda: tf.while_loop(  # noqa: E731
            lambda last: last < 0, lambda _: [assign()], [tf.constant(-1.0)]
        )
        own_writes = {
            "assigns": assign,
            "assigns in a branch": branch,
            "assigns in a loop": one_round,
            "momentum": average,
            "part": lambda: self.layers[0].kernel.value[:2].assign(tf.zeros((2, 20))),
            "twice": lambda: self.optimizer.apply_gradients(pairs),
        }
        if self.how in own_writes:
            own_writes[self.how]()
            self.optimizer.apply_gradients(pairs)
        elif self.how == "double":
            self.optimizer.apply_gradients(pairs + pairs[:1])
        elif self.how == "nested":
            tf.function(lambda: self.optimizer.apply_gradients(pairs), autograph=False)()
        return {"loss": loss}


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nothing", "did not call apply"),
        ("assigns", "writes '.*kernel' itself"),
        ("assigns in a branch", "writes '.*kernel' itself"),
        ("assigns in a loop", "writes '.*kernel' itself"),
        (
            "momentum",
            "writes '.*frozen/kernel', which is not trained.*use_ema=True.*self.add_weight",
        ),
        ("part", "writes '.*frozen/kernel', which is not trained"),
        ("double", "'.*kernel' twice in one apply"),
        ("twice", "more than once"),
        ("nested", "inside a tf.function"),
    ],
)
def test_steps_that_cannot_be_split_are_refused(cluster, how, sentence):
    frozen = keras.layers.Dense(20, name="frozen", trainable=False)
    model = Wrong([keras.Input((20,)), frozen, keras.layers.Dense(2)])
    model.how = how
    distribute(compiled(model, run_eagerly=False), cluster.contexts[0])
    for eagerly in (False, True):
        model.run_eagerly = eagerly and how != "nested"
        with pytest.raises(UnsupportedModel, match=sentence):
            model.train_on_batch(X[:32], Y[:32])
    assert cluster.pushes == 0


def test_a_layer_that_rewrites_its_weights_is_refused(cluster):
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
    model = distribute(compiled(keras.Sequential([keras.Input((20,)), layer])), cluster.contexts[0])
    with pytest.raises(UnsupportedModel, match=r"as SpectralNormalization does.*regularizer"):
        model.train_on_batch(X[:32], Y[:32])


class Teacher(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Holds the copies of a moving teacher itself, as the refusal of "momentum" advises."""

    def __init__(self) -> None:
        super().__init__()
        self.student = keras.layers.Dense(2)

    def build(self, shape):
        self.student.build(shape)
        self.copies = [
            self.add_weight(shape=each.shape, initializer="zeros", trainable=False)
            for each in self.student.trainable_variables
        ]
        self.built = True

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        logs = super().train_step(data)
        for copy, each in zip(self.copies, self.student.trainable_variables, strict=True):
            copy.assign(0.5 * copy + 0.5 * each)
        return logs


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_copy_that_moves_is_a_statistic_of_the_model_itself(cluster, eagerly):
    model = Teacher()
    model.build((None, 20))
    distribute(compiled(model, run_eagerly=eagerly), cluster.contexts[0], consistency="sync")
    expected = [0 * value for value in model.get_weights()[:2]]
    for _ in range(3):
        student = [each.numpy() for each in model.student.trainable_variables]
        expected = [0.5 * a + 0.5 * b for a, b in zip(expected, student, strict=True)]
        model.train_on_batch(X[:32], Y[:32])
    (group,) = [each for each in cluster.manifest.groups if each.name == "statistics"]
    held = cluster.values()
    for param, values in zip(group.params, expected, strict=True):
        np.testing.assert_allclose(held[param.name], values, rtol=1e-6)
    model.fit(X, Y, batch_size=160, verbose=0)
    assert cluster.pushes == 5
    assert all(np.any(held[param.name]) for param in group.params)


class OwnRule(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """A subclass may compute anything."""


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (lambda: keras.optimizers.Muon(), "Muon, which orthogonalizes .* matrix.*AdamW or Lion"),
        (lambda: keras.optimizers.Lamb(), "Lamb, which scales .* whole parameter.*use AdamW"),
        (
            lambda: keras.optimizers.ScheduleFreeAdamW(),
            "ScheduleFreeAdamW, which keeps values .*use AdamW with use_ema=True",
        ),
        (
            lambda: keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(0.1)),
            "MultiOptimizer, which has an optimizer per variable.*use one of its optimizers",
        ),
        (lambda: keras.optimizers.Adafactor(), "Adafactor, which keeps sums over.*use Adam"),
        (lambda: OwnRule(0.1), "no update rule for OwnRule; compile .* one of: SGD, Adagrad"),
        (
            lambda: keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2),
            "use_ema=True, gradient_accumulation_steps=2.*drop one of the two",
        ),
    ],
)
def test_optimizers_without_a_rule_are_refused(cluster, optimizer, sentence):
    with pytest.raises(UnsupportedOptimizer, match=sentence):
        distribute(compiled(small(), optimizer()), cluster.contexts[0])


def test_arguments_and_models_that_cannot_work_are_refused(cluster):
    ctx = cluster.contexts[0]
    with pytest.raises(NotCompiled, match=r"call model\.compile"):
        distribute(small(), ctx)
    with pytest.raises(SettingsError, match="consistency must be one of"):
        distribute(compiled(small()), ctx, consistency="eventually")
    with pytest.raises(UnsupportedModel, match=r"takes a Keras 3 model, got builtins\.str"):
        distribute("model", ctx)
    constrained = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(2, kernel_constraint="non_neg")]
    )
    with pytest.raises(UnsupportedModel, match="constraint"):
        distribute(compiled(constrained), ctx)
    twins = compiled(small())
    twins.second = keras.optimizers.SGD()
    with pytest.raises(
        UnsupportedModel, match=r"further optimizers \(second\).*\.apply\(gradients_1"
    ):
        distribute(twins, ctx)


def test_an_own_train_function_is_refused(cluster):
    class OwnFunction(keras.Sequential):  # type: ignore[misc]  # Keras has no types
        def make_train_function(self, force=False):
            step = super().make_train_function(force)
            self.train_function = lambda batches: step(batches) | {"more": 1.0}
            return self.train_function

    model = compiled(OwnFunction([keras.Input((20,)), keras.layers.Dense(2)]))
    with pytest.raises(UnsupportedModel, match="OwnFunction has its own make_train_function"):
        distribute(model, cluster.contexts[0])
    patched = compiled(small())
    patched.make_train_function = model.make_train_function
    with pytest.raises(UnsupportedModel, match="has its own make_train_function"):
        distribute(patched, cluster.contexts[0])


def test_changes_after_distribution_are_refused(cluster):
    model = distribute(compiled(small()), cluster.contexts[0])
    with pytest.raises(UnsupportedModel, match="already distributed"):
        distribute(model, cluster.contexts[0])
    model.layers[0].trainable = False
    with pytest.raises(
        VariablesChanged, match=r"no longer trainable.*unfrozen.*in a cluster of its own"
    ):
        model.fit(X, Y, verbose=0)
    model.layers[0].trainable = True
    model.fit(X, Y, batch_size=128, verbose=0)
    compiled(model, model.optimizer, metrics=["accuracy"])  # the step has the old loss and metrics
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(UnsupportedModel, match=r"compiled again after ctx\.distribute"):
            train(X, Y)
    assert cluster.pushes == 2
    compiled(model)
    with pytest.raises(UnsupportedModel, match=r"compiled again.*load it, .*a cluster of its own"):
        model.fit(X, Y, verbose=0)


def test_servers_with_another_model_are_refused(cluster):
    distribute(compiled(small()), cluster.contexts[0])
    other = keras.Sequential([keras.Input((20,)), keras.layers.Dense(3)])
    with pytest.raises(ManifestMismatch, match="kernel"):
        distribute(compiled(other), cluster.contexts[0])


def test_a_model_that_trains_nothing_is_told_what_to_set(cluster):
    model = small()
    model.trainable = False
    with pytest.raises(UnsupportedModel, match=r"no trainable variables, .*set trainable=True"):
        distribute(compiled(model), cluster.contexts[0]).fit(X, Y, verbose=0)


def test_frozen_weights_are_not_moved_but_kept(cluster):
    model = small()
    model.layers[0].trainable = False
    before = model.layers[0].kernel.numpy()
    distribute(compiled(model), cluster.contexts[0])
    model.fit(X, Y, batch_size=32, verbose=0)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)
    names = [
        [param.name for group in groups for param in group.params]
        for groups in (cluster.manifest.pushed_groups, cluster.manifest.frozen_groups)
    ]
    trained, frozen = model.layers[1].weights, model.layers[0].weights
    assert names == [[weight.path for weight in weights] for weights in (trained, frozen)]


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["traced", "eager"])
@pytest.mark.parametrize("built", [True, pytest.param(False, marks=pytest.mark.long)])
def test_labels_that_keras_would_broadcast_over_one_unit_are_refused(cluster, options, built):
    layers = [keras.layers.Dense(1, name="price")]
    model = keras.Sequential(([keras.Input((20,))] if built else []) + layers)
    model.compile("sgd", "mse", **options)
    distribute(model, cluster.contexts[0])
    text = r"output 'price' have the shape \[batch, 2\] and the output has \[batch, 1\]: mean_s"
    with pytest.raises(SettingsError, match=text):
        model.fit(X, np.zeros((256, 2), "float32"), batch_size=32, verbose=0)
    assert not cluster.pushes
    model.fit(X, np.zeros((256, 1), "float32"), batch_size=32, verbose=0)
    assert cluster.pushes == 8


@pytest.mark.parametrize("built", [True, False])
def test_workers_of_one_seed_draw_other_numbers_and_the_chief_those_of_one_process(built):
    def make():
        keras.utils.set_random_seed(3)
        seeded = [keras.layers.Dropout(0.5, seed=7), keras.layers.Dropout(0.5)]
        first = [keras.Input((64,))] if built else []
        model = keras.Sequential([*first, *seeded, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def drops(model):
        ones = np.ones((1, 64))
        return [layer(ones, training=True).numpy().tobytes() for layer in model.layers[:2]]

    x, y = np.ones((4, 64), "float32"), np.ones((4, 1), "float32")
    alone, models = make(), [make() for _ in range(3)]
    alone.train_on_batch(x, y)
    with serving(num_workers=3) as servers:

        def work(rank):
            distribute(models[rank], servers.contexts[rank]).train_on_batch(x, y)
            return drops(models[rank])

        found = together(work, 3)
    assert found[0] == drops(alone)
    assert [len(set(each)) for each in zip(*found, strict=True)] == [3, 3]
