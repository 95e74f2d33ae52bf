"""Credentials of hand-started processes: command-line arguments and secret files.

Covers: secret files (owner, mode, length), cluster id, integrity, TLS files; the credentials that
they give.
Does not: read keys (rpc.auth.certificates).
"""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path
from typing import get_args

from ps.cli import CLUSTER_ID_HELP, INTEGRITY_HELP, SECRET_FILE_HELP
from ps.errors import PSSettingsError
from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials, Integrity

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def recipe(path: Path) -> str:
    """Return how to make a file with a secret that `read_secret` takes."""
    return f"make one with: (umask 077; head -c 32 /dev/urandom | base64 > {path})"


def read_secret(path: Path) -> bytes:
    """Return the secret in a file that only its owner may read.

    Raises:
        PSSettingsError: there is no file, others may read it, or the secret is too short or long.
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise PSSettingsError(
            f"there is no file {path}; all processes that show its secret to each other need the "
            f"same one: {recipe(path)}"
        ) from error
    with file:
        status = os.fstat(file.fileno())
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise PSSettingsError(
                f"{path} has mode {mode:04o}: others may read the secret; chmod 0600 {path}"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise PSSettingsError(f"{path} belongs to user id {status.st_uid}, not to this user")
        secret = file.read(MAX_SECRET_BYTES + 1).strip()
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise PSSettingsError(
            f"the secret in {path} has {len(secret)} bytes, it needs {MIN_SECRET_BYTES}.."
            f"{MAX_SECRET_BYTES}; {recipe(path)}"
        )
    return secret


def metrics_token(file: str | None) -> str:
    """Read what the readers of the metrics page have to show; empty without a file.

    Raises:
        PSSettingsError: no reader can show it, or others may read it.
    """
    if not file:
        return ""
    token = read_secret(Path(file))
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise PSSettingsError(
            f"the token in {file} goes into an HTTP header, which takes one line of visible ASCII "
            f"characters without spaces; {recipe(Path(file))}"
        )
    return token.decode("ascii")


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--secret-file", required=True, help=SECRET_FILE_HELP)
    parser.add_argument("--cluster-id", required=True, help=CLUSTER_ID_HELP)
    parser.add_argument(
        "--integrity",
        choices=get_args(Integrity),
        default="auto",
        help=INTEGRITY_HELP,
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="TLS on TCP: this process's certificate."
    )
    parser.add_argument("--tls-key", metavar="FILE", help="Its key, in a file of mode 0600.")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="The authority that signed all certificates."
    )


def credentials_of(options: argparse.Namespace) -> Credentials:
    """Return what was given.

    Raises:
        PSSettingsError: it cannot be used together.
        OSError: a file cannot be read.
    """
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    if any(files) and not all(files):
        raise PSSettingsError("give all three of --tls-cert, --tls-key and --tls-ca, or none")
    secret = read_secret(Path(options.secret_file))
    tls = TlsCredentials.from_files(*files) if all(files) else None
    try:
        return Credentials(options.cluster_id, secret, options.integrity, tls)
    except ValueError as error:
        raise PSSettingsError(str(error)) from error
