"""How many GB of gradient a second does a server apply, rule by rule, on one thread?

Figures: APPLY.
Method: 64 MiB of float32 gradient, values and slots in memory, updated bucket by bucket (256 KiB)
    as a server does, by the compiled kernel alone: no lock, no check of the gradient. The
    references take turns: the same formula in numpy, bucket by bucket too
    (reference/numpy_apply.py), and TensorFlow's fused operator, or Keras's compiled apply where
    there is none (reference/tensorflow_apply.py), on the whole array with one thread.
Caveats: a bucket comes from memory, not from a cache: rules with more slots move more bytes.
Bars: none.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.manifest.rule_spec import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AMSGrad,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
    RuleConfig,
)
from ps.optim import kernels
from ps.optim.rules import Rule, rule_of, scalars
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.reference import numpy_apply, tensorflow_apply

Array = np.ndarray[Any, Any]

MIB = 1 << 20
BUCKET = 65_536
REPEATS = 9
RULES: tuple[RuleConfig, ...] = (
    SGD(),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
    Adagrad(),
    RMSprop(),
    RMSprop(momentum=0.9),
    RMSprop(centered=True, epsilon=1e-3),
    RMSprop(centered=True, momentum=0.9, epsilon=1e-3),
    Adadelta(),
    Adam(),
    AMSGrad(),
    Adamax(),
    Nadam(),
    Ftrl(),
    Ftrl(learning_rate_power=-0.7),
    Lion(),
)


def measure(bench: Bench, config: RuleConfig, gradient: Array) -> None:
    """Report one rule against both references.

    Args:
        bench: takes the figure.
        config: the rule.
        gradient: [n] float32.
    """
    rule = rule_of(config)
    s = scalars(config, 1e-3, 1, gradient.dtype)
    kernel = kernels.dense_for(config, "float32")
    mine, numpys = _arrays(rule, gradient.size), _arrays(rule, gradient.size)
    buckets = [slice(start, start + BUCKET) for start in range(0, gradient.size, BUCKET)]

    def ours() -> None:
        for bucket in buckets:
            kernel(gradient[bucket], *(array[bucket] for array in mine), s)

    def in_numpy() -> None:
        for bucket in buckets:
            pieces = [array[bucket] for array in numpys]
            numpy_apply.update(rule.formula, gradient[bucket], pieces, s)

    called, in_tensorflow = tensorflow_apply.update(rule.name, gradient)
    works = (ours, in_numpy, in_tensorflow)
    for work in works:
        work()  # traced, and its pages are there
    seconds = interleave(bench.repeats(REPEATS), *(lambda w=w: timed(w) for w in works))
    speeds = [[gradient.nbytes / 1e9 / value for value in values] for values in seconds]
    what = f"{rule.name}, {gradient.nbytes / MIB:g} MiB of gradient, one thread"
    figure = Figure("APPLY", what, "GB/s", "higher")
    bench.report(figure, speeds[0], speeds[1], "the formula in numpy")
    bench.report(figure, speeds[0], speeds[2], called)


def _arrays(rule: Rule, size: int) -> list[Array]:
    starts = (0.0, *rule.slot_starts)
    return [np.full(size, start, np.float32) for start in starts]


def run(bench: Bench) -> None:
    """Measure every rule."""
    tensorflow_apply.use_one_thread()
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(BUCKET if bench.toy else 16 * MIB, dtype=np.float32)
    for config in (SGD(), Lion()) if bench.toy else RULES:
        measure(bench, config, gradient)
