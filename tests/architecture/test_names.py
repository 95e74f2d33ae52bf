"""Names of this project's modules in docstrings, comments and messages are those that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import MODULES, ROOT

NAME = re.compile(r"(?<![\w./])(?:rpc|ps|feeding|tfos)(?:\.[A-Za-z_]\w*)+")
COMMENT = re.compile(r"(?:^|\s)#\s(.*)$", re.MULTILINE)
PROTOCOLS = {"tfos.Control", "tfos.Many"}
"""Names of gRPC services."""


def texts(source: str) -> Iterator[str]:
    """Return comments, and strings of several words: others are keys, or code."""
    yield from COMMENT.findall(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


@functools.cache
def defined(module: Path) -> frozenset[str]:
    """Return what a module defines."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


@functools.cache
def handed_on(module: Path) -> dict[str, str]:
    """Return what a package has from its modules: `ps.rules` is `ps.manifest.rule_spec`."""
    if module.name != "__init__.py":
        return {}
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@functools.cache
def exists(name: str) -> bool:
    """Return whether a dotted name leads to a module, or to what it or a class of it defines."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file():
            first, *rest = parts[end:] or [""]
            if first in handed_on(module):
                return exists(".".join([handed_on(module)[first], *rest]))
            return not first or defined(module).issuperset([first, *rest[:1]])
    return False


def test_names_in_texts_exist():
    missing: set[str] = set()
    for module in MODULES:
        source = module.read_text()
        unknown = {name for name in NAME.findall(source) if not exists(name)} - PROTOCOLS
        if unknown:
            named = {name for text in texts(source) for name in NAME.findall(text)}
            missing |= {f"{module.relative_to(ROOT)}: {name}" for name in unknown & named}
    assert sorted(missing) == []
