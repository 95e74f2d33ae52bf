"""Items of map_train: their names, and what tells one run's items and function from another's."""

from __future__ import annotations

import datetime
import decimal
import functools
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import types
from typing import Any

import msgspec
import numpy as np
import pytest
from pyspark import Broadcast

from tfos.errors import NotPicklable, SettingsError
from tfos.many import digests
from tfos.many.digests import function_digest
from tfos.many.items import check_kind, items_of, shown_name
from tfos.many.launch import listed_work
from tfos.many.slot.trainer import metrics_of


def scale(x):
    return 2 * x


def calls(x):
    return scale(x) + 1


def test_names_are_texts_numbers_keys_or_positions():
    assert items_of(["a", "b"]).names == ("a", "b")
    assert items_of([(1, "x"), (2, "x")]).names == ("1, x", "2, x")
    assert items_of({"first": {}, 2: []}).names == ("first", "2")
    assert items_of([{"lr": 1}, {"lr": 2}]).names == ("item 0", "item 1")
    assert items_of(np.array([7, 8])).names == ("7", "8")
    assert items_of([(np.float32(0.5), "x"), (np.int64(2), decimal.Decimal("1.50"))]).names == (
        "0.5, x",
        "2, 1.50",
    )


def test_a_second_item_of_a_name_leaves_the_others_theirs():
    assert items_of(["a", "b", "a", "a"]).names == ("a", "b", "a (2)", "a (3)")
    assert items_of([1, "1"]).names == ("1", "1 (2)")
    assert items_of(["a", "a (2)", "a"]).names == ("item 0", "item 1", "item 2")
    first, second = items_of(["x" * 200] * 2).names
    assert first != second
    assert len(first) == len(second) == 120


@pytest.mark.parametrize("given", [[], {}])
def test_no_items_are_refused(given):
    with pytest.raises(SettingsError, match="no items"):
        items_of(given)


def test_equal_names_are_refused():
    with pytest.raises(SettingsError, match="2 items are named '1'; pass a mapping"):
        items_of({1: "a", "1": "b"})


def test_long_names_that_begin_alike_differ():
    begin = "x" * 200
    names = [shown_name(begin + end) for end in "ab"]
    assert names[0] != names[1]
    assert {len(name) for name in names} == {120}


def test_names_that_are_no_unicode_travel_and_differ():
    names = items_of(
        {b"bad\xff.csv".decode(errors="surrogateescape"): 1, "bad\\udcff.csv": 2}
    ).names
    assert names[0].startswith("bad\\udcff.csv~")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(names)) == [*names]
    work = listed_work(items_of(["bad\udcff.csv"]), with_digests=True)
    assert work.names == names[:1]


def test_a_table_of_pandas_is_told_how_its_rows_or_groups_become_items():
    frame = pytest.importorskip("pandas").DataFrame({"rate": [0.1, 0.2]})
    for given in (frame, frame["rate"]):
        with pytest.raises(
            SettingsError, match=r"a pandas (DataFrame|Series).*to_dict\('records'\)"
        ):
            check_kind(given)


def test_an_item_that_cannot_travel_is_named():
    with pytest.raises(NotPicklable, match=r"item 'second' \(lock\) cannot be pickled"):
        items_of({"first": 1, "second": threading.Lock()})


def test_other_items_have_another_digest():
    def work(given):
        return listed_work(items_of(given), with_digests=True)

    assert work([1, 2]) == work([1, 2])
    assert len({work(given).digest for given in ([1, 2], [2, 1], [1], {"1": 1, "2": 3})}) == 4
    before, after = work([{"a": 1}, {"a": 2}]).digests, work([{"a": 9}, {"a": 2}]).digests
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True]
    assert work(["x"]).digests != work([b"x"]).digests


class Node:
    def __init__(self, *others):
        self.others = list(others)


def diamonds():
    """Return few objects that are very many where each is followed wherever it is."""
    made = Node()
    for _ in range(60):
        made = Node(made, made)
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: datetime.date(2026, 1, 5),
        lambda: datetime.datetime(2026, 1, 5, tzinfo=datetime.UTC),
        lambda: decimal.Decimal("0.5"),
        lambda: tuple("ab"),
        lambda: [0.5, (2, 3)],
        lambda: {"rate": 0.5},
        lambda: Node([]),
        lambda: json.loads('"jfk airport"'),
        lambda: np.arange(3),
    ],
)
def test_equal_items_have_one_digest_whether_their_parts_are_one_object_or_equal_ones(make):
    def digest(one, other):
        (found,) = listed_work(items_of([{"in": one, "out": [other]}]), with_digests=True).digests
        return found

    shared = make()
    assert digest(shared, shared) == digest(make(), make()) != digest(make(), None)


def test_items_that_contain_themselves_or_are_a_graph_have_digests(monkeypatch):
    def digest(item):
        return listed_work(items_of([item]), with_digests=True).digest

    def ring(*texts):
        made = Node(*texts)
        made.others.append({"ring": made})
        return made

    monkeypatch.setattr(digests, "_MAX_PARTS", 1000)
    shared, equal = "jfk airport", json.loads('"jfk airport"')
    assert digest(ring(shared, shared)) == digest(ring(shared, equal)) != digest(ring(shared, ""))
    assert digest(diamonds()) == digest(diamonds()) != digest(Node(diamonds()))


def made(text):
    names: dict[str, Any] = {"__name__": "program"}
    exec(text, names)
    return names["f"]


def test_the_digest_changes_with_code_defaults_closure_and_called_functions():
    texts = (
        "def f(x): return x",
        "def f(x): return x + 1",
        "def f(x, y=1): return x",
        "def f(x, y=2): return x",
        "def g(x): return 1\ndef f(x): return g(x)",
        "def g(x): return 2\ndef f(x): return g(x)",
        "f = (lambda n: lambda x: n)(1)",
        "f = (lambda n: lambda x: n)(2)",
        "def f(x): return x in {'a', 'b'}",
        "def g(x): return 1\ndef f(x): return max(x, key=lambda y: g(y))",
        "def g(x): return 2\ndef f(x): return max(x, key=lambda y: g(y))",
        "EPOCHS = 1\ndef f(x): return EPOCHS",
        "EPOCHS = 2\ndef f(x): return EPOCHS",
        "SIZES = {'a': [1, 2.5]}\ndef f(x): return max(x, key=lambda y: SIZES)",
        "SIZES = {'a': [1, 3.5]}\ndef f(x): return max(x, key=lambda y: SIZES)",
        "NAMES = {'a', 'b'}\ndef f(x): return NAMES",
        "NAMES = {'a', 'c'}\ndef f(x): return NAMES",
        "class C:\n n = 1\ndef f(x): return C()",
        "class C:\n n = 2\ndef f(x): return C()",
        "class C:\n def g(self): return 1\nclass D(C): pass\ndef f(x): return D()",
        "class C:\n def g(self): return 2\nclass D(C): pass\ndef f(x): return D()",
        "def f(x, /): return x",
        "def f(*x): return x",
    )
    assert len({function_digest(made(text)) for text in texts}) == len(texts)
    for text in texts:
        assert function_digest(made(text)) == function_digest(made(text))


@pytest.mark.parametrize(
    "text",
    [
        "class C:\n @staticmethod\n def g(): return {n}\ndef f(x): return C.g()",
        "class C:\n @classmethod\n def g(cls): return {n}\ndef f(x): return C.g()",
        "class C:\n @property\n def g(self): return {n}\ndef f(x): return C().g",
        "class C:\n g = property(lambda self: 0, lambda self, x: {n})\ndef f(x): C().g = x",
        "class C:\n class D:\n  n = {n}\ndef f(x): return C.D",
        "class C:\n def __init__(self): self.n = [{n}]\nclass D:\n c = C()\ndef f(x): return D.c",
        "class C:\n def g(self): return {n}\nc = C()\ndef f(x): return c.g()",
        "class C:\n @functools.cached_property\n def g(self): return {n}\ndef f(x): return C().g",
        "@functools.lru_cache\ndef g(): return {n}\ndef f(x): return g()",
        "@functools.lru_cache(maxsize=3)\n@functools.lru_cache\ndef g(): return {n}\n"
        "def f(x): return g()",
        "def g(y): return {n}\nh = functools.partial(g, 0)\ndef f(x): return h()",
        "def g(y): return y\nh = functools.partial(g, {n})\ndef f(x): return h()",
        "def g(y): return {n}\nLOSSES = {{'g': [g]}}\ndef f(x): return LOSSES[x]",
        "def g(y): return {n}\nLOSSES = {{g}}\ndef f(x): return LOSSES",
        "ROOT = pathlib.Path('data{n}')\ndef f(x): return ROOT",
        "BOTH = [threading.Lock(), {n}]\ndef f(x): return BOTH",
        "class C:\n def __init__(self, n): self.lock, self.n = threading.Lock(), n\n"
        "c = C({n})\ndef f(x): return c",
        "class C:\n __slots__ = ('lock', '__n')\n"
        " def __init__(self, n): self.lock, self.__n = threading.Lock(), n\n"
        "c = C({n})\ndef f(x): return c",
        "class P:\n __slots__ = ('lock', 'n', 'of')\n"
        " def __getattr__(self, name): return getattr(self.of, name)\n"
        "p = P()\np.lock, p.n = threading.Lock(), {n}\ndef f(x): return p",
        "class A:\n __slots__ = ('lock', 'n', 'unset')\nclass B(A): pass\n"
        "b = B()\nb.lock, b.n = threading.Lock(), {n}\ndef f(x): return b",
        "f = (lambda lock, n: lambda x: (lock, n))(threading.Lock(), {n})",
        "def f(x, lock=threading.Lock(), n={n}): return n",
        "def f(x, keys={{{n}: 0}}.keys()): return keys",
        "class C:\n def __init__(self): self.lock, self.n = threading.Lock(), {n}\n"
        " def g(self): return 0\nh = C().g\ndef f(x): return h()",
        "def g(lock, n): return n\nh = functools.partial(g, threading.Lock(), {n})\n"
        "def f(x): return h()",
        "PATTERN = re.compile('{n}')\ndef f(x): return PATTERN",
        "def g(y): return y\nh = functools.update_wrapper(functools.partial(g, {n}), g)\n"
        "def f(x): return h()",
        "def f(x): return f.n\nf.n = {n}",
        "TABLE = pyarrow.table({{'a': [{n}]}})\ndef f(x): return TABLE",
    ],
)
def test_the_digest_changes_with_all_that_the_function_reaches(text):
    before, same, after = (
        function_digest(
            made("import functools, pathlib, pyarrow, re, threading\n" + text.format(n=n))
        )
        for n in (1, 1, 2)
    )
    assert before == same != after


class Retries:
    """A wrapper of another module than the program's."""

    def __init__(self, function, times):
        functools.update_wrapper(self, function)
        self.times, self.around = times, self

    def __call__(self, item):
        return item


def test_a_foreign_wrapper_counts_with_what_it_wraps_and_what_it_holds():
    wrapped = [made(f"def f(x): return {code}\n") for code in (1, 2)]
    digests = [
        function_digest(Retries(each, times)) for each, times in itertools.product(wrapped, (3, 5))
    ]
    assert len(set(digests)) == 4
    assert function_digest(Retries(wrapped[0], 3)) == digests[0]


def counted(function):
    """Wrap a function as another module than the program's does: it goes on from where it was."""

    @functools.wraps(function)
    def counting(item):
        counting.calls += 1  # type: ignore[attr-defined]
        return function(item)

    counting.calls = 0  # type: ignore[attr-defined]
    return counting


def test_what_a_foreign_wrapper_keeps_on_its_function_leaves_the_digest_as_it_was():
    given, other = (counted(made(f"def f(x): return {code}")) for code in (1, 2))
    before = function_digest(given)
    given(1)
    assert given.calls == 1
    assert function_digest(given) == before != function_digest(other)


def test_a_module_of_many_functions_counts_to_the_last():
    texts = [
        "".join(f"def g{i}(x): return g{i + 1}(x)\n" for i in range(300))
        + f"def g300(x): return {n}\ndef f(x): return g0(x)"
        for n in (1, 2)
    ]
    assert len({function_digest(made(text)) for text in texts}) == 2


def test_functions_that_name_each_other_in_sets_and_dicts_are_walked_once_each():
    text = "".join(f"def g{i}(x): return ALL, SOME\n" for i in range(30))
    names = ", ".join(f"g{i}" for i in range(30))
    text += f"ALL, SOME = {{{names}}}, [{names}]\ndef f(x): return ALL"
    assert function_digest(made(text)) == function_digest(made(text))


def test_objects_that_have_been_pickled_leave_the_digest_as_it_was():
    f = made("class C: pass\ndef f(x): return C()")
    before = function_digest(f)
    f(1).__reduce_ex__(4)
    assert function_digest(f) == before


@pytest.mark.parametrize(
    "kind", [lambda: {"a": 1}.keys(), lambda: memoryview(b"a"), lambda: types.MappingProxyType({})]
)
def test_what_plain_pickle_cannot_write_hides_no_change_beside_it(kind):
    one, same, other = (
        listed_work(items_of([{"rate": rate, "other": kind()}]), with_digests=True).digest
        for rate in (0.1, 0.1, 0.9)
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("within", "kind"), [(lambda odd: odd, ".*Odd"), (lambda odd: {odd}, "set")]
)
def test_an_item_that_cannot_be_compared_is_named(monkeypatch, within, kind):
    class Odd:
        def __reduce__(self):
            return odd_reduction(self)

    pickled = items_of({"a": 1, "b": within(Odd())})
    monkeypatch.setattr(sys.modules[__name__], "odd_reductions", [])
    with pytest.raises(NotPicklable, match=rf"results_dir: item 'b' \({kind}\) cannot be compared"):
        listed_work(pickled, with_digests=True)


odd_reductions = [0]


def odd_reduction(value):
    if not odd_reductions:
        raise ValueError("only once")
    return int, (3,)


def test_partials_and_methods_have_digests_with_what_they_hold():
    digests = {
        function_digest(each)
        for each in (
            calls,
            functools.partial(calls, 1),
            functools.partial(calls, 2),
            threading.Event().is_set,
        )
    }
    assert len(digests) == 4


def test_numbers_of_a_value_are_its_metrics():
    history = {"loss": [0.5, 0.25], "n": np.int64(3), "auc": np.array(0.5), "name": "x", 1: 2.0}
    assert metrics_of(history) == {"loss": 0.25, "n": 3.0, "auc": 0.5}
    assert metrics_of(np.float32(0.5)) == {"value": 0.5}
    assert metrics_of({os.fsdecode(b"caf\xe9"): 1.0}) == {"caf\\udce9": 1.0}  # it can travel
    assert metrics_of({"flag": True, "many": np.zeros(2), "none": []}) == {}
    assert metrics_of("model") == {}


def test_what_fits_no_metric_fails_no_training():
    assert metrics_of({"huge": 10**400, "loss": 0.5, "n" * 1000: 1.0}) == {"loss": 0.5}
    assert metrics_of(10**400) == {}
    scores = {f"row {number}": number for number in range(300_000)}
    assert list(metrics_of(scores)) == list(scores)[:1000]


PROGRAM = """
import dataclasses, functools, typing
import numpy as np
from tfos.many.digests import function_digest
from tfos.many.items import items_of, shown_name

@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    names: frozenset = frozenset({"a", "b", "c", "d"})
    def scaled(self): return 2 * self.rate

class Program:
    def __init__(self, config): self.config, self.tags = config, {"x", "y", "z"}
    def train(self, item): return self.config
    def __call__(self, item): return item

CONFIG, WEIGHTS = Config(RATE), np.full(3, RATE)
T = typing.TypeVar("T", bound=Config)

class Box(typing.Generic[T]):
    parts = {"x", "y", "z"}, T
    @staticmethod
    def sized(): return RATE

@functools.lru_cache
def cached(): return Box.sized()

LOSSES = {loop_twice for loop_twice in (lambda x: RATE, lambda x: 2, lambda x: 3)}

def reaches(item): return cached(), LOSSES, "p" in {("q", "r"), ("s", "t")}

def loop(item): return loop(CONFIG)
def weighs(item): return WEIGHTS

def closed(config, more):
    more.append(lambda item: (config, more))
    return more[-1]

print(items_of([Config(RATE), {"tags": {"u", "v", "w"}, "config": Config(1.0)}]).digests[0])
for each in (
    Program(Config(RATE)).train, Program(Config(RATE)), functools.partial(loop, Config(RATE)),
    closed(Config(RATE), [{"p", "q"}]), loop, weighs, reaches, closed(lambda: RATE, []),
    functools.partial(loop, lambda: Config(RATE)),
):
    print(function_digest(each))
"""


def program_digests(seed, rate, program=PROGRAM):
    run = subprocess.run(
        [sys.executable, "-c", program.replace("RATE", rate)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout.split()


def test_the_next_process_has_the_same_digests_of_a_programs_own_classes_and_sets():
    first = program_digests("1", "0.5")
    assert program_digests("2", "0.5") == first
    assert not set(program_digests("1", "0.25")) & set(first)
    assert len(set(first)) == len(first)


DRAWN = """
import functools, logging, os, random, types
import numpy as np
from os import environ
from random import Random, random as uniform, shuffle
from numpy.random import randn
from tfos.many.digests import function_digest

choice, getenv, PAIR, HOME = np.random.choice, os.environ.get, [Random(), RATE], {"e": environ}
DRAW, LOOK = functools.partial(random.choice, [RATE]), {"rate": RATE}.get
ARGS, LOGGER = types.SimpleNamespace(rate=RATE, gen=np.random.default_rng()), logging.getLogger("x")

class Sampler:
    def __init__(self): self.gen, self.seeds, self.k = np.random.RandomState(), [Random()], RATE
    def __call__(self, item): return self.gen
    def train(self, item): return self.k

class Own(Random):
    def __init__(self): super().__init__(); self.k, self.p, self.q = RATE, 1, 2

SAMPLER, OWN = Sampler(), Own()

def shuffles(item): return RATE, shuffle
def draws(item): return RATE, uniform
def normal(item): return RATE, randn
def chooses(item): return RATE, choice
def reads(item): return RATE, getenv("DRIVER_PORT")
def named(item): return RATE, environ["DRIVER_PORT"]
def pair(item): return PAIR
def home(item): return RATE, HOME
def default(item, r=Random(), k=RATE): return r
def keyword(item, *, r=np.random.PCG64(), k=RATE): return r
def partial(item): return DRAW
def looks(item): return LOOK
def args(item): return ARGS, LOGGER
def sampler(item): return SAMPLER.k
def own(item): return OWN
def closed(gen, rate): return lambda item: (gen, rate)

for each in (
    shuffles, draws, normal, chooses, reads, named, pair, home, default, keyword, partial, looks,
    args, sampler, own, SAMPLER, SAMPLER.train, closed(Random(), RATE),
    closed(np.random.default_rng().normal, RATE), functools.partial(closed, Random(), RATE),
):
    print(function_digest(each))
"""


def test_numbers_drawn_at_random_and_the_environment_leave_digests_of_functions_as_they_were(
    monkeypatch,
):
    monkeypatch.setenv("DRIVER_PORT", "1")
    first = program_digests("1", "0.5", DRAWN)
    monkeypatch.setenv("DRIVER_PORT", "2")
    assert program_digests("2", "0.5", DRAWN) == first
    assert not set(program_digests("1", "0.25", DRAWN)) & set(first)
    assert len(set(first)) == len(first)


def test_a_broadcast_counts_by_its_value(tmp_path):
    def digest(value):
        path = tmp_path / "value"
        path.write_bytes(pickle.dumps(value))
        given = made("def f(x): return TABLE.value")
        given.__globals__["TABLE"] = Broadcast(path=str(path))
        return function_digest(given)

    assert digest({"a": 1}) == digest({"a": 1}) != digest({"a": 2})


def test_an_items_generator_of_random_numbers_counts_by_its_state():
    def digest(make, seed):
        return listed_work(items_of([{"gen": make(seed)}]), with_digests=True).digest

    for make in (np.random.default_rng, np.random.RandomState, random.Random):
        assert digest(make, 1) == digest(make, 1) != digest(make, 2)


FRAMEWORKS = """
from typing import NamedTuple
import numba, keras, tensorflow as tf, tf_keras
import numpy as np
from tfos.many.digests import function_digest, value_digest

DRAWN = [keras.initializers.HeNormal(), keras.random.SeedGenerator(), RATE]
GEN = [tf.random.Generator.from_non_deterministic_state(), RATE]
FIRST = keras.initializers.VarianceScaling(RATE)
keras.utils.set_random_seed(3)
LOSS = keras.losses.Huber(RATE)
MODEL = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
MODEL.compile(keras.optimizers.Adam(RATE), LOSS)
SEEDED, DROP = keras.initializers.HeNormal(seed=int(RATE * 100)), keras.layers.Dropout(RATE)

class Own(keras.initializers.Initializer):
    def __init__(self, rate): self.rate = rate

class Scale(keras.layers.Layer):
    def call(self, x): return RATE * x

def error(true, guess): return RATE * (true - guess)
def bend(x): return RATE * x

def sequence(keras, *layers, loss="mse", optimizer="adam"):
    made = keras.Sequential([keras.layers.Input((2,)), *layers])
    made.compile(optimizer, loss)
    return made

OWN = Own(RATE)
SCALED, FAILS = sequence(keras, Scale()), sequence(keras, loss=error)
BENT = sequence(keras, keras.layers.Dense(1, activation=bend, kernel_initializer="ones"))
OLD = sequence(tf_keras, tf_keras.layers.Dense(1, activation=bend, kernel_initializer="ones"))

class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step): return RATE / step
    def get_config(self): return {}

class Scored(keras.layers.Layer):
    def __init__(self, score):
        super().__init__()
        self.score = score
    def get_config(self): return {}

class Helper:
    def __init__(self, rate): self.rate = rate

class Pair(NamedTuple):
    rate: float
    name: str = ""

class Helped(keras.Sequential):
    def __init__(self, helper):
        super().__init__([keras.layers.Identity()])
        self.helper = helper
    def get_config(self): return {}

def rate(): return RATE
HELPED, LISTS, PAIRED = Helped(Helper(RATE)), Helped({"a": [Helper(RATE)]}), Helped(Pair(RATE))
INNER = sequence(keras, Scored(Helper(RATE)))
FALLING = keras.optimizers.Adam(Falling())
SLOWED = sequence(keras, keras.layers.Identity(), optimizer=keras.optimizers.SGD(rate))
SCALES = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(Falling()))
METRIC, LISTED = keras.metrics.MeanMetricWrapper(error), tf_keras.metrics.MeanMetricWrapper(error)
HELD = Scored({"scores": [keras.metrics.MeanMetricWrapper(error)]})
ROOT = tf_keras.optimizers.Adam(rate)

@tf.function
def traced(x): return RATE * x

@numba.njit
def fast(x): return RATE * x

def loss(item): return LOSS
def model(item): return MODEL
def graph(item): return traced(item)
def compiled(item): return fast(item)
def first(item): return FIRST
def drawn(item): return DRAWN
def seeded(item): return SEEDED
def drop(item): return DROP
def own(item): return OWN
def gen(item): return GEN
def scaled(item): return SCALED
def fails(item): return FAILS
def bent(item): return BENT
def old(item): return OLD
def falling(item): return FALLING
def rated(item): return SLOWED
def scales(item): return SCALES
def metric(item): return METRIC
def listed(item): return LISTED
def held(item): return HELD
def root(item): return ROOT
def helped(item): return HELPED
def lists(item): return LISTS
def paired(item): return PAIRED
def inner(item): return INNER

for each in (
    loss, model, graph, compiled, first, drawn, seeded, drop, own, gen, scaled, fails, bent, old,
    falling, rated, scales, metric, listed, held, root, helped, lists, paired, inner,
):
    print(function_digest(each))

for each in (keras, tf_keras):
    made = sequence(each, each.layers.Dense(2), loss=error)
    before = value_digest(made)
    made.evaluate(np.ones((2, 2)), np.ones((2, 2)), verbose=0)
    assert value_digest(made) == before, "what the first batch makes of a loss has another digest"
"""


@pytest.mark.long
@pytest.mark.tf
@pytest.mark.slow
def test_objects_of_keras_and_compiled_functions_count_by_what_they_compute():
    first = program_digests("1", "0.5", FRAMEWORKS)
    assert len(set(first)) == len(first)
    assert program_digests("2", "0.5", FRAMEWORKS) == first
    changed = program_digests("1", "0.25", FRAMEWORKS)
    assert [at for at, each in enumerate(changed) if each in first] == []
