"""Frame layout: the unit of everything that is sent after the handshake.

One frame is a 48-byte little-endian header, `meta_len` bytes of meta, `payload_len` bytes of
payload.

    offset  type  field
         0  4s    magic "TFRP"
         4  u8    version = 1
         5  u8    kind: 1 REQUEST, 2 REPLY, 3 ERROR
         6  u16   flags: 1 MORE (further frames of this message follow); other bits are 0
         8  u64   request_id: chosen by the client, repeated in every frame of the reply
        16  u32   meta_len <= 65536; 1048576 at workers and parameter servers
        20  u32   reserved = 0
        24  u64   payload_len
        32  16s   MAC = blake2b(key = key of this direction, digest_size = 16)
                        over u64 counter || header[0:32] || meta
        48  meta, then payload

The counter starts at 0 in each direction and counts frames, so the receiver refuses a frame that
was replayed, dropped, inserted, reordered, or changed in its header or meta. The MAC does not cover
payload bytes (transport.gmac_stream and TLS do).

A message is one or more frames with one request_id; all but the last have MORE. The meta of the
last frame is the message's meta. A request is one frame. A reply's payload is that of all its
frames, one after the other. An ERROR frame ends a message, has no payload, and its meta is the
msgpack array [code, message, details].

Covers: layout, MAC, counters, limits.
Does not: read or write (frame_io), derive keys (auth.handshake).
Threads: pure; a Sealer or Opener belongs to one thread.
Source: keyed BLAKE2b, RFC 7693.
"""

from __future__ import annotations

import enum
import struct
from hashlib import blake2b
from hmac import compare_digest

import msgspec

from rpc.errors import (
    UNREADABLE,
    IntegrityError,
    LimitExceeded,
    ProtocolError,
    RemoteError,
    VersionMismatch,
)
from rpc.limits import Limits

MAGIC = b"TFRP"
VERSION = 1
HEADER_BYTES = 48
MORE = 1

_FIELDS = struct.Struct("<4sBBHQIIQ")
_COUNTER = struct.Struct("<Q")
_COUNTED_FIELDS = struct.Struct("<Q4sBBHQIIQ")
META_LEN_AT = struct.Struct("<16xI")
"""Length of the meta, at its place in a header."""
_MAC_BYTES = 16
_MAC_AT = HEADER_BYTES - _MAC_BYTES


class FrameKind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3


class Frame(msgspec.Struct, frozen=True):
    """One frame without its payload; the header and meta have been verified."""

    kind: FrameKind
    more: bool
    request_id: int
    meta: bytes
    payload_bytes: int


class ErrorBody(msgspec.Struct, frozen=True, array_like=True):
    """Meta of an ERROR frame."""

    code: str
    message: str
    details: dict[str, str] = {}


_error_decoder = msgspec.msgpack.Decoder(ErrorBody)
_MAX_ERROR_TEXT = 8 * 1024
_MAX_ERROR_DETAILS = 32
_MAX_ERROR_KEY = 64
_MAX_ERROR_VALUE = 16 * 1024
_MAX_ERROR_VALUES = 40 * 1024
"""Bytes of all values together; with the longest text and keys, a body still fits a frame."""


def encode_error(code: str, message: str, details: dict[str, str] | None = None) -> bytes:
    """Return the meta of an ERROR frame; long texts are truncated so that it always fits.

    Args:
        code: stable name of the error's class.
        message: text for people.
        details: values for programs, by name.
    """
    kept = list((details or {}).items())[:_MAX_ERROR_DETAILS]
    truncated: dict[str, str] = {}
    room = _MAX_ERROR_VALUES
    for key, value in kept:
        text = _truncated(value, min(_MAX_ERROR_VALUE, room))
        room -= len(text.encode())
        truncated[_truncated(key, _MAX_ERROR_KEY)] = text
    body = ErrorBody(
        _truncated(code, _MAX_ERROR_KEY), _truncated(message, _MAX_ERROR_TEXT), truncated
    )
    return msgspec.msgpack.encode(body)


def decode_error(meta: bytes) -> RemoteError:
    """Return the error that an ERROR frame carries.

    Raises:
        ProtocolError: the meta is not an error body.
    """
    try:
        body = _error_decoder.decode(meta)
    except UNREADABLE as error:
        raise ProtocolError(f"an ERROR frame's meta is malformed: {error}") from error
    return RemoteError(body.code, body.message, body.details)


class Sealer:
    """Makes header, MAC and meta of one direction's frames; counts them."""

    __slots__ = ("_counter", "_keyed")

    def __init__(self, key: bytes) -> None:
        self._keyed = _keyed(key)
        self._counter = 0

    def seal(
        self,
        kind: FrameKind,
        request_id: int,
        meta: bytes,
        payload_bytes: int,
        *,
        more: bool = False,
    ) -> bytes:
        """Return header and meta of the next frame.

        Args:
            kind: kind of the frame.
            request_id: chosen by the client.
            meta: encoded message.
            payload_bytes: length of the payload that the caller sends after it.
            more: whether further frames of this message follow.
        """
        counter = self._counter
        self._counter = counter + 1
        covered = _COUNTED_FIELDS.pack(
            counter, MAGIC, VERSION, kind, MORE if more else 0,
            request_id, len(meta), 0, payload_bytes,
        )  # fmt: skip
        mac = self._keyed.copy()
        mac.update(covered + meta)
        return covered[_COUNTER.size :] + mac.digest() + meta


class Opener:
    """Verifies one direction's frames; counts them.

    Args:
        key: key of this direction, from the handshake.
        limits: sizes that are accepted.
    """

    __slots__ = ("_counter", "_keyed", "_limits", "max_meta_bytes")

    def __init__(self, key: bytes, limits: Limits) -> None:
        self.max_meta_bytes = limits.max_meta_bytes
        self._keyed = _keyed(key)
        self._limits = limits
        self._counter = 0

    def too_long(self, meta_bytes: int) -> IntegrityError:
        """Return the error for a meta above its limit.

        The MAC is not checked yet, and no peer with the same limits sends it, so the header was
        probably changed on the way.
        """
        return IntegrityError(
            f"frame {self._counter} of this connection announces a meta of {meta_bytes}"
            f" bytes, more than max_meta_bytes={self.max_meta_bytes}: it was changed"
            " on the way, or the peer has other limits"
        )

    def open(self, header: bytes, meta: bytes) -> Frame:
        """Return the frame, once its MAC is right and its fields are legal.

        The MAC comes first: a field that was changed on the way is an integrity error, whatever its
        new value.

        Args:
            header: 48 bytes.
            meta: as many bytes as the header says.

        Raises:
            IntegrityError: the MAC is wrong.
            VersionMismatch: the peer sends another version of frames.
            ProtocolError: a field is illegal.
            LimitExceeded: the payload is above its limit.
        """
        mac = self._keyed.copy()
        mac.update(_COUNTER.pack(self._counter) + header[:_MAC_AT] + meta)
        if not compare_digest(mac.digest(), header[_MAC_AT:]):
            raise IntegrityError(
                f"frame {self._counter} of this connection has a wrong MAC:"
                " it was changed, replayed, reordered or inserted on the way"
            )
        self._counter += 1
        magic, version, kind, flags, request_id, _, reserved, payload_bytes = _FIELDS.unpack_from(
            header
        )
        if version != VERSION:
            raise VersionMismatch(f"peer sent a frame of version {version}, expected {VERSION}")
        known_kind = _KINDS.get(kind)
        if magic != MAGIC or reserved or flags > MORE or known_kind is None:
            raise ProtocolError(
                f"illegal frame: magic={magic!r} kind={kind} flags={flags:#x} reserved={reserved}"
            )
        if payload_bytes > self._limits.max_payload_bytes:
            raise LimitExceeded(
                f"payload of {payload_bytes} bytes exceeds"
                f" max_payload_bytes={self._limits.max_payload_bytes}"
            )
        if (flags and kind != _REPLY) or (payload_bytes and kind == _ERROR):
            raise ProtocolError(
                f"illegal frame: kind={kind}, flags={flags:#x}, {payload_bytes} payload bytes"
            )
        return Frame(known_kind, flags == MORE, request_id, meta, payload_bytes)


_KINDS = {int(kind): kind for kind in FrameKind}
_REPLY = int(FrameKind.REPLY)
_ERROR = int(FrameKind.ERROR)


def _truncated(text: str, num_bytes: int) -> str:
    """Return the text's first bytes as valid UTF-8; file names in it may not be decodable."""
    return text.encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore")


def _keyed(key: bytes) -> blake2b:
    """Return a keyed MAC; copying it for each frame takes half the time of keying a new one."""
    return blake2b(digest_size=_MAC_BYTES, key=key)
