"""TLS 1.3 stream: encrypts another stream, for `security="tls"` on TCP.

Covers: the non-blocking TLS handshake, why a peer was refused, TLS records over another stream.
Does not: choose certificates (auth.certificates), the cluster's own handshake, which follows inside
TLS (auth.handshake).
Threads: as every Stream.
Source: RFC 8446; the limit of records per key is its section 5.5.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from typing import Any

from rpc.auth.certificates import (
    TlsCredentials,
    check_cluster,
    check_peer,
    data_name,
    tls_context,
)
from rpc.auth.handshake import Identity
from rpc.errors import AuthError, IntegrityError, PeerGone, RpcError, TransportError
from rpc.transport.record_stream import RecordStream
from rpc.transport.stream import Stream

MAX_HANDSHAKE_BYTES = 32 * 1024
"""Bytes that a peer may send before its proof: enough for a chain of some certificates."""
MAX_RECORDS = 2**24
"""Records per connection and direction; RFC 8446 5.5 allows an AES-GCM key 2^24.5 full ones."""
_CHUNK_BYTES = 64 * 1024
_RECORD_BYTES = 16 * 1024
_RECORD_HEAD_BYTES = 5
"""Head of every TLS record: type, version, length of what follows (RFC 8446, section 5.1)."""
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "BAD_RECORD_TYPE"}


class TlsStream(RecordStream):
    """One end of a TLS connection over another stream; usable once `shake_hands` returned True.

    Args:
        inner: the stream that carries the TLS records.
        credentials: certificate, key and authority of this process.
        cluster_id: the peer's certificate must be for this cluster.
        server_side: whether this process accepted the connection.
    """

    def __init__(
        self, inner: Stream, credentials: TlsCredentials, cluster_id: str, *, server_side: bool
    ) -> None:
        super().__init__(inner, "tcp+tls")
        self._cluster_id = cluster_id
        self._server_side = server_side
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls_context(credentials, server_side=server_side).wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_side,
            server_hostname=None if server_side else data_name(cluster_id),
        )
        self._arriving = memoryview(bytearray(2048))  # small: the peer has not proved itself
        self._certificate: Any = {}
        """The peer's, once TLS has verified it."""
        self._handshake_bytes = 0
        self._may_have_bytes = False
        """Whether bytes have arrived since TLS last needed more."""
        self._head = b""
        """Received part of the arriving record's head, while that is not complete."""
        self._missing_bytes = 0
        """Missing bytes of the arriving record, once its head is complete."""
        self._has_received = False
        """Whether the peer has sent a record inside TLS."""
        self._records_left = MAX_RECORDS
        """Number of records that this side may still send."""
        self._peers_records_left = MAX_RECORDS
        """Number that the peer may still send, or fewer: one read in two parts counts twice."""

    @property
    def is_nearly_used(self) -> bool:
        """Whether a quarter of the records is left in one direction: the time to connect again."""
        return min(self._records_left, self._peers_records_left) < MAX_RECORDS // 4

    @property
    def is_mid_record(self) -> bool:
        """See RecordStream."""
        return self._missing_bytes > 0 or bool(self._head)

    def shake_hands(self) -> bool:
        """Continue the TLS handshake; False while it waits for the peer.

        Raises:
            AuthError: the peer has no certificate of this cluster, refuses ours, or speaks no
                TLS 1.3; the text has the reason.
            TransportError: it is gone.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError as error:
                with contextlib.suppress(TransportError):  # it is refused anyway
                    self._flush()
                raise AuthError(_reason(error)) from error
            else:
                self._flush()
                break
            count = self._inner.recv_into(self._arriving)
            if count is None:
                return False
            self._handshake_bytes += count
            if self._handshake_bytes > MAX_HANDSHAKE_BYTES:
                raise AuthError(f"its TLS handshake has more than {MAX_HANDSHAKE_BYTES} bytes")
            self._take(count)
        self._certificate = self._tls.getpeercert() or {}
        if self._server_side:
            check_cluster(self._certificate, self._cluster_id)
        self._arriving = memoryview(bytearray(_CHUNK_BYTES))
        self._may_have_bytes = self._incoming.pending > 0
        return True

    def check_peer(self, identity: Identity) -> None:
        """Refuse a peer that proves the secret under a role or rank that its certificate lacks.

        Raises:
            AuthError: the text names both.
        """
        check_peer(self._certificate, identity.role.value, identity.rank)

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream.

        Raises:
            IntegrityError: a record was changed, dropped, repeated or inserted on the way.
            AuthError: the peer's first record is an alert that refuses our certificate.
        """
        while True:
            count = self._open(view) if self._may_have_bytes else 0
            if count:
                return count
            arrived = self._inner.recv_into(self._arriving)
            if arrived is None:
                return None
            self._take(arrived)
            self._may_have_bytes = True

    def _seal(self, views: Sequence[memoryview]) -> None:
        """See RecordStream; TLS copies the bytes first.

        Raises:
            TransportError: this connection has sent as many records as its key allows.
        """
        if self._records_left <= 0:
            raise TransportError(
                f"this connection to {self.peer_address} has sent {MAX_RECORDS} TLS records, as "
                "many as its keys are good for; connect again"
            )
        at = 0
        for view in views:
            part = view[: _CHUNK_BYTES - at]
            self._tls.write(part)
            at += len(part)
            self._records_left -= -(-len(part) // _RECORD_BYTES)
            if at == _CHUNK_BYTES:
                break
        self._sealed = memoryview(self._outgoing.read())
        self._sealed_bytes = at

    def _has_bytes(self) -> bool:
        return self._may_have_bytes

    def _take(self, count: int) -> None:
        """Give TLS what has arrived, and follow the records' lengths: TLS tells of whole ones."""
        arrived = self._arriving[:count]
        self._incoming.write(arrived)
        data, at = (self._head + arrived if self._head else arrived), self._missing_bytes
        while len(data) - at >= _RECORD_HEAD_BYTES:
            at += _RECORD_HEAD_BYTES + int.from_bytes(data[at + 3 : at + _RECORD_HEAD_BYTES])
        self._head = bytes(data[at:])
        self._missing_bytes = max(0, at - len(data))

    def _open(self, view: memoryview) -> int:
        """Read what has arrived and is verified; 0 when TLS needs more bytes."""
        at = 0
        try:
            while at < len(view):
                # With a buffer it returns the number of bytes.
                count = int(self._tls.read(len(view) - at, view[at:]))
                if not count:  # the peer has ended TLS; this side's streams end TCP alone
                    break
                at += count
                self._peers_records_left -= 1  # a read returns bytes of one record
                self._has_received = True
        except ssl.SSLWantReadError:
            self._may_have_bytes = False
            return at
        except ssl.SSLError as error:
            raise self._broken(error) from error
        if not at:
            raise PeerGone(f"{self.peer_address} closed the connection")
        return at

    def _broken(self, error: ssl.SSLError) -> RpcError:
        if not self._has_received and "ALERT" in (error.reason or ""):
            return AuthError(f"{self.peer_address}: {_reason(error)}")
        return IntegrityError(
            f"bytes from {self.peer_address} were changed, dropped, repeated or inserted on the "
            f"way ({_plain(error)})"
        )

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and self._inner.sendmsg((memoryview(data),)) != len(data):
            raise TransportError(
                f"{self.peer_address} has a receive buffer too small for a handshake"
            )


def _reason(error: ssl.SSLError) -> str:
    """Return why a handshake failed, and what to check."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if "ALERT" in reason:
        return f"the peer refuses this side's TLS: {_plain(error)}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer shows no certificate"
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE"):
        return "the peer speaks no TLS 1.3"
    if reason in _NO_TLS:
        return "the peer does not speak TLS; give all processes of the cluster the same security"
    return f"TLS handshake failed: {_plain(error)}"


def _plain(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
