"""At import: change a module of another package once, when it is imported.

Covers: the finder that waits for the module.      Does not: import it, know the change.
Threads: any; Python imports a module once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def at_import(name: str, change: Callable[[ModuleType], object]) -> None:
    """Change a module: now if it is imported already, else once it is.

    Args:
        name: of the module.
        change: called with it, in place of one that still waits for the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    for each in sys.meta_path:
        if isinstance(each, _AtImport) and each.name == name:
            each.change = change
            return
    sys.meta_path.insert(0, _AtImport(name, change))


class _AtImport(MetaPathFinder):
    """Finds one module as the other finders do; it is gone once the module is imported."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self.name = name
        self.change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that changes the loaded module."""
        if fullname != self.name:
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (each.find_spec(fullname, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self._finish)
        return spec

    def _finish(self, module: ModuleType) -> None:
        if self in sys.meta_path:  # else a finder has asked all others again: two loaders end here
            sys.meta_path.remove(self)
            self.change(module)


class _Changing(Loader):
    """Loads one module by its own loader, which a zip file's modules share, and changes it."""

    def __init__(self, loader: Any, change: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._change = change

    def __getattr__(self, name: str) -> Any:
        """Return what those ask for who have only looked for the module, such as its source."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # for all that ask the module later, such as inspect
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)
