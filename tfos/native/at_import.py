"""At import: change a module of another package once, when it is imported.

Covers: the finder that waits for the module.      Does not: import it, know the change.
Threads: any; Python imports a module once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def at_import(name: str, change: Callable[[ModuleType], object]) -> None:
    """Change a module: now if it is already imported, else on import; a second call has no effect.

    Args:
        name: name of the module.
        change: called with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    elif not any(isinstance(each, _AtImport) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, _AtImport(name, change))


class _AtImport(MetaPathFinder):
    """Changes the module when it is imported, then removes itself."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self.name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that changes the loaded module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
