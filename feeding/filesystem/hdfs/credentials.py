"""What proves a user to a NameNode with Kerberos: keytab, tokens or ticket, and what is wrong.

Covers: whether the keytab of KRB5_CLIENT_KTNAME is used; the address under which a token file has
the NameNode; whether a NameNode asks for Kerberos; the sentence for a refusal.
Does not: authenticate; hdfs-native does, with that keytab, else the file of
HADOOP_TOKEN_FILE_LOCATION, else the ticket of KRB5CCNAME.
Threads: any.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from feeding.filesystem.hdfs.hadoop_conf import NameNode, configuration_directory
from feeding.filesystem.hdfs.keytab import first_principal
from feeding.filesystem.hdfs.ticket_cache import newest_ticket
from feeding.filesystem.hdfs.token_file import DelegationToken, hdfs_tokens

TOKEN_FILE = "HADOOP_TOKEN_FILE_LOCATION"
KEYTAB = "KRB5_CLIENT_KTNAME"
TICKET_CACHE = "KRB5CCNAME"
_SOON_MS = 60_000
_GREETING_TIMEOUT_S = 5.0
_MAX_GREETING_BYTES = 1 << 16
_HEADER = bytes.fromhex("08021000184122002801")
"""RpcRequestHeaderProto of SASL: protobuf, final packet, call -33, no client, retry -1."""
_NEGOTIATE = bytes.fromhex("1001")
"""RpcSaslProto whose state is NEGOTIATE."""


def credential_names(environ: Mapping[str, str]) -> str:
    """Return which files prove the user: connections of another file are another user's."""
    return "\n".join(environ.get(name, "") for name in (TOKEN_FILE, TICKET_CACHE, KEYTAB))


def keytab_login(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return principal and path of the user's keytab; None: tokens or a ticket are used.

    A keytab outlives all tokens: a user who names one wants it, even if YARN has set a token file.

    Args:
        environ: may name a keytab; `next_step` reports one that cannot be read.
    """
    if not environ.get(KEYTAB):
        return None
    path = _keytab(environ)
    try:
        return first_principal(path), str(path)
    except (OSError, ValueError):
        return None


def connect_url(namenode: NameNode, addresses: list[str], environ: Mapping[str, str]) -> str:
    """Return the URL under which hdfs-native finds the NameNode's token.

    Hadoop writes a NameNode's IP address to a token, and hdfs-native compares texts.

    Args:
        namenode: with a port.
        addresses: IP addresses of its host.
        environ: may name a token file.
    """
    port = urllib.parse.urlsplit(namenode.url).port
    tokens: list[DelegationToken] = []
    if environ.get(TOKEN_FILE):
        with contextlib.suppress(OSError, ValueError):
            tokens = hdfs_tokens(Path(environ[TOKEN_FILE]))
    services = {token.service for token in tokens}
    if namenode.url.partition("://")[2] in services:
        return namenode.url
    for address in addresses:
        if f"{address}:{port}" in services:
            return f"hdfs://{address}:{port}"
    return namenode.url


def asks_for_kerberos(host: str, port: int) -> bool:
    """Ask a NameNode by which methods it lets users prove themselves.

    hdfs-native without Kerberos repeats a request that such a NameNode refuses for three minutes.

    Args:
        host: name or address.
        port: port of its RPC.

    Returns:
        True if it takes Kerberos alone; False if it takes a user's word, or said nothing.
    """
    frame = b"".join(bytes([len(part)]) + part for part in (_HEADER, _NEGOTIATE))
    hello = b"hrpc" + bytes([9, 0, 0xDF]) + struct.pack(">I", len(frame)) + frame
    try:
        with socket.create_connection((host, port), timeout=_GREETING_TIMEOUT_S) as stream:
            stream.sendall(hello)
            with stream.makefile("rb") as answers:
                (size,) = struct.unpack(">I", answers.read(4))
                answer = answers.read(min(size, _MAX_GREETING_BYTES))
    except (OSError, struct.error):  # whoever asks it in earnest learns why
        return False
    return b"\x08KERBEROS" in answer and b"\x06SIMPLE" not in answer


def unconfigured(namenode: NameNode, environ: Mapping[str, str]) -> str:
    """Return the sentence for a NameNode that asks for Kerberos where Hadoop's files do not."""
    directory = configuration_directory(environ)
    found = f"{directory} does not set it" if directory else "HADOOP_CONF_DIR is not set"
    return (
        f"NameNode {namenode.url} asks for Kerberos, and {found}; let HADOOP_CONF_DIR name the "
        "cluster's configuration, whose core-site.xml has hadoop.security.authentication=kerberos"
    )


def next_step(namenode: NameNode, environ: Mapping[str, str]) -> str:
    """Return what is wrong with the user's credentials, as far as files tell, and what to do.

    Args:
        namenode: the NameNode that refused them.
        environ: names the files.
    """
    name = environ.get(TOKEN_FILE)
    if environ.get(KEYTAB):
        return _keytab_state(_keytab(environ))
    if not name:
        step = f"{_TICKET}, or let {TOKEN_FILE} name a file of delegation tokens"
        return "; ".join(filter(None, (_ticket_state(environ), step)))
    return f"{_token_state(Path(name), namenode)}; {_TOKEN}, or unset {TOKEN_FILE} and {_TICKET}"


def _keytab(environ: Mapping[str, str]) -> Path:
    return Path(environ[KEYTAB].removeprefix("FILE:")).absolute()


def _unusable(kind: str, path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"the {kind} {path} cannot be read ({error.strerror})"
    return f"{path} is no {kind} ({error})"


def _keytab_state(path: Path) -> str:
    try:
        whose = first_principal(path)
    except (OSError, ValueError) as error:
        wrong = _unusable("keytab", path, error)
    else:
        wrong = f"the keytab {path} of {whose} did not prove it; try kinit -kt with it"
    return f"{wrong}; correct or unset {KEYTAB}"


def _ticket_state(environ: Mapping[str, str]) -> str:
    """Return what is wrong with the user's ticket cache; "" where it is no file to look into."""
    named = environ.get(TICKET_CACHE, "")
    kind, colon, rest = named.partition(":")
    if colon and kind != "FILE" and "/" not in kind:  # such as KCM:0
        return ""
    path = Path((rest if kind == "FILE" else named) or f"/tmp/krb5cc_{os.getuid()}")
    if not named and not path.exists():  # krb5.conf may name another place
        return ""
    try:
        ticket = newest_ticket(path)
    except (OSError, ValueError) as error:
        return _unusable("ticket cache", path, error)
    whose = f"the ticket of {ticket.owner} in {path}"
    if ticket.end_s <= time.time():
        return f"{whose} ended at {_written(ticket.end_s * 1000)}"
    return f"{whose}, which ends at {_written(ticket.end_s * 1000)}, did not prove it"


def _token_state(path: Path, namenode: NameNode) -> str:
    try:
        tokens = hdfs_tokens(path)
    except (OSError, ValueError) as error:
        return _unusable("token file", path, error)
    own = [token for token in tokens if _is_for(token, namenode)]
    if not own:
        others = ", ".join(sorted(token.service for token in tokens)) or "nobody"
        return f"the token file {path} has tokens for {others} alone"
    token = max(own, key=lambda token: token.max_date_ms)
    whose = f"the token of {token.owner} in {path}"
    left_ms = token.max_date_ms - time.time() * 1000
    if left_ms <= _SOON_MS:  # hdfs-native does not even try it
        ends = "ended" if left_ms <= 0 else "ends"
        return f"{whose} {ends} at {_written(token.max_date_ms)}"
    return f"{whose} was not renewed in time or was cancelled"


def _is_for(token: DelegationToken, namenode: NameNode) -> bool:
    authority = namenode.url.partition("://")[2]
    host, _, port = token.service.rpartition(":")
    if token.service in (authority, f"ha-hdfs:{authority}"):
        return True
    try:
        asked = urllib.parse.urlsplit(namenode.url)
        found = socket.getaddrinfo(asked.hostname, asked.port) if asked.port else []
    except OSError:
        return False
    return any((host, port) == (str(entry[4][0]), str(entry[4][1])) for entry in found)


def _written(milliseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))


_TICKET = f"get a ticket on this host (kinit), or let {KEYTAB} name a keytab"
_TOKEN = "write a new one to that file (hdfs fetchdt; on YARN submit again)"
