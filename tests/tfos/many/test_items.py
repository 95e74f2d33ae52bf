"""Items of map_train: their names, and what tells one run's items and function from another's."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

from tfos.errors import NotPicklable, SettingsError
from tfos.many.items import function_digest, items_of
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
    with pytest.raises(SettingsError, match="two items are named '1'"):
        items_of({1: "a", "1": "b"})


def test_an_item_that_cannot_travel_is_named():
    with pytest.raises(NotPicklable, match=r"item 'second' \(lock\) cannot be pickled"):
        items_of({"first": 1, "second": threading.Lock()})


def test_other_items_have_another_digest():
    assert items_of([1, 2]).digest == items_of([1, 2]).digest
    assert len({items_of(given).digest for given in ([1, 2], [2, 1], [1], {"1": 1, "2": 3})}) == 4


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
