"""The syntax trees of the library's modules, for the tests of the architecture.

All are parsed at once and without the garbage collector, which would take most of the time.
"""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("rpc", "ps", "feeding", "tfos")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in MODULES]


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    gc.disable()
    try:
        return {path: ast.parse(path.read_text()) for path in MODULES}
    finally:
        gc.freeze()  # they stay as long as pytest
        gc.enable()


def tree(path: Path) -> ast.Module:
    """Return the tree of a module of a room, which nobody changes."""
    return _trees()[path]


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, also those inside of functions."""
    return tuple(ast.walk(tree(path)))


def dotted(node: ast.AST) -> str:
    """Return the name `a.b.c` that an expression is; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""
