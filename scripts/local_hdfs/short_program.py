"""Programs that make files and end, such as Maven and kinit: run one, and report how it failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.local_hdfs.errors import LocalHdfsError, last_lines

_TIMEOUT_S = 60.0


def run_to_end(
    what: str,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> None:
    """Run a program that needs no input.

    Args:
        what: names it in the error.
        command: the program and its arguments.
        env: its whole environment; None: this process's.
        directory: its working directory; None: this process's.
        timeout_s: seconds until it is killed.

    Raises:
        LocalHdfsError: the program failed, with its last lines, or did not end.
    """
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LocalHdfsError(f"{what} did not end within {timeout_s:.0f} s") from error
    if done.returncode:
        end = last_lines(done.stdout + done.stderr)
        raise LocalHdfsError(f"{what} ended with {done.returncode}:{end}")
