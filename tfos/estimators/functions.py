"""Functions by name: a user's function is saved as module and name, never as code.

Covers: the reference of a function, and the function of a reference.
Threads: any; pure.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from tfos.errors import SettingsError


def reference_to(what: str, function: Any) -> str:
    """Return `module:name` of a function that another program can import; empty for None.

    Args:
        what: name of the argument, for the error.
        function: the user's function.

    Raises:
        SettingsError: its module and name do not give it back: it is in no module, inside another
            function, or a method of an object.
    """
    if function is None:
        return ""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    reference = f"{module}:{name}"
    found = None if module in ("", "__main__") or "<" in name else _found(reference)
    if isinstance(found, type(function)) and _is_other_version(function, found):
        raise SettingsError(
            f"{what} {name} of {module} cannot be saved: the module now has another version of "
            "it, and another program would import that one. Import it again: "
            f"from {module} import {name.partition('.')[0]}"
        )
    if found is None or not _is_same(found, function):
        raise SettingsError(
            f"{what} {name or function!r} of {module or 'no module'} cannot be saved: another "
            "program could not import it. Define it at top level of a module. A method would "
            "lose its object"
        )
    return reference


def _found(reference: str) -> Any:
    """Return the object that a name leads to; None: nothing."""
    try:
        return function_of(reference)
    except (ImportError, AttributeError):
        return None


def _is_same(found: Any, function: Any) -> bool:
    """Say whether a name leads to the function: a method without its object is another function.

    A module that is loaded again has new objects of the same code.
    """
    if found == function:
        return True
    try:
        return _has_same_code(found, function)
    except ValueError:  # arrays that differ in defaults or closures compare to an array
        return False


def _has_same_code(found: Any, function: Any) -> bool:
    if isinstance(found, types.FunctionType) and isinstance(function, types.FunctionType):
        return _code_of(found) == _code_of(function)
    if isinstance(found, type) and isinstance(function, type):
        return _code_of_class(found) == _code_of_class(function)
    return False


def _is_other_version(function: Any, found: Any) -> bool:
    """Say whether both are written at the same place, and one of them before the file changed."""
    if not isinstance(found, types.FunctionType | type) or _is_same(found, function):
        return False
    return (found.__module__, found.__qualname__) == (function.__module__, function.__qualname__)


def _code_of(
    function: types.FunctionType, around: tuple[types.FunctionType, ...] = ()
) -> tuple[Any, ...]:
    around = (*around, function)
    held = [_content_of(cell, around) for cell in function.__closure__ or ()]
    # Python compares code by what it does and the lines where it stands.
    return function.__code__, function.__defaults__, function.__kwdefaults__, held


def _content_of(cell: types.CellType, around: tuple[types.FunctionType, ...]) -> Any:
    """Return what a function's code takes from around it, such as a decorator's settings."""
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return None
    if isinstance(content, type):  # from super(): the class that is compared
        return content.__module__, content.__qualname__
    if not isinstance(content, types.FunctionType):
        return content
    if content in around:  # it calls itself
        return around.index(content)
    return _code_of(content, around)


def _code_of_class(kind: type) -> dict[str, Any]:
    parts: dict[str, Any] = {"bases": [each.__qualname__ for each in kind.__bases__]}
    for name, each in vars(kind).items():
        plain = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        if isinstance(plain, types.FunctionType):
            parts[name] = _code_of(plain)
        elif name not in ("__dict__", "__weakref__"):
            parts[name] = plain
    return parts


def function_of(reference: str) -> Any:
    """Return the function of a reference; None for an empty one."""
    if not reference:
        return None
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
