"""F56: what cannot travel is named before any node starts."""

from __future__ import annotations

import functools
import re
import socket
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import cloudpickle
import pytest

from tfos.errors import NotPicklable
from tfos.spark.pickling import pickle_main_fun

LOCK = threading.Lock()


def _uses_global(args: object, ctx: object) -> object:
    with LOCK:
        return args


def test_a_closure_and_its_arguments_travel():
    factor = 3

    def main_fun(args, ctx):
        return args["x"] * factor

    function, args = cloudpickle.loads(pickle_main_fun(main_fun, {"x": 2}))
    assert function(args, None) == 6


def _closure(value: object) -> Callable[..., object]:
    captured = value

    def main_fun(args, ctx):
        return captured

    return main_fun


def _default(value: object) -> Callable[..., object]:
    def main_fun(args, ctx, captured=value):
        return captured

    return main_fun


def _keyword_default(value: object) -> Callable[..., object]:
    def main_fun(args, ctx, *, captured=value):
        return captured

    return main_fun


def _nested(value: object) -> Callable[..., object]:
    captured = value

    def helper():
        return captured

    def main_fun(args, ctx):
        return helper()

    return main_fun


def _inner(value: object) -> Callable[..., object]:
    captured = value

    def main_fun(args, ctx):
        def inside():
            return captured

        return inside()

    return main_fun


@pytest.mark.fault("F56")
@pytest.mark.parametrize("make", [_closure, _default, _keyword_default, _nested, _inner])
def test_the_captured_object_and_its_line_are_named(make):
    with pytest.raises(NotPicklable) as caught:
        pickle_main_fun(make(threading.Lock()), None)
    text = str(caught.value)
    assert "refers to 'captured' (lock)" in text
    assert re.search(r"test_pickling\.py:\d+", text)


@pytest.mark.fault("F56")
def test_a_global_is_named():
    # By value, as a function of the user's own script travels.
    function = types.FunctionType(
        _uses_global.__code__, {"LOCK": LOCK, "__name__": "__main__"}, "main_fun"
    )
    with pytest.raises(NotPicklable, match=r"refers to 'LOCK' \(lock\) at test_pickling\.py:\d"):
        pickle_main_fun(function, None)


@dataclass(frozen=True, slots=True)
class Slotted:
    """It has no __dict__."""

    unset: object = field(init=False)
    parts: list[object]


class SparkContext:
    """Refuses as pyspark's does."""

    def __reduce__(self):
        raise RuntimeError("CONTEXT_ONLY_VALID_ON_DRIVER")


@pytest.mark.fault("F56")
def test_a_spark_context_is_named():
    with pytest.raises(NotPicklable, match=r"'captured' \(SparkContext\)"):
        pickle_main_fun(_closure(SparkContext()), None)


@pytest.mark.fault("F56")
@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"batch": 3, "lock": threading.Lock()}, r"args\['lock'\] \(lock\)"),
        ([1, [threading.Lock()]], r"args\[1\]\[0\] \(lock\)"),
        (types.SimpleNamespace(a=1, lock=threading.Lock()), r"args\.lock \(lock\)"),
        (threading.Lock(), r"args \(lock\)"),
        (Slotted([threading.Lock()]), r"args\.parts\[0\] \(lock\)"),
    ],
)
def test_the_argument_is_named_by_its_path(args, path):
    with pytest.raises(NotPicklable, match=path):
        pickle_main_fun(lambda a, c: None, args)


@pytest.mark.fault("F56")
def test_an_open_socket_is_named():
    with socket.socket() as sock, pytest.raises(NotPicklable, match=r"'captured' \(socket\)"):
        pickle_main_fun(_closure(sock), None)


@pytest.mark.fault("F56")
def test_the_function_inside_partials_is_named():
    inner = functools.partial(_closure(LOCK))
    made = functools.partial(lambda run, args, ctx: run(), inner, args=1)
    with pytest.raises(
        NotPicklable, match=r"_closure.<locals>.main_fun refers to 'captured' \(lock\) at"
    ):
        pickle_main_fun(made, None)


@pytest.mark.fault("F56")
def test_a_callable_without_a_known_culprit_still_says_why():
    with pytest.raises(NotPicklable, match=r"cannot pickle '_thread.lock'.*inside main_fun"):
        pickle_main_fun(functools.partial(print, LOCK), None)


class Trainer:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def train(self, args: object, ctx: object) -> None:
        """Needs no lock; its instance travels all the same."""

    def __call__(self, args: object, ctx: object) -> None:
        """The same, as an object that can be called."""


@pytest.mark.fault("F56")
@pytest.mark.parametrize("bound", [True, False])
def test_what_the_instance_of_a_method_holds_is_named(bound):
    trainer = Trainer()
    with pytest.raises(NotPicklable, match=r"refers to 'self.lock' \(lock\).*inside main_fun"):
        pickle_main_fun(trainer.train if bound else trainer, None)


def test_functions_and_those_inside_them_keep_their_file_for_tracebacks():
    def main_fun(args, ctx):
        def inner():
            raise ValueError("lost")

        return inner

    function, _ = cloudpickle.loads(pickle_main_fun(main_fun, None))
    assert function.__code__.co_filename == __file__
    assert function(None, None).__code__.co_filename == __file__
