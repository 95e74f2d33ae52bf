"""Digests of values and functions: the same in every process that runs the same program.

Covers: sets in any order; classes and functions of the program itself, by their code.
Does not: read what other modules have (a digest names it alone).      Threads: any; pure.

cloudpickle's bytes are no digest: each process gives a class of `__main__` another number in them,
and orders the texts of a set by another hash.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_MAX_FUNCTIONS = 200
_PLAIN = (str, int, float, bool)
_NO_CODE = {"__doc__", "__firstlineno__"}
"""Of a class: may change while what it does stays."""


def value_digest(value: Any, outer: frozenset[int] = frozenset()) -> bytes:
    """Return a digest of a value; empty for what cannot be pickled.

    Args:
        value: anything.
        outer: ids of functions and classes whose digests this one is part of.
    """
    data = io.BytesIO()
    try:
        _DigestPickler(data, outer).dump(value)
    except Exception:  # noqa: BLE001 - the run itself names what cannot be pickled
        return b""
    return hashlib.sha256(data.getbuffer()).digest()


class _DigestPickler(pickle.Pickler):
    """Writes digests for what has other bytes in another process."""

    def __init__(self, file: io.BytesIO, outer: frozenset[int]) -> None:
        super().__init__(file, protocol=5)
        self._outer = outer

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a set, module, function or class; None: its own bytes."""
        if isinstance(value, set | frozenset):
            members = sorted(value_digest(each, self._outer) for each in value)
            return type(value).__qualname__, members
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if not isinstance(value, types.FunctionType | type) or _is_imported(value):
            return None
        if id(value) in self._outer:  # it is part of what this is part of
            return "again", value.__qualname__
        return "code", function_digest(value, self._outer)


def _is_imported(value: Any) -> bool:
    """Whether a pickle names a function or class alone: every process finds it in its module."""
    if value.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def function_digest(function: Callable[..., Any], outer: frozenset[int] = frozenset()) -> str:
    """Return a digest of a function's code, its defaults and closure, and of what it names.

    Functions and classes of the same module count, and the module's plain values (numbers, texts,
    lists, sets and dicts of these), arrays and objects of its classes; what other modules have does
    not.

    Args:
        function: or a class.
        outer: ids of functions and classes whose digests this one is part of.
    """
    found = hashlib.sha256()
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting += _feed(found, each, outer | seen)
    return found.hexdigest()


def _feed(found: Any, value: Any, seen: frozenset[int]) -> list[Any]:
    """Add one value; return the functions that it refers to."""
    if isinstance(value, functools.partial):
        found.update(value_digest((value.args, sorted(value.keywords.items())), seen))
        return [value.func]
    if isinstance(value, types.MethodType):
        found.update(value_digest(getattr(value.__self__, "__dict__", 0), seen))
        return [value.__func__]
    if isinstance(value, type):
        names = sorted(vars(value).keys() - _NO_CODE)
        members = [(name, vars(value)[name]) for name in names]
        found.update(repr((value.__qualname__, [_plain_text(pair) for pair in members])).encode())
        bases = [base for base in value.__bases__ if base.__module__ == value.__module__]
        return bases + [each for _, each in members if isinstance(each, types.FunctionType)]
    if not isinstance(value, types.FunctionType):
        found.update(value_digest(getattr(value, "__dict__", repr(type(value))), seen))
        call = getattr(type(value), "__call__", None)  # noqa: B004 - the function itself is wanted
        return [call] if isinstance(call, types.FunctionType) else []
    found.update(value.__qualname__.encode())
    _feed_code(found, value.__code__)
    cells = [_content(cell) for cell in value.__closure__ or ()]
    data = [*cells, *(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
    functions = [each for each in data if isinstance(each, types.FunctionType)]
    rest = [each for each in data if not isinstance(each, types.FunctionType)]
    found.update(value_digest(rest, seen))
    known = value.__globals__
    named = [(name, known[name]) for name in _names_in(value.__code__) if name in known]
    for name, each in named:
        is_own = type(each).__module__ in ("numpy", "__main__", value.__module__)
        digest = value_digest(each, seen) if is_own else b""
        found.update(repr((name, _plain_text(each), digest)).encode())
    return functions + [
        each
        for _, each in named
        if isinstance(each, types.FunctionType | type) and each.__module__ == value.__module__
    ]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _plain_text(value: Any) -> str:
    """Return plain data as text, the same in every process; empty for anything else inside it."""
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_plain_text, value))})"
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(_plain_text, value)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(map(_plain_text, value.items()))})"
    return repr(value) if type(value) in (*_PLAIN, bytes, complex, type(None)) else ""


def _feed_code(found: Any, code: types.CodeType) -> None:
    found.update(code.co_code)
    found.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _feed_code(found, constant)
        elif isinstance(constant, frozenset):
            found.update(repr(sorted(map(repr, constant))).encode())
        else:
            found.update(repr(constant).encode())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
