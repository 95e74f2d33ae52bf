"""What a worker imports before main_fun asks for it, and what it leaves alone."""

from __future__ import annotations

import functools
import gc
import os
import py_compile
import sys

import pytest

from tfos.worker import import_ahead as ahead
from tfos.worker.import_ahead import collector_paused, import_ahead, will_import


def build():
    from tensorflow.keras import layers

    return layers


def with_keras(args, ctx):
    import keras

    return keras


def calls_a_builder(args, ctx):
    return build()


def nested(args, ctx):
    def inner():
        import tensorflow as tf

        return tf

    return inner()


def plain(args, ctx):
    import json

    return json.dumps({"keras": "tensorflow"})


def sets_the_backend(args, ctx):
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


def changes_the_path(args, ctx):
    sys.path.insert(0, args)
    return build()


class Trainer:
    def __call__(self, args, ctx):
        import keras

        return keras

    def run(self, args, ctx):
        return build()


@pytest.mark.parametrize(
    ("main_fun", "names"),
    [
        (with_keras, ("keras",)),
        (calls_a_builder, ("tensorflow",)),
        (nested, ("tensorflow",)),
        (functools.partial(with_keras, ctx=None), ("keras",)),
        (functools.partial(plain, ctx=build), ("tensorflow",)),
        (Trainer(), ("keras",)),
        (Trainer().run, ("tensorflow",)),
        (plain, ()),
        (sets_the_backend, ()),
        (changes_the_path, ()),
        (print, ()),
    ],
)
def test_the_code_of_main_fun_says_what_it_imports(main_fun, names):
    assert will_import(main_fun) == names


def test_functions_in_closures_and_arguments_count():
    builder = build

    def main_fun(args, ctx):
        return builder()

    assert will_import(main_fun) == ("tensorflow",)
    assert will_import(plain, {"model_fn": build}) == ("tensorflow",)
    assert will_import(plain, {"model_fn": sets_the_backend}) == ()
    assert will_import(with_keras, [changes_the_path]) == ()


def test_a_module_of_the_same_name_in_the_users_package_is_another():
    namespace: dict[str, object] = {}
    exec("def main_fun(args, ctx):\n    from .keras import layers", namespace)
    assert will_import(namespace["main_fun"]) == ()


def test_functions_that_call_each_other_are_read_once():
    namespace: dict[str, object] = {}
    source = "def one(args, ctx):\n    return two()\ndef two():\n    import keras\n    return one\n"
    exec(compile(source, "user.py", "exec"), namespace)
    assert will_import(namespace["one"]) == ("keras",)


def test_a_package_that_cannot_be_imported_is_left_to_main_fun(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("raise RuntimeError('no driver')\n")
    (tmp_path / "fine_package.py").write_text("import gc\nwas_enabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_ahead(("broken_package", "missing_package", "fine_package"))
    fine = sys.modules.pop("fine_package")
    assert not fine.was_enabled
    assert gc.isenabled()


def test_the_collector_works_again_and_leaves_out_what_a_large_import_made(monkeypatch):
    monkeypatch.setattr(ahead, "_MANY_OBJECTS", 1000)
    gc.collect()
    before = gc.get_freeze_count()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.get_freeze_count() <= before  # tests/conftest.py has frozen what was there
    made: list[list[int]] = []
    with collector_paused():
        made += [[] for _ in range(2000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_the_user_has_stopped_stays_so():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that nobody has compiled, in the place of keras."""
    directory = tmp_path / "site" / "keras"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    return directory


def test_each_start_compiles_where_python_may_keep_nothing(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    advice = ahead.compiled_again(("keras",))
    assert "PYTHONDONTWRITEBYTECODE is set" in advice
    assert f"python -m compileall -q {package.parent}`" in advice
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert ahead.compiled_again(("keras",)) == ""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"{package} cannot be written" in ahead.compiled_again(("keras",))


def test_nothing_is_said_of_compiled_and_of_missing_packages(package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    py_compile.compile(str(package / "__init__.py"))
    assert ahead.compiled_again(("keras", "no_such_package")) == ""
