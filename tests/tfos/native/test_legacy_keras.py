"""Keras 2 as `tf.keras`: whose choice it is, and `lr` of its optimizers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tfos.native import legacy_keras
from tfos.native.legacy_keras import VARIABLE, advice, follow, prefer

OPTIMIZER = """
class Optimizer:
    def __init__(self, **kwargs):
        self.dropped = kwargs
"""
ADAM = """
from tf_keras.src.optimizers.optimizer import Optimizer

class Adam(Optimizer):
    def __init__(self, learning_rate=0.001, beta=0.9, **kwargs):
        super().__init__(**kwargs)
        self.learning_rate = learning_rate

class AdamW(Adam):
    def __init__(self, learning_rate=0.001, decay=0.1, **kwargs):
        super().__init__(learning_rate, **kwargs)

class Tuned(Adam):
    pass
"""


def tensorflow(**marks: bool) -> ModuleType:
    """Return a module whose `keras` has these marks."""
    made, lazy = ModuleType("tensorflow"), ModuleType("keras")
    vars(lazy).update(marks)
    vars(made)["keras"] = lazy
    return made


@pytest.fixture
def keras_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package in the shape of tf-keras, which is not installed where tests run."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "tf_keras"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    package = tmp_path / "tf_keras" / "src" / "optimizers"
    package.mkdir(parents=True)
    for directory in (package.parent.parent, package.parent):
        (directory / "__init__.py").touch()
    (package / "optimizer.py").write_text(OPTIMIZER)
    (package / "adam.py").write_text(ADAM)
    imports = ("adam", "optimizer as base_optimizer")
    lines = [f"from tf_keras.src.optimizers import {each}\n" for each in imports]
    (package / "__init__.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "tf_keras"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("environment", "modules", "chosen"),
    [
        ({}, {}, "1"),
        ({VARIABLE: "0"}, {}, "0"),
        ({}, {"tensorflow": tensorflow(_tfll_initialized=False)}, "1"),
        ({}, {"tensorflow": tensorflow()}, None),
        ({}, {"tensorflow": ModuleType("tensorflow")}, None),
        (
            {},
            {
                "tensorflow": tensorflow(_tfll_initialized=False),
                "tensorflow.keras": ModuleType("keras"),
            },
            None,
        ),
    ],
)
def test_keras_2_is_chosen_where_it_is_installed_and_nothing_was_chosen(
    keras_2, environment, modules, chosen
):
    prefer(environment, modules)
    assert environment.get(VARIABLE) == chosen


def test_keras_2_is_not_chosen_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(legacy_keras, "_PACKAGE", "no_keras_of_this_name")
    environment: dict[str, str] = {}
    prefer(environment, {})
    assert environment == {}


def test_a_node_has_the_drivers_keras_unless_it_has_one_of_its_own(keras_2):
    for environment, choice, found in (
        ({}, "1", {VARIABLE: "1"}),
        ({VARIABLE: "0"}, "1", {VARIABLE: "0"}),
        ({}, "", {}),
    ):
        follow(environment, choice)
        assert environment == found


def test_lr_is_the_learning_rate_of_every_optimizer(keras_2):
    follow({}, "1")
    follow({}, "1")
    adam = importlib.import_module("tf_keras.src.optimizers.adam")
    for kind in (adam.Adam, adam.AdamW, adam.Tuned):
        made = kind(lr=0.2)
        assert (made.learning_rate, made.dropped) == (0.2, {})
        assert kind(0.3).learning_rate == kind(learning_rate=0.3).learning_rate == 0.3
    assert not any(type(each).__name__ == "_AtImport" for each in sys.meta_path)


def test_lr_is_the_learning_rate_of_optimizers_that_were_imported_before(keras_2):
    adam = importlib.import_module("tf_keras.src.optimizers.adam")
    assert adam.Adam(lr=0.2).learning_rate == 0.001
    follow({VARIABLE: "true"}, "")
    assert adam.Adam(lr=0.2).learning_rate == 0.2


def test_keras_3_under_a_strategy_gets_the_next_step():
    text = "unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor"
    assert "install tf-keras, and set TF_USE_LEGACY_KERAS=1" in advice(ValueError(text))
    assert advice(ValueError("batch_size")) == advice(TypeError(text)) == ""


def test_a_callback_of_keras_3_in_a_fit_of_keras_2_gets_the_next_step():
    with pytest.raises(AttributeError) as caught:
        _ = ModuleType("callback")._implements_train_batch_hooks  # as Keras 2's CallbackList asks
    assert "pass callbacks of tf_keras only" in advice(caught.value)
    with pytest.raises(AttributeError) as caught:
        _ = ModuleType("callback").on_train_begin
    assert advice(caught.value) == ""


def test_optimizers_stay_as_they_are_with_keras_3(keras_2):
    follow({}, "0")
    adam = importlib.import_module("tf_keras.src.optimizers.adam")
    assert adam.Adam(lr=0.2).learning_rate == 0.001
