"""Programs that packing runs: their output, or a sentence about one that does not end."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from os import PathLike

from tfos.errors import UnsupportedError


def run(
    command: Sequence[str | PathLike[str]],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return the end and the output of a program, whatever its exit status.

    Args:
        command: the program and its arguments.
        timeout_s: seconds until it is killed.
        environment: its own; None: that of this process.

    Raises:
        UnsupportedError: the program did not end in time.
    """
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"{shlex.join(map(str, command))} did not end within {timeout_s:g} s and was killed: "
            "check whether this host is overloaded or its file system hangs, and pack again"
        ) from None
