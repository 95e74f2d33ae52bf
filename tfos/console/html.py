"""HTML for notebooks: paragraphs and tables of text that may come from a node.

Covers: escaping; the look, which fits light and dark themes.
Does not: decide what to show (tfos.monitor.reports), draw progress (tfos.console.notebook).
Threads: none; pure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from rpc.printable import visible

_CELL = "padding:2px 8px;white-space:nowrap;text-align:"
_TABLE = "border-collapse:collapse;font-size:90%;margin:4px 0"
_NUMBER_CHARS = frozenset("0123456789.,+-e%")


def escaped(text: object) -> str:
    """Return text that a browser shows as it is, control characters as escapes."""
    return html.escape(visible(str(text)))


def paragraph(text: str) -> str:
    """Return a line of text in the size of the tables."""
    return f'<div style="font-size:90%">{escaped(text)}</div>'


def lines(text: str) -> str:
    """Return several lines of text as they are."""
    shown = "\n".join(map(escaped, text.split("\n")))
    return f'<pre style="margin:0;font-size:90%">{shown}</pre>'


def link(url: str) -> str:
    """Return a link to a web page; for any other URL, its text."""
    shown = escaped(url)
    if not url.startswith(("http://", "https://")):
        return shown
    return f'<a href="{shown}" target="_blank" rel="noopener">{shown}</a>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; cells that are numbers are aligned right.

    Args:
        head: names of the columns.
        rows: cells of each row, as many as `head` has.
    """
    body = [[str(cell) for cell in row] for row in rows]
    at_right = [all(_is_number(row[column]) for row in body) for column in range(len(head))]
    lines = [_row("th", head, at_right), *(_row("td", row, at_right) for row in body)]
    return f'<table style="{_TABLE}">{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[str], at_right: Sequence[bool]) -> str:
    shown = (
        f'<{tag} style="{_CELL}{"right" if right else "left"}">{escaped(cell)}</{tag}>'
        for cell, right in zip(cells, at_right, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, perhaps with a unit, or a dash instead of one."""
    number, _, unit = cell.partition(" ")
    return bool(number) and set(number) <= _NUMBER_CHARS and unit in ("", "s", "read")
