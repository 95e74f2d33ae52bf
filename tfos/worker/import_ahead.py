"""Import of TensorFlow and Keras while other nodes start, for a main_fun that will import them.

Covers: finding in main_fun's code what it will import, importing that, pausing the collector
meanwhile, why an import compiles what an earlier start has compiled.
Does not: guess. A program that names neither pays nothing. One that first sets up the process
(environment, module path) imports when it is ready.
Runs in: the worker's process, in the main thread, between unpickling main_fun and calling it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

SLOW = frozenset({"keras", "tensorflow"})
"""Packages whose import takes seconds and changes nothing but this process's modules."""
_PREPARES = frozenset({"environ", "putenv", "meta_path", "modules", "fork"})
"""Names of what has to happen before the import, such as os.environ["KERAS_BACKEND"]."""
_MAX_FUNCTIONS = 200
"""Most functions whose code is read; more belong to a library rather than to main_fun."""
_MANY_OBJECTS = 50_000

_logger = logging.getLogger(__name__)


def will_import(main_fun: Any, args: Any = None) -> tuple[str, ...]:
    """Return which of SLOW the function imports, itself or in functions that it refers to.

    Nothing is returned if any of this code also prepares the process for imports.

    Args:
        main_fun: a function, method, partial or callable object.
        args: its argument; functions in it count as well.
    """
    found: set[str] = set()
    for code in _codes(main_fun, args):
        if not _PREPARES.isdisjoint(code.co_names) or {"sys", "path"} <= set(code.co_names):
            return ()
        if not SLOW.isdisjoint(map(_package, code.co_names)):
            found |= SLOW & set(_imported(code))
    return tuple(sorted(found))


def import_ahead(names: tuple[str, ...]) -> None:
    """Import these packages; what fails here fails again in main_fun, where the user sees it.

    Args:
        names: names of packages.
    """
    with collector_paused():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever a package raises as it is imported
                _logger.info("%s was not imported ahead of main_fun: %s", name, error)


def compiled_again(names: tuple[str, ...]) -> str:
    """Return why each start compiles these packages from source, and how to avoid that.

    Importing TensorFlow then takes three times as long. The result is empty if Python finds, or
    may keep, compiled modules.

    Args:
        names: names of packages, installed or not; none is imported.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if (
            spec is None
            or spec.origin is None
            or spec.cached is None
            or os.path.isfile(spec.cached)
        ):
            continue
        directory = os.path.dirname(spec.origin)
        if sys.dont_write_bytecode:
            reason = "PYTHONDONTWRITEBYTECODE is set"
        elif not os.access(directory, os.W_OK):
            reason = f"{directory} cannot be written"
        else:
            continue  # kept by the import to come
        return (
            f"{directory} has no compiled modules and {reason}, so each start compiles {name}, "
            f"which takes several seconds. Run `python -m compileall -q "
            f"{os.path.dirname(directory)}` where this environment is built"
        )
    return ""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from searching modules that are being imported.

    TensorFlow's import makes some 10^6 lasting objects, which the collector walks again and again:
    a fifth of the import's time. Later searches also leave out what a large import has made.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY_OBJECTS:
            gc.freeze()
        gc.enable()


def _codes(*values: Any) -> Iterator[types.CodeType]:
    """Yield the code of all functions in these values, nested ones and those they refer to."""
    waiting = [function for value in values for function in _functions(value)]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        function = waiting.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for code in _nested(function.__code__):
            yield code
            for name in code.co_names:
                waiting += _functions(function.__globals__.get(name))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                waiting += _functions(cell.cell_contents)


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions that a call of this value, or of an element of it, would run."""
    kind = type(value)  # not isinstance: a lazy module would be imported now
    if kind is types.FunctionType:
        return [value]
    if kind is types.MethodType:
        return _functions(value.__func__)
    if kind is functools.partial:
        return [
            each for part in (value.func, value.args, value.keywords) for each in _functions(part)
        ]
    if kind in (list, tuple, dict):
        items = value.values() if kind is dict else value
        return [item for item in items if type(item) is types.FunctionType]
    call = getattr(kind, "__call__", None)  # noqa: B004 - the function itself is wanted
    return [call] if type(call) is types.FunctionType else []


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _imported(code: types.CodeType) -> Iterator[str]:
    """Yield the packages of absolute imports: `import a.b`, `from a.b import c`."""
    instructions = list(dis.get_instructions(code))
    for level, _, instruction in zip(
        instructions, instructions[1:], instructions[2:], strict=False
    ):
        if instruction.opname == "IMPORT_NAME" and level.argval == 0:
            yield _package(instruction.argval)


def _package(name: str) -> str:
    return name.partition(".")[0]
