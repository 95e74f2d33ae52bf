"""Who is who on the control plane: certificates of one cluster's own authority.

Covers: the credentials of a node and of the driver, and the names inside certificates.
Does not: make them (control.authority, driver only, which needs `cryptography`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

DRIVER_NAME = "driver"
"""Common name of the control server's certificate."""


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Certificate, private key and the cluster's authority, each as PEM; the key is never shown."""

    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)


def tls_name(cluster_id: str) -> str:
    """Return the DNS name that every certificate of the cluster carries.

    Peers check this name instead of host names: a node of an older cluster that reaches a new one
    on a reused port is refused by TLS itself, and no address has to be known in advance.
    """
    return f"{cluster_id}.tfos.invalid"
