"""Our rules against keras.optimizers: the same gradients, compared bit by bit.

The oracle runs as in `fit`: inside a tf.function that is not compiled by XLA. Adam's step size is
computed by TensorFlow and travels with the push, as the Keras binding does it.
"""

import numpy as np
import pytest

from ps.clipping import Clipper
from ps.dense import DenseShard
from ps.params import SGD, Adagrad, Adam, AdamW, GroupSpec, Hyper, Layout, Manifest, ParamSpec

pytestmark = [pytest.mark.tf, pytest.mark.slow]

SHAPES = ((101, 40), (40,), (), (40, 7))
PARAMS = tuple(ParamSpec(f"p{i}", shape) for i, shape in enumerate(SHAPES))
SCALAR = 101 * 40 + 40
"""Place of the parameter of shape () in the flat buffer."""
CHECKED_STEPS = (1, 10, 50, 60)


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
        self._alpha = tf.function(self._compute_alpha, jit_compile=False)

    def _step(self, gradients):
        self.optimizer.apply(gradients, self.variables)

    def _compute_alpha(self):
        tf, optimizer = self.tf, self.optimizer
        step = tf.cast(optimizer.iterations + 1, self.dtype)
        power_1 = tf.pow(tf.cast(optimizer.beta_1, self.dtype), step)
        power_2 = tf.pow(tf.cast(optimizer.beta_2, self.dtype), step)
        rate = tf.cast(optimizer.learning_rate, self.dtype)
        return rate * tf.sqrt(1 - power_2) / (1 - power_1)

    def hyper(self, *, with_scalars):
        rate = float(self.optimizer.learning_rate)
        if with_scalars and hasattr(self.optimizer, "beta_2"):
            return Hyper(rate, {"trainable": (float(self._alpha()),)})
        return Hyper(rate)

    def step(self, gradients):
        self._apply([self.tf.constant(gradient) for gradient in gradients])

    def flat(self):
        return flat([variable.numpy() for variable in self.variables])

    def slots(self):
        """Slots as flat arrays; Keras keeps them per variable or per slot, found by name."""
        found: dict[str, list[np.ndarray]] = {}
        for variable in self.optimizer.variables[2:]:
            found.setdefault(variable.path.rsplit("_", 1)[-1], []).append(variable.numpy())
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


def run(make, rule, *, kind="normal", dtype="float32", with_scalars=True, eager=False):
    """Step both sides; yield (step, ours, Keras's, our slots, Keras's slots) to be compared."""
    start = gradient(1000, "normal", dtype)
    oracle = Keras(make(), split(start), dtype, eager=eager)
    shard = shard_of(rule, start)
    for step in range(1, CHECKED_STEPS[-1] + 1):
        pushed = gradient(step, kind, dtype)
        hyper = oracle.hyper(with_scalars=with_scalars)
        oracle.step(split(pushed))
        for bucket in shard.buckets:
            shard.apply(bucket.id, pushed[bucket.start : bucket.stop], hyper)
        if step in CHECKED_STEPS:
            ours = flat([shard.values(i) for i in shard.bucket_ids])
            slots = {
                name: flat([shard.slots(i)[name] for i in shard.bucket_ids])
                for name in shard.slots(0)
            }
            yield step, ours, oracle.flat(), slots, oracle.slots()


def optimizer(name, *args, **settings):
    import keras

    return getattr(keras.optimizers, name)(*args, **settings)


CASES = {
    "sgd": (lambda: optimizer("SGD", 0.05), SGD()),
    "sgd with decay": (lambda: optimizer("SGD", 0.05, weight_decay=0.1), SGD(weight_decay=0.1)),
    "momentum": (lambda: optimizer("SGD", 0.05, momentum=0.9), SGD(momentum=0.9)),
    "nesterov": (
        lambda: optimizer("SGD", 0.05, momentum=0.9, nesterov=True),
        SGD(momentum=0.9, nesterov=True),
    ),
    "adam": (lambda: optimizer("Adam", 0.001), Adam()),
    "adam with other betas": (
        lambda: optimizer("Adam", 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5),
        Adam(beta_1=0.8, beta_2=0.95, epsilon=1e-5),
    ),
    "adamw": (lambda: optimizer("AdamW", 0.003), AdamW()),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "wild"])
@pytest.mark.parametrize("name", CASES)
def test_one_worker_equals_keras_bit_for_bit(name, kind, dtype):
    for step, ours, theirs, our_slots, their_slots in run(*CASES[name], kind=kind, dtype=dtype):
        if CASES[name][1].weight_decay:  # TensorFlow multiplies in another order for a scalar
            near = 2 * step * np.spacing(np.abs(theirs[SCALAR]))
            assert abs(ours[SCALAR] - theirs[SCALAR]) <= near
            ours[SCALAR] = theirs[SCALAR]
        assert ours.tobytes() == theirs.tobytes(), f"values differ at step {step}"
        assert our_slots.keys() == their_slots.keys()
        for slot, values in our_slots.items():
            assert values.tobytes() == their_slots[slot].tobytes(), f"{slot} at step {step}"


def test_eager_adagrad_is_equal_bit_for_bit():
    for step, ours, theirs, _, _ in run(
        lambda: optimizer("Adagrad", 0.05), Adagrad(), kind="wild", eager=True
    ):
        assert ours.tobytes() == theirs.tobytes(), f"values differ at step {step}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_adagrad_differs_by_its_approximate_root_alone(dtype):
    """Each step's update is within 2 ulp; the accumulators are equal."""
    update = 0.05 * 4 / np.sqrt(0.1)  # the largest: learning rate * |g| / root of the start
    for step, ours, theirs, slots, their_slots in run(
        lambda: optimizer("Adagrad", 0.05), Adagrad(), dtype=dtype
    ):
        bound = step * (2 * np.spacing(np.dtype(dtype).type(update)) + np.spacing(np.abs(theirs)))
        assert (np.abs(ours - theirs) <= bound).all(), f"values differ at step {step}"
        assert slots["accumulator"].tobytes() == their_slots["accumulator"].tobytes()


@pytest.mark.parametrize("rule", ["adam", "adamw", "adam with other betas"])
def test_adam_without_keras_scalars_stays_within_two_ulp_a_step(rule):
    """The servers' own powers may differ from TensorFlow's in the last bit."""
    for step, ours, theirs, our_slots, their_slots in run(*CASES[rule], with_scalars=False):
        bound = 2 * step * np.spacing(np.maximum(np.abs(theirs), np.float32(0.01)))
        assert (np.abs(ours - theirs) <= bound).all(), f"values differ at step {step}"
        for slot, values in our_slots.items():  # the slots do not depend on alpha
            assert values.tobytes() == their_slots[slot].tobytes()


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
    oracle = Keras(optimizer("SGD", 1.0, **settings), split(zeros), "float32")
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
    oracle = Keras(optimizer("SGD", 0.1, momentum=0.9), split(start), "float32")
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
