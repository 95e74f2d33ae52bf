"""Stand-in for `export_lib` of tensorflow_estimator, whose last release was for TensorFlow 2.15.

Covers: `from tensorflow_estimator.python.estimator.export import export_lib`, and of that
`get_timestamped_export_dir`, which TensorFlowOnSpark's own examples call.
Does not: replace an installed tensorflow_estimator.
Runs in: any process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULE = "tensorflow_estimator.python.estimator.export.export_lib"


def offer() -> None:
    """Answer imports of the module that no other finder answers; idempotent."""
    if not any(isinstance(each, _LastFinder) for each in sys.meta_path):
        sys.meta_path.append(_LastFinder())


class _LastFinder(MetaPathFinder, Loader):
    """Finds `export_lib` and the packages around it, which are empty."""

    def __init__(self) -> None:
        self._latest = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of these modules."""
        del path, target
        if fullname != _MODULE and not _MODULE.startswith(f"{fullname}."):
            return None
        return ModuleSpec(fullname, self, is_package=fullname != _MODULE)

    def exec_module(self, module: ModuleType) -> None:
        """Give `export_lib` its function."""
        if module.__name__ == _MODULE:
            vars(module)["get_timestamped_export_dir"] = self._timestamped

    def _timestamped(self, export_dir_base: str) -> str:
        """Return `<base>/<current seconds>`, different at each call."""
        self._latest = max(int(time.time()), self._latest + 1)
        return f"{export_dir_base.rstrip('/')}/{self._latest}"
