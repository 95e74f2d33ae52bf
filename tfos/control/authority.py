"""A certificate authority for one cluster, in the driver's memory only.

Covers: EC P-256 keys and certificates for the driver and for each role and index, of both planes.
Does not: revoke; an old attempt of a node is fenced by control.state, since it holds the same key.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rpc.auth.certificates import TlsCredentials, data_name, peer_uri
from tfos.control.identity import DRIVER_NAME, tls_name

_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_SINCE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""For any clock of a host, also one without a battery: the authority's key, which exists only in
the driver's memory, ends with the cluster. RFC 5280 names this end for what does not expire."""


class ClusterAuthority:
    """Signs the certificates of one cluster; its private key never leaves this object."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"tfos cluster {cluster_id}")
        self._cert = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(sign=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_pem = _pem(self._cert)

    def __repr__(self) -> str:
        return f"ClusterAuthority({self._cluster_id!r})"

    def driver(self) -> TlsCredentials:
        """Return the control server's credentials."""
        return self._issue(DRIVER_NAME, tls_name(self._cluster_id), _SERVER)

    def node(self, name: str) -> TlsCredentials:
        """Return the credentials of one node, e.g. `worker:1`; all its attempts share them."""
        return self._issue(name, tls_name(self._cluster_id), _CLIENT)

    def data_node(self, *peers: str) -> TlsCredentials:
        """Return credentials of the data plane for a process that listens and connects.

        The control plane refuses them, because their names differ.

        Args:
            peers: `worker:1` as of `rpc.Identity`; a role alone is for any rank.
        """
        return self._issue_data(peers, _SERVER, _CLIENT)

    def data_client(self, *peers: str) -> TlsCredentials:
        """Return connect-only credentials of the data plane; `peers` as of `data_node`."""
        return self._issue_data(peers, _CLIENT)

    def _issue_data(self, peers: Sequence[str], *usages: x509.ObjectIdentifier) -> TlsCredentials:
        uris = [x509.UniformResourceIdentifier(peer_uri(peer)) for peer in peers]
        name = f"data {' '.join(peers)}"
        return self._issue(name, data_name(self._cluster_id), *usages, uris=uris)

    def _issue(
        self,
        common_name: str,
        dns_name: str,
        *usages: x509.ObjectIdentifier,
        uris: Sequence[x509.UniformResourceIdentifier] = (),
    ) -> TlsCredentials:
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(dns_name), *uris]
        cert = (
            self._builder(_name(common_name), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        key_pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return TlsCredentials(_pem(cert), key_pem, self.ca_pem)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_SINCE)
            .not_valid_after(_UNTIL)
        )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )
