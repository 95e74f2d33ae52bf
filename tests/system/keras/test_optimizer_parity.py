"""Our rules against keras.optimizers: the same gradients, compared bit by bit.

The oracle runs as in `fit`: inside a tf.function that is not compiled by XLA. The rule comes from
the Keras optimizer as the binding makes it, and so do the scalars that travel with the push.
"""

import functools

import numpy as np
import pytest

from ps.dense.shard import DenseShard
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Layout, Manifest, ParamSpec
from ps.optim import kernels
from ps.optim.clipping import Clipper
from ps.optim.rules import rule_of, scalars, step_scalars

pytestmark = [pytest.mark.tf, pytest.mark.slow]

SHAPES = ((101, 40), (40,), (), (40, 7))
PARAMS = tuple(ParamSpec(f"p{i}", shape) for i, shape in enumerate(SHAPES))
SCALAR = 101 * 40 + 40
"""Place of the parameter of shape () in the flat buffer."""
CHECKED_STEPS = (1, 10, 100)


class Keras:
    """A Keras optimizer with variables, stepped in a tf.function."""

    def __init__(self, optimizer, values, dtype, *, eager=False):
        import keras
        import tensorflow as tf

        self.tf = tf
        self.optimizer = optimizer
        self.dtype = dtype
        self.variables = [keras.Variable(value, dtype=dtype) for value in values]
        optimizer.build(self.variables)
        self._apply = self._step if eager else tf.function(self._step, jit_compile=False)
        self._scalars = tf.function(self._compute_scalars, jit_compile=False)

    def _step(self, gradients):
        self.optimizer.apply(gradients, self.variables)

    def _compute_scalars(self):
        from tfos.keras.step import optimizers

        return self.tf.stack(optimizers.step_scalars(self.optimizer, [self.dtype]))

    def rule(self):
        from tfos.keras.step import optimizers

        return optimizers.rule_of(self.optimizer, consistency="sync", decays=True)

    def hyper(self, *, with_scalars):
        rate, *scalars = self._scalars().numpy().tolist()
        return Hyper(rate, {"trainable": tuple(scalars)} if with_scalars and scalars else None)

    def step(self, gradients):
        self._apply([self.tf.constant(gradient) for gradient in gradients])

    def flat(self):
        return flat([variable.numpy() for variable in self.variables])

    def slots(self, names):
        """Slots as flat arrays; Keras keeps them per variable or per slot, found by name."""
        found: dict[str, list[np.ndarray]] = {}
        for variable in self.optimizer.variables[2:]:
            name = next((n for n in names if variable.path.endswith(f"_{n}")), None)
            if name is not None:  # Nadam keeps a product there too
                found.setdefault(name, []).append(variable.numpy())
        return {name: flat(parts) for name, parts in found.items()}


def flat(parts):
    return np.concatenate([np.ravel(part) for part in parts])


def split(values):
    layout = Layout.of(manifest(SGD(), str(values.dtype))).groups[0]
    ends = layout.offsets[1:-1]
    return [p.reshape(s) for p, s in zip(np.split(values, ends), SHAPES, strict=True)]


def manifest(rule, dtype="float32"):
    return Manifest(
        groups=(GroupSpec("trainable", dtype, rule, PARAMS),),
        bucket_bytes=2048,
        consistency="sync",
    )


def gradient(step, kind, dtype):
    """Gradients of ordinary size, or of wild sizes with zeros and denormal squares."""
    rng = np.random.default_rng(step)
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == "wild":
        values *= np.float32(10) ** rng.integers(-25, 3, size).astype(np.float32)
        values[rng.random(size) < 0.3] = 0
    return values.astype(dtype)


def shard_of(rule, values):
    (shard,) = [DenseShard(manifest(rule, str(values.dtype)), rank=0, num_servers=1, num_workers=1)]
    for bucket in shard.buckets:
        shard.set_values(bucket.id, values[bucket.start : bucket.stop])
    return shard


class Rows:
    """The same numbers as rows of a table that every push brings, in another order each time."""

    DIM = 7

    def __init__(self, rule, values):
        self._rule, self._name = rule, str(values.dtype)
        self._update = kernels.sparse_for(rule, self._name)
        parts = [values.reshape(-1, self.DIM)]
        parts += [np.full_like(parts[0], start) for start in rule_of(rule).slot_starts]
        self._slab = np.hstack(parts)

    def apply(self, gradient, hyper, step):
        rows = np.random.default_rng(step).permutation(len(self._slab))
        grads = gradient.reshape(-1, self.DIM)[rows]
        given = step_scalars(self._rule, "trainable", hyper, step, np.dtype(self._name))
        self._update(self._slab, rows, grads, given)

    def values(self):
        return np.ascontiguousarray(self._slab[:, : self.DIM]).reshape(-1)


def run(make, *, kind="normal", dtype="float32", with_scalars=True, eager=False):
    """Step both sides; yield (step, ours, Keras's, our slots, Keras's slots) to be compared.

    Rows of a table go the same way and are compared here: dense and sparse are the same bits.
    """
    start = gradient(1000, "normal", dtype)
    oracle = Keras(make(), split(start), dtype, eager=eager)
    shard = shard_of(oracle.rule(), start)
    rows = Rows(oracle.rule(), start) if not oracle.rule().ema_momentum else None
    for step in range(1, CHECKED_STEPS[eager and -2] + 1):
        pushed = gradient(step, kind, dtype)
        hyper = oracle.hyper(with_scalars=with_scalars)
        oracle.step(split(pushed))
        for bucket in shard.buckets:
            shard.apply(bucket.id, pushed[bucket.start : bucket.stop], hyper)
        if rows is not None:
            rows.apply(pushed, hyper, step)
        if step in CHECKED_STEPS:
            ours = flat([shard.values(i) for i in shard.bucket_ids])
            assert rows is None or rows.values().tobytes() == ours.tobytes(), f"rows at {step}"
            slots = {
                name: flat([shard.slots(i)[name] for i in shard.bucket_ids])
                for name in shard.slots(0)
            }
            yield step, ours, oracle.flat(), slots, oracle.slots(slots)


def keras_optimizer(name, *args, **settings):
    import keras

    return functools.partial(getattr(keras.optimizers, name), *args, **settings)


EQUAL = {
    "sgd": keras_optimizer("SGD", 0.05),
    "sgd with decay": keras_optimizer("SGD", 0.05, weight_decay=0.1),
    "momentum": keras_optimizer("SGD", 0.05, momentum=0.9),
    "nesterov": keras_optimizer("SGD", 0.05, momentum=0.9, nesterov=True),
    "adam": keras_optimizer("Adam", 0.001),
    "adam with other betas": keras_optimizer("Adam", 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5),
    "adamw": keras_optimizer("AdamW", 0.003),
    "amsgrad": keras_optimizer("Adam", 0.001, amsgrad=True),
    "adamw with amsgrad": keras_optimizer("AdamW", 0.003, amsgrad=True),
    "adamax": keras_optimizer("Adamax", 0.01),
    "ftrl": keras_optimizer("Ftrl", 0.05),
    "sgd with averages": keras_optimizer("SGD", 0.05, use_ema=True, ema_momentum=0.3),
    "adamw with averages": keras_optimizer(
        "AdamW", 0.003, use_ema=True, ema_momentum=0.97, ema_overwrite_frequency=7
    ),
    "ftrl with strengths": keras_optimizer(
        "Ftrl",
        0.05,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.1,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.5,
    ),
    "ftrl with a linear power": keras_optimizer("Ftrl", 0.05, learning_rate_power=-1.0),
    "lion": keras_optimizer("Lion", 0.01, weight_decay=0.01),
}
"""Equal bit for bit in compiled functions."""

ROOTS = {
    "adagrad": (keras_optimizer("Adagrad", 0.05), 0.7),
    "rmsprop": (keras_optimizer("RMSprop", 0.01), 0.04),
    "rmsprop with momentum": (keras_optimizer("RMSprop", 0.01, momentum=0.9), 0.4),
    "rmsprop centered": (keras_optimizer("RMSprop", 0.01, centered=True, epsilon=1e-3), 0.08),
    "rmsprop with both": (
        keras_optimizer("RMSprop", 0.01, momentum=0.5, centered=True, epsilon=1e-3),
        0.16,
    ),
    "adadelta": (keras_optimizer("Adadelta", 1.0), 0.1),
}
"""With the largest change of a step. Compiled TensorFlow approximates the roots of these."""

NEAR = {
    "nadam": keras_optimizer("Nadam", 0.01),
    "ftrl with another power": keras_optimizer("Ftrl", 0.05, learning_rate_power=-0.8),
}
"""Powers taken by another library, which may differ in their last bit."""


def zero_without_sign(values):
    return (values + 0).tobytes()


ALSO_WILD = ("sgd", "nesterov", "adamw", "adamw with amsgrad", "adamax", "ftrl", "lion")
ALSO_DOUBLE = ("momentum", "adamw", "ftrl with strengths", "adamw with averages")
AGAIN_OTHERWISE = {*ALSO_WILD, *ALSO_DOUBLE, "adam with other betas"}
"""Rules of which other gradients, the other dtype or other settings are compared as well."""


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        *(
            pytest.param(
                name, "normal", "float32", marks=[pytest.mark.long] * (name in AGAIN_OTHERWISE)
            )
            for name in EQUAL
        ),
        *(
            pytest.param(name, "wild", "float32", marks=[pytest.mark.long] * (name in ALSO_DOUBLE))
            for name in ALSO_WILD
        ),
        *((name, "normal", "float64") for name in ALSO_DOUBLE),
    ],
)
def test_one_worker_equals_keras_bit_for_bit(name, kind, dtype):
    make = EQUAL[name]
    for step, ours, theirs, our_slots, their_slots in run(make, kind=kind, dtype=dtype):
        if make().weight_decay:  # TensorFlow multiplies in another order for a scalar
            near = 2 * step * np.spacing(np.abs(theirs[SCALAR]))
            assert abs(ours[SCALAR] - theirs[SCALAR]) <= near
            ours[SCALAR] = theirs[SCALAR]
        assert zero_without_sign(ours) == zero_without_sign(theirs), f"values at step {step}"
        assert our_slots.keys() == their_slots.keys()
        for slot, values in our_slots.items():
            assert zero_without_sign(values) == zero_without_sign(their_slots[slot]), (slot, step)


@pytest.mark.parametrize("name", ROOTS)
def test_rules_with_a_root_below_equal_eager_keras_bit_for_bit(name):
    for step, ours, theirs, our_slots, their_slots in run(ROOTS[name][0], kind="wild", eager=True):
        assert ours.tobytes() == theirs.tobytes(), f"values differ at step {step}"
        assert our_slots.keys() == their_slots.keys()
        for slot, values in our_slots.items():
            assert values.tobytes() == their_slots[slot].tobytes(), (slot, step)


@pytest.mark.parametrize("name", ROOTS)
def test_compiled_keras_differs_from_them_by_its_approximate_root_alone(name):
    """Each step's update is within 2 ulp; the sums of squares are equal."""
    make, largest = ROOTS[name]
    for step, ours, theirs, slots, their_slots in run(make):
        each = 2 * np.spacing(np.float32(largest)) + np.spacing(np.abs(theirs))
        assert (np.abs(ours - theirs) <= step * each).all(), f"values differ at step {step}"
        squares = next(iter(slots))
        assert slots[squares].tobytes() == their_slots[squares].tobytes()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in NEAR), ("nadam", "float64")]
)
def test_rules_with_powers_stay_within_a_few_ulp(name, dtype):
    for step, ours, theirs, _, _ in run(NEAR[name], dtype=dtype):
        near = 16 * np.spacing(np.maximum(np.abs(theirs), theirs.dtype.type(1)))
        assert (np.abs(ours - theirs) <= near).all(), f"values differ at step {step}"


@pytest.mark.parametrize("rule", ["adam", "adamw", "amsgrad", "adamax"])
def test_without_keras_scalars_they_stay_within_two_ulp_a_step(rule):
    """The servers' own powers may differ from TensorFlow's in the last bit."""
    for step, ours, theirs, our_slots, their_slots in run(EQUAL[rule], with_scalars=False):
        bound = 2 * step * np.spacing(np.maximum(np.abs(theirs), np.float32(0.01)))
        assert (np.abs(ours - theirs) <= bound).all(), f"values differ at step {step}"
        for slot, values in our_slots.items():  # the slots do not depend on the powers
            assert values.tobytes() == their_slots[slot].tobytes()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_rows_of_a_table_equal_kerass_where_zeros_move_nothing(name):
    """Keras updates every row, with a gradient of zero where a batch did not reach; Adam moves."""
    import tensorflow as tf

    from tfos.keras.step import optimizers

    rng = np.random.default_rng(5)
    start, optimizer = rng.standard_normal((30, 8)).astype(np.float32), keras_optimizer(name, 0.1)()
    variable = tf.Variable(start)
    optimizer.build([variable])
    config = optimizers.rule_of(optimizer, consistency="async", decays=True)
    update_rows, rule = kernels.sparse_for(config, "float32"), rule_of(config)
    table = np.hstack([start, *(np.full_like(start, at) for at in rule.slot_starts)])
    touched = np.zeros(30, bool)
    for step in range(1, 11):
        rows = rng.permutation(20)[:7]
        touched[rows] = True
        grads = rng.standard_normal((7, 8)).astype(np.float32)
        optimizer.apply([tf.IndexedSlices(grads, rows, start.shape)], [variable])
        update_rows(table, rows, grads, scalars(config, 0.1, step, np.dtype(np.float32)))
    same = (table[:, :8] == variable.numpy()).all(axis=1)
    assert (table[~touched, :8] == start[~touched]).all()
    assert same[~touched].all()
    assert same.all() == (name != "Adam")


@pytest.mark.parametrize(
    "settings",
    [{"clipvalue": 0.3}, {"clipnorm": 1.5}, {"global_clipnorm": 2.0}, {"global_clipnorm": 1e6}],
    ids=str,
)
def test_clipped_gradients_are_within_two_ulp(settings):
    """A step of learning rate 1 from 0 shows the clipped gradient itself, with its sign."""
    rule = SGD(**settings)
    whole = manifest(rule)
    pushed = gradient(3, "normal", np.float32)
    zeros = np.zeros_like(pushed)
    oracle = Keras(keras_optimizer("SGD", 1.0, **settings)(), split(zeros), "float32")
    oracle.step(split(pushed))
    shard = shard_of(rule, zeros)
    clipped = Clipper(whole, num_workers=1).clip({"trainable": pushed})["trainable"]
    for bucket in shard.buckets:
        shard.apply(bucket.id, clipped[bucket.start : bucket.stop], Hyper(1.0))
    ours = flat([shard.values(i) for i in shard.bucket_ids])
    theirs = oracle.flat()
    assert (np.abs(ours - theirs) <= 2 * np.spacing(np.abs(theirs))).all()
    if "clipvalue" in settings:
        assert ours.tobytes() == theirs.tobytes()


def test_a_changed_learning_rate_acts_as_in_keras():
    start = gradient(1000, "normal", "float32")
    oracle = Keras(EQUAL["momentum"](), split(start), "float32")
    shard = shard_of(SGD(momentum=0.9), start)
    for step in range(1, 21):
        oracle.optimizer.learning_rate = 0.1 / step
        pushed = gradient(step, "normal", "float32")
        hyper = oracle.hyper(with_scalars=True)
        oracle.step(split(pushed))
        for bucket in shard.buckets:
            shard.apply(bucket.id, pushed[bucket.start : bucket.stop], hyper)
    ours = flat([shard.values(i) for i in shard.bucket_ids])
    assert ours.tobytes() == oracle.flat().tobytes()
