"""What wrappers call: methods' functions, partials, caches, compiled functions.

Covers: decorators of functools and of packages that keep what they wrap under the usual names.
Threads: any; pure.
"""

from __future__ import annotations

import functools
import types
from typing import Any

_COMPILED = ("py_func", "python_function")
"""Where numba.njit and tf.function keep what they compile; what else they hold, calls change."""
_NOT_HELD = {"__wrapped__", *functools.WRAPPER_ASSIGNMENTS}
"""Attributes of a wrapper that are the wrapped one's."""


def wrapped_in(value: Any) -> tuple[Any, ...]:
    """Return what a descriptor or another wrapper calls; empty: it is none.

    A partial is none: it has arguments beside its function.
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
    """Return what a wrapper has beside the function that it wraps, such as its settings.

    Args:
        value: that `wrapped_in` has found to be one.
    """
    if any(callable(getattr(value, name, None)) for name in _COMPILED):
        return {}
    try:
        state = value.__getstate__()  # a class may leave out what each process has of its own
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
