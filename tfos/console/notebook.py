"""NotebookDisplay: progress as one output of a notebook's cell, updated in place.

Covers: finding the notebook; the output, which keeps the lines of ended epochs.
Does not: import IPython unless its kernel runs this program.
Threads: none; the console serialises the calls, from whatever thread: the output stays in the cell
in which it was made.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from rpc.printable import printable
from tfos.console import html

_KEPT_LINES = 20
"""Ended epochs that stay in sight; earlier ones are only counted."""


def is_notebook() -> bool:
    """Whether this program is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """Lines that stay, and below them one that progress replaces."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._num_kept = 0
        self._shown = ""

    def update(self, text: str) -> None:
        """Replace the last line."""
        self._show(printable(text))

    def keep(self, text: str) -> None:
        """Add a line that stays."""
        self._kept.append(printable(text))
        self._num_kept += 1
        self._show("")

    def close(self) -> None:
        """Leave the lines that stay."""
        if self._handle is not None:
            self._show("")

    def _show(self, live: str) -> None:
        earlier = self._num_kept - len(self._kept)
        lines = [f"({earlier} lines before)"] if earlier else []
        text = "\n".join([*lines, *self._kept, *([live] if live else [])])
        if text == self._shown and self._handle is not None:
            return
        self._shown = text
        bundle = {"text/plain": text, "text/html": html.lines(text)}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
