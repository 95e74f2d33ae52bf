"""Text of others made printable: a node or a file must not steer the user's terminal.

Covers: escaping of control characters, cutting of long text.
Does not: drop colours or overwritten progress bars (tfos.node.supervisor.log_buffer).
Threads: none; pure.
"""

from __future__ import annotations

MAX_LINE_CHARS = 4000


def visible(text: str, *, keep: str = "\t") -> str:
    r"""Return text with each character that cannot be printed as its escape, such as `\x1b`.

    Args:
        text: any text.
        keep: control characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape(char) for char in text)


def printable(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """Return text as one line for display.

    Args:
        text: any text.
        limit: characters, of the text and of what is shown of it; a longer one is cut.
    """
    shown = visible(text[:limit])
    rest = max(len(text), len(shown)) - limit
    return f"{shown[:limit]} ... ({rest} more characters)" if rest > 0 else shown


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
