"""Console at the driver: nodes' output, warnings and one live line of progress.

Covers: prefixes, escaping, a live line on a terminal or in a notebook and plain lines elsewhere,
silence.
Does not: decide what to show.
Runs in: the driver; writes to its standard error, so that the program's own output stays clean.
Threads: any; nobody but the writer's thread is held up by a standard error that nobody reads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, TextIO

from rpc.printable import printable
from tfos.console.notebook import NotebookDisplay, is_notebook
from tfos.console.writer import Writer


class Console:
    """Lines for the user. With `enabled=False` only warnings are shown.

    Args:
        enabled: show output, progress and tables too.
        details: show also what only users who look into tfos need.
        stream: where lines go; None: standard error.
    """

    def __init__(
        self, *, enabled: bool = True, details: bool = False, stream: TextIO | None = None
    ) -> None:
        self.enabled = enabled
        self._details = details
        self._stream = stream
        self._lock = threading.RLock()
        self._notebook: NotebookDisplay | None = None
        self._is_notebook_broken = False
        self._writer = Writer(self._on_closed)

    @property
    def is_terminal(self) -> bool:
        """Whether the stream can show a live line."""
        isatty = getattr(self._out(), "isatty", None)
        try:
            return bool(isatty and isatty())
        except ValueError:  # the user closed it
            return False

    @property
    def is_live(self) -> bool:
        """Whether progress replaces what it showed before; else each call writes a line."""
        return self.is_terminal or self._is_notebook

    def line(self, text: str, *, waits: bool = True) -> None:
        """Show one line of the driver.

        Args:
            text: the line.
            waits: wait for a moment, so that what the program writes next comes after it; False:
                    under a lock, or where another process waits for an answer.
        """
        if self.enabled:
            self._write(f"tfos | {printable(text)}", waits=waits)

    def detail(self, text: str) -> None:
        """Show one line for users who look into tfos."""
        if self._details:
            self.line(text)

    def warn(self, text: str, *, waits: bool = True) -> None:
        """Show a warning, also when silent.

        Args:
            text: the warning.
            waits: see `line`.
        """
        self._write(f"tfos | WARNING: {printable(text)}", waits=waits)

    def node_lines(self, prefix: str, lines: tuple[str, ...], dropped: int) -> None:
        """Show a node's output as `worker:1@host | text`; waits for nothing.

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
            self._writer.write_output("\n".join(text), self._out())

    def progress(self, text: str, *, final: bool = False) -> None:
        """Replace the live line, or write a plain one. The final one stays.

        Args:
            text: one line.
            final: leave it on the screen.
        """
        if not self.enabled:
            return
        if self._is_notebook and self._show_in_notebook(text, stays=final):
            return
        if self.is_terminal and not final:
            self._writer.show_live(text, self._out())
            return
        self.end_progress()
        self._write(f"tfos | {printable(text)}", waits=True)

    def end_progress(self) -> None:
        """Remove the live line."""
        with self._lock:
            notebook, self._notebook = self._notebook, None
            if notebook is not None:
                with contextlib.suppress(Exception):
                    notebook.close()
        if self.is_terminal:
            self._writer.end_live(self._out())

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written; return whether they were in time.

        Args:
            timeout_s: seconds to wait at most.
        """
        return self._writer.flush(timeout_s)

    def _show_in_notebook(self, text: str, *, stays: bool) -> bool:
        """Show a line of progress in the cell's output; return whether the front end took it."""
        with self._lock:
            if self._notebook is None:
                self._notebook = NotebookDisplay()
            try:
                (self._notebook.keep if stays else self._notebook.update)(text)
            except Exception:  # noqa: BLE001 - whatever a notebook's front end does
                self._is_notebook_broken = True
                return False
            return True

    @property
    def _is_notebook(self) -> bool:
        return self._stream is None and not self._is_notebook_broken and is_notebook()

    def _write(self, text: str, *, waits: bool) -> None:
        self._writer.write(text, self._out(), waits=waits)

    def _on_closed(self) -> None:
        # The user closed or redirected standard error; output is no reason to fail.
        self.enabled = False

    def _out(self) -> Any:
        return self._stream if self._stream is not None else sys.stderr
