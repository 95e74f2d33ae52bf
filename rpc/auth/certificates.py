"""TLS certificates of the data plane: loading a process's own, checking the peer's.

Covers: key, certificate and authority of one process, the DNS name that ties a certificate to one
cluster, the URIs that tie it to a role and rank, ssl contexts (TLS 1.3 only, certificates on both
sides).
Does not: issue certificates (tfos.control.authority; by hand: SECURITY.md), move bytes
(transport.tls_stream).
Threads: any.
"""

from __future__ import annotations

import functools
import os
import re
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rpc.errors import AuthError
from rpc.linux_calls import memfd_create

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Certificate, private key and the cluster's authority, each as PEM; the key is never shown."""

    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)

    @classmethod
    def from_files(cls, cert: str | Path, key: str | Path, ca: str | Path) -> Self:
        """Read them from PEM files; only its owner may read the key.

        Args:
            cert: path of this process's certificate.
            key: path of its private key, unencrypted, of mode 0600 or 0400.
            ca: path of the certificate of the cluster's authority.

        Raises:
            PermissionError: others may read the key.
            OSError: a file cannot be read.
        """
        with Path(key).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(
                    f"{key} has mode {mode:04o}: others may read the key; chmod 0600 {key}"
                )
            key_pem = file.read()
        return cls(Path(cert).read_bytes(), key_pem, Path(ca).read_bytes())


def data_name(cluster_id: str) -> str:
    """Return the DNS name that every data plane certificate of the cluster carries.

    Certificates carry it instead of host names. So a process of another cluster is refused even if
    the same authority signed its certificate, and no address has to be known in advance.

    Raises:
        ValueError: the cluster id cannot be part of a DNS name.
    """
    if not _LABEL.fullmatch(cluster_id):
        raise ValueError(
            f"with TLS a cluster id has 1 to 63 letters, digits, '-' or '_', got {cluster_id!r}: "
            "it is part of the name in the certificates"
        )
    return f"{cluster_id}.data.tfos.invalid"


@functools.lru_cache(maxsize=8)
def tls_context(credentials: TlsCredentials, *, server_side: bool) -> ssl.SSLContext:
    """Return the SSL context for one side of connections.

    Args:
        credentials: certificate, key and authority of this process.
        server_side: whether this process accepts the connections.

    Raises:
        AuthError: the key, the certificate or the authority cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # no session resumption: every connection presents its certificate
    try:
        context.load_verify_locations(cadata=credentials.ca_pem.decode())
        _load_own(context, credentials)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise AuthError(
            f"this process's TLS files cannot be used: {error}; give a PEM certificate, its "
            "unencrypted key, and the certificate of the authority that signed it"
        ) from error
    return context


def check_cluster(certificate: Any, cluster_id: str) -> None:
    """Refuse a client's certificate if it is for another cluster.

    Args:
        certificate: what `ssl.SSLSocket.getpeercert` returns for a certificate that the authority
            has signed.
        cluster_id: this cluster's id.

    Raises:
        AuthError: the certificate does not carry the cluster's name.
    """
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if data_name(cluster_id).lower() not in (name.lower() for name in names):
        raise AuthError(
            f"the client's certificate is for {', '.join(names) or 'no name'}, not for "
            f"{data_name(cluster_id)}: it belongs to another cluster"
        )


def peer_uri(peer: str) -> str:
    """Return the URI by which a certificate names a role and rank, or a role with any rank.

    Args:
        peer: `worker:1` as of `rpc.Identity`, or `feeder`.
    """
    return f"tfos:{peer}"


def check_peer(certificate: Any, role: str, rank: int) -> None:
    """Refuse a peer whose certificate is for another role or rank than the peer claims.

    Args:
        certificate: see `check_cluster`.
        role: the role that the peer claims, as in `rpc.Identity`.
        rank: the rank that it claims.

    Raises:
        AuthError: the certificate names neither.
    """
    named = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if peer_uri(role) not in named and peer_uri(f"{role}:{rank}") not in named:
        raise AuthError(
            f"the peer claims to be {role}:{rank}, its certificate is for "
            f"{', '.join(named) or 'no role'}; issue one with the name {peer_uri(f'{role}:{rank}')}"
            " (a URI, see SECURITY.md)"
        )


def _load_own(context: ssl.SSLContext, credentials: TlsCredentials) -> None:
    """Load key and certificate through a memfd: ssl takes them from a path only."""
    descriptor = memfd_create("tls")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(credentials.cert_pem + b"\n" + credentials.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
