"""Identities on the control plane: certificates of one cluster's own authority.

Covers: the names inside certificates.
Does not: make them (tfos.control.authority, driver only, which needs `cryptography`), hold them
(rpc.auth.certificates).
"""

from __future__ import annotations

DRIVER_NAME = "driver"
"""Common name of the control server's certificate."""
OPERATOR_NAME = "operator"
"""Common name of the certificate that may look at the job, save and stop it: the user's."""
STREAMS_NAME = "streams"
"""Common name of the certificate that may end the cluster's streams: the user's, on any host."""


def tls_name(cluster_id: str) -> str:
    """Return the DNS name that every control plane certificate of the cluster carries.

    Peers check this name instead of host names: a node of an older cluster that reaches a new one
    on a reused port is refused by TLS itself, and no address has to be known in advance.
    """
    return f"{cluster_id}.tfos.invalid"
