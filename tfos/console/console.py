"""Console at the driver: nodes' output, warnings and one live line of progress.

Covers: prefixes, escaping, a live line on a terminal and plain lines elsewhere, silence.
Does not: decide what to show.
Runs in: the driver; writes to its standard error, so that the program's own output stays clean.
Threads: any; one lock keeps lines whole.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from tfos.console.printable import printable

if TYPE_CHECKING:
    from rich.live import Live


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
        self._live: Live | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether the stream can show a live line."""
        isatty = getattr(self._out(), "isatty", None)
        return bool(isatty and isatty())

    @property
    def is_live(self) -> bool:
        """Whether progress replaces what it showed before; else each call of it is a line."""
        return self.is_terminal

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
            if final or not self.is_terminal:
                self.end_progress()
                self._write(f"tfos | {printable(text)}")
            else:
                self._draw(text)

    def end_progress(self) -> None:
        """Remove the live line."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    def _draw(self, text: str) -> None:
        from rich.text import Text

        if self._live is None:
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(
                console=RichConsole(file=self._out(), highlight=False),
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _write(self, text: str) -> None:
        with self._lock:
            if self._live is not None:
                from rich.text import Text

                self._live.console.print(Text(text), soft_wrap=True)
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
