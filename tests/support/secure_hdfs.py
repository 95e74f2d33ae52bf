"""Delegation tokens of a local HDFS with Kerberos, made and ended by Hadoop's own program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts.local_hdfs.cluster import LocalHdfs

_FETCHER = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"
_TIMEOUT_S = 60.0


def fetch_token(hdfs: LocalHdfs, ticket: Path, file: Path) -> None:
    """Do what `hdfs fetchdt` does: write a delegation token to a file, in place of an older one.

    Args:
        hdfs: with Kerberos.
        ticket: cache of the user's ticket.
        file: for the token.
    """
    staged = file.with_name(f"{file.name}-new")
    _run(hdfs, ticket, "--renewer", "alice", staged.as_uri())
    file.with_name(f".{staged.name}.crc").unlink()  # of Java's local file system
    staged.rename(file)


def cancel_token(hdfs: LocalHdfs, ticket: Path, file: Path) -> None:
    """End the token in a file before its time. Arguments as of `fetch_token`."""
    _run(hdfs, ticket, "--cancel", file.as_uri())


def _run(hdfs: LocalHdfs, ticket: Path, *arguments: str) -> None:
    env = {**os.environ, "KRB5CCNAME": str(ticket), "HADOOP_CONF_DIR": str(hdfs.conf_dir)}
    env.pop("HADOOP_TOKEN_FILE_LOCATION", None)  # it would ask with the token that it ends
    done = subprocess.run(
        [*hdfs.java_command(_FETCHER), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
