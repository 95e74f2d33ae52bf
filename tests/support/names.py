"""Dotted names of the library in texts, and whether they lead anywhere."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.support.sources import ROOT, nodes


@functools.cache
def _defined(module: Path) -> frozenset[str]:
    """Return what a module defines."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


@functools.cache
def _handed_on(module: Path) -> dict[str, str]:
    """Return what a package has from its modules: `ps.rules` is `ps.manifest.rule_spec`."""
    if module.name != "__init__.py":
        return {}
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@functools.cache
def exists(name: str) -> bool:
    """Return whether a dotted name leads to a module of a room, or to what is defined there.

    Args:
        name: `ps.client`, or `ps.client.client.PSClient.pull`.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            first, *rest = parts[end:] or [""]
            if first in _handed_on(module):
                return exists(".".join([_handed_on(module)[first], *rest]))
            return not first or _defined(module).issuperset([first, *rest])
    return False
