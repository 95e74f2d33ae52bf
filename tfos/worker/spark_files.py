"""SparkFiles.get in main_fun; workers that do not use it do not import pyspark.

Covers: giving pyspark's SparkFiles, once imported, the directory of this executor's files.
Does not: import pyspark, which takes 0.7 s of processor time from an executor's zip file.
Runs in: the worker's process.      Threads: call `announce` before any thread of the process.
"""

from __future__ import annotations

import functools
from types import ModuleType

from tfos.native.at_import import at_import

_MODULE = "pyspark.core.files"


def announce(root: str) -> None:
    """Make `SparkFiles.get` answer as in a task on this executor.

    Args:
        root: directory of the files that SparkContext.addFile has sent; "": there are none.
    """
    if root:
        at_import(_MODULE, functools.partial(_complete, root=root))


def _complete(module: ModuleType, *, root: str) -> None:
    module.SparkFiles._root_directory = root
    module.SparkFiles._is_running_on_worker = True
