"""Items of map_train: their names, and what tells one run's items and function from another's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tfos.errors import NotPicklable, SettingsError
from tfos.many.digests import function_digest
from tfos.many.items import items_of, shown_name
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
    assert items_of(["a", "a"]).names == ("item 0", "item 1")


@pytest.mark.parametrize("given", ["text", 3, None, [], {}])
def test_what_is_no_set_of_items_is_refused(given):
    with pytest.raises(SettingsError, match="items"):
        items_of(given)


def test_equal_names_are_refused():
    with pytest.raises(SettingsError, match="2 items are named '1'; pass a mapping"):
        items_of({1: "a", "1": "b"})


def test_long_names_that_begin_alike_differ():
    begin = "x" * 200
    names = [shown_name(begin + end) for end in "ab"]
    assert names[0] != names[1]
    assert {len(name) for name in names} == {120}


def test_a_table_of_pandas_is_told_how_its_rows_or_groups_become_items():
    frame = pytest.importorskip("pandas").DataFrame({"rate": [0.1, 0.2]})
    for given in (frame, frame["rate"]):
        with pytest.raises(
            SettingsError, match=r"a pandas (DataFrame|Series).*to_dict\('records'\)"
        ):
            items_of(given)


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
    )
    assert len({function_digest(made(text)) for text in texts}) == len(texts)
    for text in texts:
        assert function_digest(made(text)) == function_digest(made(text))


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
    assert metrics_of({"flag": True, "many": np.zeros(2), "none": []}) == {}
    assert metrics_of("model") == {}


def test_what_fits_no_metric_fails_no_training():
    assert metrics_of({"huge": 10**400, "loss": 0.5, "n" * 1000: 1.0}) == {"loss": 0.5}
    assert metrics_of(10**400) == {}
    scores = {f"row {number}": number for number in range(300_000)}
    assert list(metrics_of(scores)) == list(scores)[:1000]


PROGRAM = """
import dataclasses, functools
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

def loop(item): return loop(CONFIG)
def weighs(item): return WEIGHTS

def closed(config, more):
    more.append(lambda item: (config, more))
    return more[-1]

print(items_of([Config(RATE), {"tags": {"u", "v", "w"}, "config": Config(1.0)}]).digests[0])
for each in (
    Program(Config(RATE)).train, Program(Config(RATE)), functools.partial(loop, Config(RATE)),
    closed(Config(RATE), [{"p", "q"}]), loop, weighs, closed(lambda: RATE, []),
    functools.partial(loop, lambda: Config(RATE)),
):
    print(function_digest(each))
"""


def program_digests(seed, rate):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("RATE", rate)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return run.stdout.split()


def test_the_next_process_has_the_same_digests_of_a_programs_own_classes_and_sets():
    first = program_digests("1", "0.5")
    assert program_digests("2", "0.5") == first
    assert not set(program_digests("1", "0.25")) & set(first)
    assert len(set(first)) == len(first)
