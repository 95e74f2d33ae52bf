"""Programs that make files and end, such as kinit and keytool: run one, and tell how it failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from scripts.local_hdfs.errors import LocalHdfsError, last_lines

_TIMEOUT_S = 60.0


def run_to_end(what: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program that needs no input.

    Args:
        what: names it in the error.
        command: the program and its arguments.
        env: its whole environment; None: this process's.

    Raises:
        LocalHdfsError: it failed; with its last lines.
    """
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        end = last_lines(done.stdout + done.stderr)
        raise LocalHdfsError(f"{what} ended with {done.returncode}:{end}")
