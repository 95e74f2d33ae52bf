"""Lazy names of a package: each is imported from its module when it is first used.

Covers: the functions `__getattr__` and `__dir__` of a package (PEP 562) from one table.
Does not: know the names; each package's `__init__` has its table, and imports the same names under
TYPE_CHECKING for type checkers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: name of the package.
        homes: per public name the module that defines it, or "module:" if the name stands for the
            module itself.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home.removesuffix(":"))
        return module if home.endswith(":") else getattr(module, name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names
