"""Pickling of the user's function, its arguments and what it returns, with errors that say whose.

Covers: the function on the driver, and the search for the culprit when it cannot travel; what it
returned, in its own process, and at the driver, for the user.
Does not: unpickle functions; only the worker's own process does that (tfos.worker.process).
"""

from __future__ import annotations

import dis
import functools
import io
import types
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from tfos.errors import NotPicklable, TFOSError

_MAX_DEPTH = 5
_NO_FILE = "<dynamic-code>"
"""What cloudpickle 3.1.3 and later write as the file of each function."""


def _with_file(code: types.CodeType) -> tuple[Any, tuple[Any, ...]]:
    kind, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return kind, tuple(code.co_filename if arg == _NO_FILE else arg for arg in args)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """Keeps the file of each function: without it, tracebacks of main_fun show no source lines."""

    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: _with_file}, cloudpickle.Pickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Return a value as cloudpickle's bytes; functions keep their files.

    Args:
        value: a function, or what may contain some.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=cloudpickle.DEFAULT_PROTOCOL).dump(value)
    return file.getvalue()


def pickle_main_fun(main_fun: Any, args: Any, *, called: str = "main_fun") -> bytes:
    """Return the bytes of `(main_fun, args)`.

    Args:
        main_fun: what every node will call.
        args: its first argument.
        called: what the user calls the function.

    Raises:
        NotPicklable: names the object and the line that refers to it.
    """
    try:
        return dumps((main_fun, args))
    except Exception as error:
        raise NotPicklable(_explain(main_fun, args, error, called)) from error


def pickle_value(value: Any, whose: str) -> bytes:
    """Return what a function has returned as bytes.

    Args:
        value: what the function returned.
        whose: the function that returned it, for the error.

    Raises:
        NotPicklable: names the function and the type.
    """
    try:
        pickled: bytes = cloudpickle.dumps(value)
        return pickled
    except Exception as error:
        raise NotPicklable(
            f"{whose} returned a {type(value).__qualname__} that cannot be pickled: "
            f"{_first_line(error)}. Return plain data: numbers, arrays, model.get_weights() or a "
            "saved model's path"
        ) from error


def check_travels(called: str, value: Any, remedy: str) -> None:
    """Refuse an argument that no executor can be given.

    Args:
        called: name of the argument.
        value: what the user passed.
        remedy: what to do instead, a sentence.

    Raises:
        NotPicklable: names the part of it, and the remedy.
    """
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        part, culprit = _culprit_in_data(called, value, 0)
        raise NotPicklable(
            f"{part} ({type(culprit).__qualname__}) cannot travel to an executor: "
            f"{_first_line(error)}. {remedy}"
        ) from error


def unpickle_value(data: bytes, whose: str, kind: type[TFOSError]) -> Any:
    """Return what a function has returned.

    Args:
        data: bytes from `pickle_value`.
        whose: the function whose value it is, for the error.
        kind: class of the error if the driver cannot read it.
    """
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise kind(
            f"the value of {whose} cannot be read here: {type(error).__name__}: {error}. A "
            "package that made it may be missing at the driver; return plain data"
        ) from error


def _explain(main_fun: Any, args: Any, error: Exception, called: str) -> str:
    while isinstance(main_fun, functools.partial) and (parts := _failing_parts(main_fun)):
        main_fun = parts[0]
    name = getattr(main_fun, "__qualname__", type(main_fun).__qualname__)
    if _fails(main_fun):
        found = _culprit(main_fun, 0) or _culprit_in_owner(main_fun)
        if found is None:
            return (
                f"{called} {name} cannot be pickled: {_first_line(error)}. Create objects that "
                f"cannot travel to an executor inside {called}."
            )
        what, value, where = found
        return (
            f"{called} {name} refers to {what!r} ({type(value).__qualname__}){where}, which cannot "
            f"travel to an executor. Create it inside {called}, or pass what it is made of."
        )
    part, value = _culprit_in_data("args", args, 0)
    return (
        f"{part} ({type(value).__qualname__}) cannot be pickled: {_first_line(error)}. Pass plain "
        f"data in args and open files, sessions and connections inside {called}."
    )


def _failing_parts(call: functools.partial[Any]) -> list[Any]:
    """Return what cannot be pickled of a partial's function and arguments."""
    return [part for part in (call.func, *call.args, *call.keywords.values()) if _fails(part)]


def _culprit(value: Any, depth: int) -> tuple[str, Any, str] | None:
    """Return name, object and location of the innermost object that cannot be pickled."""
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if depth > _MAX_DEPTH or not isinstance(function, types.FunctionType):
        return None
    for name, referred in _references(function):
        if not _fails(referred):
            continue
        inner = _culprit(referred, depth + 1)
        if inner is not None:
            return inner
        return name, referred, _place(function, name)
    return None


def _references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the closure cells, globals and defaults that travel with a function."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval:
                yield instruction.argval


def _place(function: types.FunctionType, name: str) -> str:
    for code in _codes(function.__code__):
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            if instruction.positions is not None:
                line = instruction.positions.lineno or line
            if instruction.argval == name and instruction.opname.startswith("LOAD_"):
                return f" at {Path(code.co_filename).name}:{line}"
    return f" in {Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _culprit_in_owner(main_fun: Any) -> tuple[str, Any, str] | None:
    """Return the attributes of a method's instance, or of a callable object."""
    owner = getattr(main_fun, "__self__", main_fun)
    part, value = _culprit_in_data("self", owner, 0)
    return None if value is owner else (part, value, "")


def _culprit_in_data(path: str, value: Any, depth: int) -> tuple[str, Any]:
    for name, part in _parts(value):
        if depth < _MAX_DEPTH and _fails(part):
            return _culprit_in_data(path + name, part, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", part) for key, part in vars(value).items())
    elif is_dataclass(value):  # with slots
        yield from ((f".{each.name}", getattr(value, each.name, None)) for each in fields(value))


def _fails(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001  # any reason to refuse is a refusal
        return True
    return False


def _first_line(error: Exception) -> str:
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        text = ""
    return (text or type(error).__qualname__).splitlines()[0]
