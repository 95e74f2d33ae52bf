"""What keeps a local HDFS from starting.

LocalHdfsError
└── MissingTool      Java, Maven or Kerberos is not installed     → install it
"""

from __future__ import annotations


class LocalHdfsError(Exception):
    """Something did not come up, or cannot; the message holds the last lines of its log."""


class MissingTool(LocalHdfsError):
    """Java, Maven or Kerberos is absent; the message says what to run."""


def last_lines(text: str, count: int = 12) -> str:
    """Return the end of a log, indented below the sentence that it explains."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line[:300]}" for line in lines[-count:])
