"""What wrappers call: functions of methods, partials, caches, compiled functions.

Covers: decorators of functools and of packages that keep what they wrap under the usual names.
Threads: any; pure.
"""

from __future__ import annotations

import functools
import types
from typing import Any

_COMPILED = ("py_func", "python_function")
"""Attributes in which numba.njit and tf.function keep what they compile; calls change others."""
_NOT_HELD = {"__wrapped__", *functools.WRAPPER_ASSIGNMENTS}
"""Attributes of a wrapper that belong to the wrapped function."""


def wrapped_in(value: Any) -> tuple[Any, ...]:
    """Return what a descriptor or another wrapper calls; empty: it is not one.

    A partial is not one: it has arguments besides its function.
    """
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if not callable(value) or isinstance(
        value, types.MethodType | types.BuiltinFunctionType | functools.partial
    ):
        return ()
    found = (getattr(value, name, None) for name in (*_COMPILED, "__wrapped__"))
    return next(((each,) for each in found if callable(each)), ())


def held_by(value: Any) -> dict[str, Any]:
    """Return what a wrapper has besides the function that it wraps, such as its settings.

    Args:
        value: a wrapper, according to `wrapped_in`.
    """
    if any(callable(getattr(value, name, None)) for name in _COMPILED):
        return {}
    try:
        state = value.__getstate__()  # a class may leave out process-specific state
    except Exception:  # noqa: BLE001 - whatever a class raises that refuses to be pickled
        state = getattr(value, "__dict__", None)
    parts = state if isinstance(state, tuple) else (state,)
    return {
        name: each
        for part in parts
        if isinstance(part, dict)
        for name, each in sorted(part.items())
        if name not in _NOT_HELD
    }


def code_behind(value: Any) -> types.FunctionType | type:
    """Return the function or class whose code a callable leads to."""
    while not isinstance(value, types.FunctionType | type):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        else:
            value = next(iter(wrapped_in(value)), type(value))
    return value
