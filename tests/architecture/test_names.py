"""Names of this project's modules in docstrings, comments and messages are those that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.names import exists
from tests.support.sources import MODULES, ROOT, nodes

NAME = re.compile(r"(?<![\w./])(?:rpc|ps|feeding|tfos)(?:\.[A-Za-z_]\w*)+")
COMMENT = re.compile(r"(?:^|\s)#\s(.*)$", re.MULTILINE)
PROTOCOLS = {"tfos.Control", "tfos.Many"}
"""Names of gRPC services."""


def texts(module: Path) -> Iterator[str]:
    """Return comments, and strings of several words: others are keys, or code."""
    yield from COMMENT.findall(module.read_text())
    for node in nodes(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_names_in_texts_exist():
    missing: set[str] = set()
    for module in MODULES:
        source = module.read_text()
        unknown = {name for name in NAME.findall(source) if not exists(name)} - PROTOCOLS
        if unknown:
            named = {name for text in texts(module) for name in NAME.findall(text)}
            missing |= {f"{module.relative_to(ROOT)}: {name}" for name in unknown & named}
    assert sorted(missing) == []
