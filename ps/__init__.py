"""The parameter server: dense parameters, sparse tables, update rules, modes, checkpoints.

Covers: the names that programs import. They load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ps import errors as errors
    from ps.client.client import PSClient
    from ps.client.saver import SaveOptions
    from ps.config import ServerSettings
    from ps.errors import PSError
    from ps.manifest import initializer_spec as initializers
    from ps.manifest import rule_spec as rules
    from ps.manifest.manifest import GroupSpec, Hyper, Manifest, ParamSpec
    from ps.manifest.table_spec import Admission, TableSpec
    from ps.server.server import PSServer

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Admission",
    "GroupSpec",
    "Hyper",
    "Manifest",
    "PSClient",
    "PSError",
    "PSServer",
    "ParamSpec",
    "SaveOptions",
    "ServerSettings",
    "TableSpec",
    "errors",
    "initializers",
    "rules",
]

_HOMES = {
    "Admission": "ps.manifest.table_spec",
    "GroupSpec": "ps.manifest.manifest",
    "Hyper": "ps.manifest.manifest",
    "Manifest": "ps.manifest.manifest",
    "PSClient": "ps.client.client",
    "PSError": "ps.errors",
    "PSServer": "ps.server.server",
    "ParamSpec": "ps.manifest.manifest",
    "SaveOptions": "ps.client.saver",
    "ServerSettings": "ps.config",
    "TableSpec": "ps.manifest.table_spec",
}
_MODULES = {
    "errors": "ps.errors",
    "initializers": "ps.manifest.initializer_spec",
    "rules": "ps.manifest.rule_spec",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
