"""Columns of plain text for a terminal: no cell is broken, and what is too wide loses its middle.

Covers: widths, gaps, the width that there is, hosts without the domain that they share.
Does not: know what is shown (tfos.cli.jobs).      Pure, but for `width_of_output`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence

from rich.cells import cell_len, set_cell_size

LEAST_CELLS = 12
"""Least size of a shortened cell."""


def width_of_output() -> int | None:
    """Return the columns of the terminal; None where the output goes elsewhere, as to `grep`."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    numbers: Collection[str] = (),
    shrinks: str = "",
) -> list[str]:
    """Return the head's line, then one line for each row.

    Args:
        head: names of the columns.
        rows: cells, as many as the head has.
        width: columns of the terminal; None: as wide as it gets.
        numbers: names of columns that are aligned at the right.
        shrinks: name of the column that is shortened where the terminal is too narrow.
    """
    table = [list(head), *map(list, rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    gap = "  "
    if width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        gap = " "
        at = head.index(shrinks) if shrinks in head else None
        over = sum(widths) + len(widths) - 1 - width
        if over > 0 and at is not None:
            widths[at] = max(min(widths[at], LEAST_CELLS), widths[at] - over)
            for row in table:
                row[at] = shortened(row[at], widths[at])
    found = []
    for row in table:
        cells = []
        for name, cell, size in zip(head, row, widths, strict=True):
            fill = " " * (size - cell_len(cell))
            cells.append(fill + cell if name in numbers else cell + fill)
        found.append(gap.join(cells).rstrip())
    return found


def shortened(text: str, size: int) -> str:
    """Return the text without its middle if it is longer than `size`: ends of names differ too."""
    if cell_len(text) <= size:
        return text
    last = (size - 1) // 2
    return f"{set_cell_size(text, size - 1 - last)}…{text[len(text) - last :]}"


def without_domain(hosts: Sequence[str]) -> list[str]:
    """Return hosts by their first names if all are in one domain; else unchanged."""
    named = [host for host in hosts if host.rpartition(".")[2].isalpha()]
    domains = {host.partition(".")[2] for host in named}
    if len(domains) != 1:
        return list(hosts)
    return [host.partition(".")[0] if host in named else host for host in hosts]
