"""Compiled loops: equal to the formulas element by element, finite check, reduction, cache."""

import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ps.dense.shard import DenseShard
from ps.errors import ShapeError
from ps.jit import intrinsics
from ps.manifest.manifest import (
    SGD,
    AdamW,
    Add,
    Average,
    Ftrl,
    GroupSpec,
    Hyper,
    Manifest,
    ParamSpec,
    RMSprop,
)
from ps.optim import formulas, kernels
from ps.optim.rules import decays, rule_of, scalars
from tests.support.update_rules import WITH_DTYPES

DTYPES = ["float32", "float64"]
SHARD_RULES = [
    SGD(clipvalue=1.0),
    SGD(momentum=0.9, weight_decay=0.1),
    AdamW(clipvalue=0.5),
    Average(),
    Add(),
]
HELPERS = ("clip", "scale", "add_scaled", "blend", "largest_masked")


@pytest.fixture(scope="module", autouse=True)
def _warm():
    kernels.warm((name, dtype) for name in HELPERS for dtype in DTYPES)


def operands(config, dtype, size):
    """Gradient, values and slots as a rule meets them after some steps, and a step's scalars."""
    rng = np.random.default_rng(size)
    rule = rule_of(config)
    v, g = rng.standard_normal((2, size)).astype(dtype)
    slots = [np.abs(rng.standard_normal(size)).astype(dtype) for _ in rule.slots]
    if isinstance(config, RMSprop) and config.centered:
        slots[-1] = np.sqrt(slots[0]) / 2  # a mean is below the root of the mean of squares
    return rule, g, v, slots, scalars(config, 0.01, 3, np.dtype(dtype))


def by_formula(config, rule, g, v, slots, s):
    """One step in numpy: the formula on whole arrays."""
    if decays(config):
        v, s = formulas.decay(v, *s[-2:]), s[:-2]
    out = rule.formula(g, v, *slots, *s)
    return out if rule.slots else (out,)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "dtype"), WITH_DTYPES)
def test_both_kernels_of_a_rule_equal_its_formula_bit_for_bit(config, dtype):
    update, update_rows = kernels.dense_for(config, dtype), kernels.sparse_for(config, dtype)
    for dim in (0, 1, 7, 64):
        num_rows, picked = 11, np.array([4, 0, 10], np.int64)
        rule, g, v, slots, s = operands(config, dtype, num_rows * dim)
        expected = by_formula(config, rule, g, v, slots, s)
        table = np.hstack([a.reshape(num_rows, dim) for a in (v, *slots)])
        before = table.copy()
        gradient = g.copy()
        gradient.flags.writeable = False
        update(gradient, v, *slots, s)
        for got, wanted in zip((v, *slots), expected, strict=True):
            near(config, got, wanted)
        update_rows(table, picked, gradient.reshape(num_rows, dim)[picked], s)
        for row in range(num_rows):
            pieces = [wanted.reshape(num_rows, dim)[row] for wanted in expected]
            near(config, table[row], np.concatenate(pieces) if row in picked else before[row])


def near(config, got, wanted):
    """Equal; the C library's power and numpy's may differ in the last bit."""
    if isinstance(config, Ftrl) and config.learning_rate_power != -0.5:
        tolerance = 500 * np.finfo(got.dtype).eps  # divided by the learning rate
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    else:
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.attack("A31")
@given(
    rows=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12), max_size=8, unique=True)
)
def test_rows_outside_a_table_are_refused_before_anything_changes(rows):
    update_rows = kernels.sparse_for(SGD(momentum=0.9), "float32")
    table = np.ones((10, 6), np.float32)
    call = (table, np.array(rows, np.int64), np.ones((len(rows), 3), np.float32))
    s = scalars(SGD(momentum=0.9), 0.5, 1, np.dtype(np.float32))
    if all(0 <= row < 10 for row in rows):
        update_rows(*call, s)
        assert sorted(rows) == np.flatnonzero(table[:, 0] != 1).tolist()
    else:
        with pytest.raises(ShapeError, match=r"row -?\d+ is not in a table of 10 rows"):
            update_rows(*call, s)
        assert (table == 1).all()


@pytest.mark.parametrize(
    ("width", "num_rows", "dim"), [(6, 2, 2), (6, 2, 6), (6, 1, 3), (6, 3, 3), (0, 2, 1)]
)
def test_a_table_that_does_not_fit_its_gradients_is_refused(width, num_rows, dim):
    update_rows = kernels.sparse_for(SGD(momentum=0.9), "float32")
    table, picked = np.ones((4, width), np.float32), np.arange(2)
    with pytest.raises(ShapeError, match="2 times as wide as its gradient"):
        update_rows(table, picked, np.ones((num_rows, dim), np.float32), np.ones(2, np.float32))
    assert (table == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_average_equal_their_formulas(dtype):
    rng = np.random.default_rng(1)
    v, p = rng.standard_normal((2, 100)).astype(dtype)
    for config, given_scalars in ((Add(), ()), (Average(), (3,))):
        s = np.array(given_scalars, dtype)
        got = v.copy()
        kernels.dense_for(config, dtype)(p, got, s)
        assert got.tobytes() == rule_of(config).formula(p, v, *s).tobytes()


@pytest.mark.skipif(not intrinsics.FLUSHES_DENORMALS, reason="flush-to-zero is x86-64 only")
def test_denormals_are_flushed_inside_a_kernel_and_not_after_it():
    tiny = np.full(9, 1e-40, np.float32)
    value = np.zeros(9, np.float32)
    update = kernels.dense_for(SGD(momentum=0.9), "float32")
    update(np.zeros(9, np.float32), value, tiny, np.array([0.1, 0.9], np.float32))
    assert not tiny.view(np.uint32).any()
    assert np.float32(1e-30) * np.float32(1e-10) != 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_nonfinite_values_are_counted(dtype, data):
    values = data.draw(arrays.arrays(dtype, st.integers(0, 300)))
    assert kernels.count_nonfinite(values) == np.count_nonzero(~np.isfinite(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_are_told_apart(dtype):
    largest = np.finfo(dtype).max
    fine = np.array([0.0, -0.0, largest, -largest, np.finfo(dtype).tiny / 2], dtype)
    assert kernels.count_nonfinite(fine) == 0
    assert kernels.count_nonfinite(np.array([np.nan, -np.nan, np.inf, -np.inf, 1], dtype)) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduction_rounds_after_each_operation_in_the_given_order(dtype):
    rng = np.random.default_rng(2)
    parts = list(rng.standard_normal((3, 500)).astype(dtype))
    weights = [0.3, 0.5, 0.2]
    scaled = [part * np.dtype(dtype).type(w) for part, w in zip(parts, weights, strict=True)]
    out = np.empty(500, dtype)
    kernels.reduce_weighted(out, parts, weights)
    assert out.tobytes() == ((scaled[0] + scaled[1]) + scaled[2]).tobytes()
    backward = np.empty(500, dtype)
    kernels.reduce_weighted(backward, parts[::-1], weights[::-1])
    assert backward.tobytes() != out.tobytes()


def test_one_gradient_with_weight_one_comes_out_exactly():
    part = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    out = np.empty_like(part)
    kernels.reduce_weighted(out, [part], [1.0])
    assert out.tobytes() == part.tobytes()


@pytest.mark.parametrize(
    ("parts", "weights"),
    [
        ([], []),
        ([np.zeros(3, np.float32)], [1.0, 2.0]),
        ([np.zeros(4, np.float32)], [1.0]),
        ([np.zeros(3, np.float64)], [1.0]),
    ],
)
def test_a_reduction_that_does_not_fit_is_refused(parts, weights):
    with pytest.raises(ValueError, match=r"gradients need|cannot reduce"):
        kernels.reduce_weighted(np.empty(3, np.float32), parts, weights)


def test_wrong_arguments_are_an_error_and_not_seconds_of_compiling():
    wrong = np.zeros(2, np.int64)
    with pytest.raises(TypeError, match="No matching definition"):
        kernels.dense_for(SGD(), "float32")(wrong, wrong, wrong)


@pytest.mark.slow
def test_compiled_code_is_vectorized_and_contracts_no_multiply_and_add():
    script = (
        "import re\n"
        "from ps.optim import kernels; from ps.manifest.manifest import AdamW\n"
        "update = kernels.dense_for(AdamW(), 'float32')\n"
        "update_rows = kernels.sparse_for(AdamW(), 'float32')\n"
        "for kernel in (update, update_rows._kernel):\n"
        "    asm = next(iter(kernel.inspect_asm().values()))\n"
        "    assert re.search(r'sqrtps|fsqrt\\s+v', asm), 'not vectorized'\n"
        "    assert 'maskmov' not in asm, 'slower than scalar code on AMD'\n"
        "    assert not re.search(r'vfn?m(add|sub)|fmla|fmadd', asm)\n"
    )
    run_python(script, {}, fresh=True)


COMPILE_S = 200.0
"""In which a process compiles a few kernels while others keep the machine busy."""


def run_python(script, environment, *, fresh=False):
    """Run a script in a new process; `fresh` gives it an empty kernel cache of its own."""
    with tempfile.TemporaryDirectory() as empty:
        settings = {**os.environ, **environment}
        if fresh:
            settings["TFOS_KERNEL_CACHE"] = empty
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=settings,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_a_warmed_directory_spares_the_next_process_the_compiler(tmp_path):
    settings = {"TFOS_KERNEL_CACHE": str(tmp_path / "elsewhere")}
    warm_two = (
        "import runpy, sys, ps.optim.kernels as rules\n"
        "import ps.compression.kernels as packing, ps.tables.kernels as tables\n"
        "import ps.sorted_rows.search as search\n"
        "packing.ALL_KINDS = ()\n"
        "search.warm = lambda dtype: 0\n"
        "tables.warm_server = tables.warm_client = lambda dtypes: 0\n"
        "rules.ALL_NAMES = ('add', 'rows_momentum_decay')\n"  # all would take seconds
        f"sys.argv = ['ps', 'warm', {str(tmp_path / 'packed')!r}]\n"
        "runpy.run_module('ps', run_name='__main__')\n"
    )
    assert run_python(warm_two, settings).startswith(f"4 kernels in {tmp_path / 'packed'}")
    assert not (tmp_path / "elsewhere").exists()
    load_two = (
        "import numpy as np, ps.optim.kernels as k; from numba.core import compiler\n"
        "from ps.manifest.manifest import Add\n"
        "def never(*args, **kwargs): raise AssertionError('compiled')\n"
        "compiler.compile_extra = never\n"
        "both = ('float32', 'float64')\n"
        "assert k.warm((n, d) for n in ('add', 'rows_momentum_decay') for d in both) == 4\n"
        "g, v = np.ones((2, 3), np.float32)\n"
        "k.dense_for(Add(), 'float32')(g, v, np.empty(0, np.float32)); assert v[0] == 2\n"
    )
    run_python(load_two, {"TFOS_KERNEL_CACHE": str(tmp_path / "packed")})


def test_clients_do_not_load_the_compiler():
    script = (
        "import sys, ps.manifest.manifest, ps.errors, ps.manifest.sharding, ps.optim.clipping\n"
        "import ps.checkpoint.writer, ps.checkpoint.reader, ps.optim.rules\n"
        "assert 'numba' not in sys.modules\n"
    )
    run_python(script, {})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", SHARD_RULES, ids=str)
def test_a_shard_asks_for_every_kernel_that_it_calls(config, dtype, mode, monkeypatch):
    called = set()

    def recording(name, kernel):
        def call(*arrays):
            called.add((name, dtype))
            return kernel(*arrays)

        return call

    for name in HELPERS:
        monkeypatch.setattr(kernels, name, recording(name, getattr(kernels, name)))
    wanted: set[tuple[str, str]] = set()
    kernels.dense_for(config, dtype)
    monkeypatch.setattr(kernels, "warm", wanted.update)
    group = GroupSpec("g", dtype, config, (ParamSpec("w", (5,)),))
    shard = DenseShard(
        Manifest(groups=(group,), consistency=mode), rank=0, num_servers=1, num_workers=3
    )
    pushed = np.ones(5, dtype)
    if mode == "sync":
        kernels.reduce_weighted(pushed, [np.ones(5, dtype)] * 2, [0.5, 0.5])
    shard.apply(0, pushed, Hyper(0.1))
    assert called <= wanted
    assert (rule_of(config).name + "_decay" * decays(config), dtype) in wanted
