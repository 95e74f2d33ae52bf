"""Functions by name: what is saved of a user's function is its module and name, never its code.

Covers: the reference of a function, and the function of a reference.
Threads: any; pure.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfos.errors import SettingsError


def reference_to(what: str, function: Any) -> str:
    """Return `module:name` of a function that another program can import; empty of None.

    Args:
        what: name of the argument, for the error.
        function: of the user.

    Raises:
        SettingsError: its module and name do not give it back: it is in no module, inside another
            function, or a method of an object.
    """
    if function is None:
        return ""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    reference = f"{module}:{name}"
    if module in ("", "__main__") or not name or "<" in name or not _leads_to(reference, function):
        raise SettingsError(
            f"{what} {name or function!r} of {module or 'no module'} cannot be saved: another "
            "program could not import it. Define it in a module, at top level; a method of an "
            "object would lose the object"
        )
    return reference


def _leads_to(reference: str, function: Any) -> bool:
    """Say whether it is found by its name: a method without its object is another function."""
    try:
        return bool(function_of(reference) == function)
    except (ImportError, AttributeError):
        return False


def function_of(reference: str) -> Any:
    """Return the function of a reference; None of an empty one."""
    if not reference:
        return None
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
