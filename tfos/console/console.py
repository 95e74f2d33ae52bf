"""Console at the driver: nodes' output, warnings and one live line of progress.

Covers: prefixes, escaping, a live line on a terminal or in a notebook and plain lines elsewhere,
silence.
Does not: decide what to show.
Runs in: the driver; writes to its standard error, so that the program's own output stays clean.
Threads: any; one lock keeps lines whole.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, Protocol, TextIO

from tfos.console.notebook import NotebookDisplay, is_notebook
from tfos.console.printable import printable
from tfos.console.terminal import TerminalLine


class LiveDisplay(Protocol):
    """What shows a line that is replaced."""

    def update(self, text: str) -> None:
        """Replace the line."""

    def print(self, text: str) -> bool:
        """Show another line, without disturbing this one; return whether it did."""

    def keep(self, text: str) -> bool:
        """Show a line that stays with those of its kind; return whether it did."""

    def close(self) -> None:
        """End; what was kept stays."""


class Console:
    """Lines for the user. With `enabled=False` only warnings are shown.

    Args:
        enabled: show output, progress and tables too.
        details: show what only those need who look into tfos.
        stream: where lines go; None: standard error.
    """

    def __init__(
        self, *, enabled: bool = True, details: bool = False, stream: TextIO | None = None
    ) -> None:
        self.enabled = enabled
        self._details = details
        self._stream = stream
        self._lock = threading.RLock()
        self._live: LiveDisplay | None = None
        self._is_notebook_broken = False

    @property
    def is_terminal(self) -> bool:
        """Whether the stream can show a live line."""
        isatty = getattr(self._out(), "isatty", None)
        return bool(isatty and isatty())

    @property
    def is_live(self) -> bool:
        """Whether progress replaces what it showed before; else each call of it is a line."""
        return self.is_terminal or self._is_notebook

    def line(self, text: str) -> None:
        """Show one line of the driver."""
        if self.enabled:
            self._write(f"tfos | {printable(text)}")

    def detail(self, text: str) -> None:
        """Show one line for those who look into tfos."""
        if self._details:
            self.line(text)

    def warn(self, text: str) -> None:
        """Show a warning, also when silent."""
        self._write(f"tfos | WARNING: {printable(text)}")

    def node_lines(self, prefix: str, lines: tuple[str, ...], dropped: int) -> None:
        """Show a node's output as `worker:1@host | text`.

        Args:
            prefix: the node and its host.
            lines: output without line ends.
            dropped: lines that the node left out before these.
        """
        if not self.enabled:
            return
        text = [f"{prefix} | {printable(line)}" for line in lines]
        if dropped:
            text.append(f"{prefix} | ({dropped} lines dropped: over the rate limit; see its log)")
        if text:
            self._write("\n".join(text))

    def progress(self, text: str, *, final: bool = False) -> None:
        """Replace the live line, or write a plain one. The final one stays.

        Args:
            text: one line.
            final: leave it on the screen.
        """
        if not self.enabled:
            return
        with self._lock:
            live = self._open()
            try:
                if live is not None and not final:
                    live.update(text)
                    return
                if live is not None and live.keep(text):
                    return
            except Exception:  # noqa: BLE001 - whatever a notebook's front end does
                self._is_notebook_broken = True
            self.end_progress()
            self._write(f"tfos | {printable(text)}")

    def end_progress(self) -> None:
        """Remove the live line."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                with contextlib.suppress(Exception):
                    live.close()

    def _open(self) -> LiveDisplay | None:
        """Return what shows progress live, if anything can."""
        if self._live is None:
            if self._is_notebook:
                self._live = NotebookDisplay()
            elif self.is_terminal:
                self._live = TerminalLine(self._out())
        return self._live

    @property
    def _is_notebook(self) -> bool:
        return self._stream is None and not self._is_notebook_broken and is_notebook()

    def _write(self, text: str) -> None:
        with self._lock:
            if self._live is not None and self._live.print(text):
                return
            out = self._out()
            try:
                out.write(text + "\n")
                out.flush()
            except (OSError, ValueError):
                # The user closed or redirected standard error; output is no reason to fail.
                self.enabled = False

    def _out(self) -> Any:
        return self._stream if self._stream is not None else sys.stderr
