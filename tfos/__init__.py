"""tfos: parameter servers on Spark executors for Keras 3.

Covers: the names that programs import. They load on first use, so that `import tfos` costs neither
pyspark nor TensorFlow; node processes import parts of this package a thousand times.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from tfos.import_check import check_packages
from tfos.version import __version__

if TYPE_CHECKING:
    from tfos.cluster import TFCluster
    from tfos.config import Checkpoints, ClusterConfig, InputMode
    from tfos.datasource import register_data_sources
    from tfos.errors import NodeFailedError, TFOSError

check_packages(os.path.dirname(os.path.dirname(__file__)))

__all__ = [
    "Checkpoints",
    "ClusterConfig",
    "InputMode",
    "NodeFailedError",
    "TFCluster",
    "TFOSError",
    "__version__",
    "register_data_sources",
]

_HOMES = {
    "Checkpoints": "tfos.config",
    "ClusterConfig": "tfos.config",
    "InputMode": "tfos.config",
    "NodeFailedError": "tfos.errors",
    "TFCluster": "tfos.cluster",
    "TFOSError": "tfos.errors",
    "register_data_sources": "tfos.datasource",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tfos' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
