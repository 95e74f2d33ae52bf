"""The arguments that prove a hand-started process to its cluster, the same for every command.

Covers: secret file, cluster id, integrity, TLS files; the credentials that they give.
Does not: read secrets (ps.cli.secret_file) or keys (rpc.auth.certificates).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ps.cli.secret_file import read_secret
from ps.errors import SettingsError
from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--secret-file", required=True, help="file of mode 0600 with the secret")
    parser.add_argument("--cluster-id", required=True, help="name that all processes give")
    parser.add_argument(
        "--integrity",
        choices=("header", "payload"),
        default="header",
        help="what is authenticated on TCP; all processes must say the same",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="TLS on TCP: this process's certificate")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, in a file of mode 0600")
    parser.add_argument("--tls-ca", metavar="FILE", help="the authority that signed all of them")


def credentials_of(options: argparse.Namespace) -> Credentials:
    """Return what was given.

    Raises:
        SettingsError: it cannot be used together.
        OSError: a file cannot be read.
    """
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    if any(files) and not all(files):
        raise SettingsError("give all three of --tls-cert, --tls-key and --tls-ca, or none")
    secret = read_secret(Path(options.secret_file))
    tls = TlsCredentials.from_files(*files) if all(files) else None
    try:
        return Credentials(options.cluster_id, secret, options.integrity, tls)
    except ValueError as error:
        raise SettingsError(str(error)) from error
