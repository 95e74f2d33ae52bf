"""A line for people: names in a checkpoint, or of a server's tables, cannot steer their terminal.

Covers: escapes.      Does not: write.      Pure; no threads.
"""

from __future__ import annotations

from rpc.printable import visible


def line(text: str) -> str:
    """Return a text as one line, with each character that cannot be printed as its escape."""
    return visible(text, keep="") + "\n"
