"""TerminalLine: one line at the bottom of a terminal that progress replaces.

Covers: drawing it below other lines.      Does not: decide when (tfos.console.console).
Threads: none; the writer's thread makes the calls.
"""

from __future__ import annotations

from typing import Any


class TerminalLine:
    """A line that disappears when it is closed.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: Any) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=stream, highlight=False),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def update(self, text: str) -> None:
        """Replace the line."""
        from rich.text import Text

        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def print(self, text: str) -> None:
        """Write a line above it, which stays."""
        from rich.text import Text

        self._live.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Remove it."""
        self._live.stop()
