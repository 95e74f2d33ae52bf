"""SparkFiles.get in main_fun; workers that do not use it do not import pyspark.

Covers: giving pyspark's SparkFiles, once imported, the directory of this executor's files.
Does not: import pyspark, which takes 0.7 s of processor time from an executor's zip file.
Runs in: the worker's process.      Threads: call `announce` before any thread of the process.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "pyspark.core.files"


def announce(root: str) -> None:
    """Make `SparkFiles.get` answer as in a task on this executor.

    Args:
        root: directory of the files that SparkContext.addFile has sent; "": there are none.
    """
    if root:
        sys.meta_path.insert(0, _Finder(root))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and completes it; no effect after that."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        del path, target
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._root)
        return spec


class _Loader(Loader):
    """Loads SparkFiles' module with its own loader, and sets the directory."""

    def __init__(self, loader: Any, root: str) -> None:
        self._loader = loader
        self._root = root

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # for later readers of the module, such as inspect
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        module.SparkFiles._root_directory = self._root
        module.SparkFiles._is_running_on_worker = True
