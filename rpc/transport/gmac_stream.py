"""AES-GMAC stream: authenticates every byte of a TCP stream, as `integrity` asks for.

Covers: records and their tags; errors for changed, dropped or repeated records.
Does not: negotiate (auth.handshake), encrypt: records are readable on the network.
Threads: as every Stream.

    offset  type  field
         0  u32   num_bytes, 1..131072
         4  16s   tag = AES-128-GMAC over the record's bytes, nonce = u96 number of the record
        20        the record's bytes

Records count from 0 in each direction; key = HMAC-SHA256(key of this direction, "tfrp/payload")
[0:16]. A reader returns verified bytes only, so a handler never sees a changed byte.
Source: GMAC, NIST SP 800-38D; the record number as nonce as in TLS 1.3 (RFC 8446 5.3).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

from rpc.auth.handshake import Session
from rpc.errors import IntegrityError
from rpc.transport.record_stream import RecordStream
from rpc.transport.stream import Stream

RECORD_BYTES = 128 * 1024
_HEAD = struct.Struct("<I16s")
_NONCE_BYTES = 12
_LABEL = b"tfrp/payload"


class _Tags:
    """The tags of one direction's records, in order."""

    def __init__(self, key: bytes) -> None:
        # Imported here: processes that talk within their host alone need no cryptography.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(hmac.digest(key, _LABEL, hashlib.sha256)[:16])
        self._invalid = InvalidTag
        self._number = 0

    def next(self, data: memoryview) -> bytes:
        return self._cipher.encrypt(self._nonce(), b"", data)

    def is_next(self, tag: bytes, data: memoryview) -> bool:
        try:
            self._cipher.decrypt(self._nonce(), tag, data)
        except self._invalid:
            return False
        return True

    def _nonce(self) -> bytes:
        self._number += 1
        return (self._number - 1).to_bytes(_NONCE_BYTES, "little")


class SealedStream(RecordStream):
    """One end of an authenticated stream over another stream.

    Args:
        inner: the stream that carries the records.
        session: result of the handshake; its keys are the base of the records' keys.
    """

    def __init__(self, inner: Stream, session: Session) -> None:
        super().__init__(inner, f"{inner.transport}+payload")
        self._send_tags = _Tags(session.send_key)
        self._receive_tags = _Tags(session.receive_key)
        self._record = memoryview(bytearray(_HEAD.size + RECORD_BYTES))
        self._buffer = memoryview(bytearray(_HEAD.size + RECORD_BYTES))
        self._have = 0
        self._want = _HEAD.size
        self._verified = self._buffer[:0]

    @property
    def is_mid_record(self) -> bool:
        """See RecordStream."""
        return self._have > 0

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream.

        Raises:
            IntegrityError: a record was changed, dropped, repeated or inserted on the way, or
                its length is illegal.
        """
        if not self._verified and not self._receive_record():
            return None
        count = min(len(view), len(self._verified))
        view[:count] = self._verified[:count]
        self._verified = self._verified[count:]
        return count

    def _seal(self, views: Sequence[memoryview]) -> None:
        """See RecordStream.

        Seals a copy: a server's parameters may change while they are sent, and the tag would not
        match.
        """
        body, at = self._record[_HEAD.size :], 0
        for view in views:
            part = view[: RECORD_BYTES - at]
            body[at : at + len(part)] = part
            at += len(part)
            if at == RECORD_BYTES:
                break
        _HEAD.pack_into(self._record, 0, at, self._send_tags.next(body[:at]))
        self._sealed = self._record[: _HEAD.size + at]
        self._sealed_bytes = at

    def _has_bytes(self) -> bool:
        return bool(self._verified)

    def _receive_record(self) -> bool:
        """Receive one record to its end and verify it; False if it would block."""
        while True:
            count = self._inner.recv_into(self._buffer[self._have : self._want])
            if count is None:
                return False
            self._have += count
            if self._have < self._want:
                continue
            num_bytes, tag = _HEAD.unpack_from(self._buffer)
            if self._want > _HEAD.size:
                break
            if not 1 <= num_bytes <= RECORD_BYTES:
                raise IntegrityError(
                    f"a record from {self.peer_address} has {num_bytes} bytes, not "
                    f"1..{RECORD_BYTES}: the length was changed on the way"
                )
            self._want += num_bytes
        data = self._buffer[_HEAD.size : self._want]
        self._have, self._want = 0, _HEAD.size
        if not self._receive_tags.is_next(tag, data):
            raise IntegrityError(
                f"bytes from {self.peer_address} were changed, dropped, repeated or inserted on "
                "the way"
            )
        self._verified = data
        return True
