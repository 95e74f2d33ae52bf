"""What a gRPC channel proves itself by, and whom it believes: one process's keys.

Covers: which of the keys goes where; a chain in the place of the authority would be believed.
Does not: open a channel (tfos.control.client, tfos.many.slot.client), serve (tfos.tls_server).
"""

from __future__ import annotations

import grpc

from rpc.auth.certificates import TlsCredentials


def channel_credentials(keys: TlsCredentials) -> grpc.ChannelCredentials:
    """Return the credentials of a channel, also of one for asyncio.

    Args:
        keys: of this process, and the authority of the server.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=keys.ca_pem,
        private_key=keys.key_pem,
        certificate_chain=keys.cert_pem,
    )
