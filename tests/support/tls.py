"""Certificates that are wrong in one way each, and raw TLS clients that show them."""

from __future__ import annotations

import copy
import datetime
import socket
import ssl
import warnings
from pathlib import Path

import pytest

from rpc.auth.certificates import TlsCredentials, data_name
from tests.support.rpc import WAIT_S
from tfos.control import authority as authorities
from tfos.control.authority import ClusterAuthority

CLUSTER = "cluster-a"
PEERS = ("server", "worker", "driver", "feeder")
"""Of certificates that are good for any process: tests/rpc/transport/test_tls_peers.py has the
others."""


def _hours_from_now(hours: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)


class Keys:
    """Credentials of one cluster's authority: good ones, and one for each way to be wrong."""

    def __init__(self) -> None:
        self.authority = ClusterAuthority(CLUSTER)
        self.good = self.authority.data_node(*PEERS)

    def wrong(self, how: str) -> TlsCredentials:
        with pytest.MonkeyPatch.context() as patched:
            if how == "expired":
                patched.setattr(authorities, "_UNTIL", _hours_from_now(-1))
            elif how == "not yet valid":
                patched.setattr(authorities, "_SINCE", _hours_from_now(1))
            elif how == "other authority":
                strange = ClusterAuthority(CLUSTER).data_node(*PEERS)
                return TlsCredentials(strange.cert_pem, strange.key_pem, self.good.ca_pem)
            elif how == "other cluster":
                other = copy.copy(self.authority)
                other._cluster_id = "cluster-b"
                return other.data_node(*PEERS)
            elif how == "control plane":
                return self.authority.node("worker:0")
            elif how == "client only":
                return self.authority.data_client(*PEERS)
            else:
                raise ValueError(how)
            return self.authority.data_node(*PEERS)

    def write(self, keys: TlsCredentials, directory: Path) -> tuple[Path, Path, Path]:
        """Put them into files: certificate, key, authority."""
        paths = tuple(directory / name for name in ("cert.pem", "key.pem", "ca.pem"))
        for path, data in zip(paths, (keys.cert_pem, keys.key_pem, keys.ca_pem), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(data)
        return paths  # type: ignore[return-value]


def raw_context(
    keys: TlsCredentials | None, ca_pem: bytes, directory: Path, version: ssl.TLSVersion
) -> ssl.SSLContext:
    """A client's context that checks nothing but what it is told to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # TLS 1.1 is not offered at all without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the old ones
        context.minimum_version = context.maximum_version = version
    context.load_verify_locations(cadata=ca_pem.decode())
    if keys is not None:
        file = directory / "raw.pem"
        file.write_bytes(keys.cert_pem + keys.key_pem)
        context.load_cert_chain(file)
    return context


def first_word(address: tuple[str, int], context: ssl.SSLContext) -> bytes | Exception:
    """What the server says first to a TLS client, or why it says nothing."""
    try:
        with (
            socket.create_connection(address, timeout=WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=data_name(CLUSTER)) as tls,
        ):
            return tls.recv(64)
    except (ssl.SSLError, OSError) as error:
        return error
