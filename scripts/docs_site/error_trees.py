"""Extension of Griffe: trees drawn in docstrings keep their lines on the site."""

from __future__ import annotations

from typing import Any

import griffe

BRANCHES = ("├", "└", "│")


def fenced(text: str) -> str:
    """Return the text with each drawn tree, and the line above it, as a block of code."""
    lines: list[str] = []
    in_tree = False
    for line in text.splitlines():
        is_branch = line.lstrip().startswith(BRANCHES)
        if is_branch and not in_tree:
            lines.insert(len(lines) - 1, "```text")
        if in_tree and not is_branch:
            lines.append("```")
        lines.append(line)
        in_tree = is_branch
    return "\n".join([*lines, "```"] if in_tree else lines)


class ErrorTrees(griffe.Extension):  # type: ignore[misc]  # an extra that types do without
    """Applies `fenced` to the docstring of every module."""

    def on_module_instance(self, *, mod: Any, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if mod.docstring and any(branch in mod.docstring.value for branch in BRANCHES):
            mod.docstring.value = fenced(mod.docstring.value)
