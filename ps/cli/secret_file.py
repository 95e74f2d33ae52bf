"""Secrets in files that only their owner may read.

Covers: mode, owner and length.      Does not: know what the secret is for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ps.errors import SettingsError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """Return the secret in a file that only its owner may read.

    Raises:
        SettingsError: there is no file, others may read it, or the secret is too short or long.
        OSError: it cannot be read.
    """
    recipe = f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise SettingsError(
            f"there is no file {path}; all processes of a cluster need the same secret: {recipe}"
        ) from error
    with file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise SettingsError(
                f"{path} has mode {mode:04o}: others may read the secret; chmod 0600 {path}"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise SettingsError(f"{path} belongs to user id {status.st_uid}, not to this user")
        secret = file.read(MAX_SECRET_BYTES + 1).strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise SettingsError(
            f"the secret in {path} has {len(secret)} bytes, it needs {MIN_SECRET_BYTES}.."
            f"{MAX_SECRET_BYTES}; {recipe}"
        )
    return secret
