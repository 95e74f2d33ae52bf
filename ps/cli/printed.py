"""A line for people: names in a checkpoint, or of a server's tables, cannot steer their terminal.

Covers: escapes.      Does not: write.      Pure; no threads.
"""

from __future__ import annotations


def line(text: str) -> str:
    """Return a text as one line, with each character that cannot be printed as its escape."""
    return "".join(map(_shown, text)) + "\n"


def _shown(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
