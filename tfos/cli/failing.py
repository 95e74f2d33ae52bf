"""The end of a command that cannot do what was asked: a sentence on standard error, and exit 2."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from rpc.printable import visible

FAILED_STATUS = 2


def fail(text: str, *, keep: str = "\t") -> NoReturn:
    """Print the sentence and end the command.

    Args:
        text: what is wrong, and what to do; it may come from another process.
        keep: control characters that stay as they are, see `visible`.
    """
    sys.stderr.write(f"tfos: {visible(text, keep=keep)}\n")
    raise typer.Exit(FAILED_STATUS)
