"""Mutual challenge-response handshake: both sides prove that they know the cluster's secret.

    server -> client   32s server nonce                      (all that an unknown peer ever gets)
    client -> server   4s "TFRH" | u8 version | u8 options | u16 body_len | body | 32s tag
    server -> client   4s "TFRH" | u8 version | u8 options | u16 body_len | body | 32s tag

    options    = 1 SHARE: this side supports shared memory (transport.shm_stream). The client
                 requests it, the server confirms what it supports too.
                 2 PAYLOAD: every byte on TCP is authenticated (transport.gmac_stream). The client
                 asks for it with integrity="payload", and with "auto" of a server on another host;
                 a server with "auto" agrees to it, one with "payload" wants it
                 4 TLS: this side uses security="tls" (transport.tls_stream); both must
                 8 HEADER: this side was given integrity="header"; both must, but for a client with
                 "auto" of the server's host, which asks for the same
    body       = msgpack array [cluster_id, role, rank, generation, nonce (32 bytes)], <= 512 bytes
    client tag = HMAC-SHA256(secret, "tfrp/client" || server nonce || client head and body)
    server tag = HMAC-SHA256(secret, "tfrp/server" || server nonce || client message
                                     || server head and body)
    frame keys = HMAC-SHA256(secret, "tfrp/key/c2s" || server nonce || both messages)
                 HMAC-SHA256(secret, "tfrp/key/s2c" || server nonce || both messages)

The labels differ per side, so a reflected message proves nothing. Every tag covers the nonces of
both sides, so a replayed message proves nothing. The server closes a refused connection without a
reason. A client of another version that has proved itself gets an answer with the server's version.

Covers: the bytes of both sides, the peer's identity, the keys of the frames.
Does not: sockets, deadlines (server.authenticator, client.connect).
Threads: pure, except for the random nonces.
Source: SKID3 (Menezes et al., Handbook of Applied Cryptography, 10.17) with HMAC-SHA256 (RFC 2104);
keys derived per direction as in HKDF-Expand (RFC 5869), with the transcript as context.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, get_args

import msgspec

from rpc.auth.certificates import TlsCredentials, data_name
from rpc.errors import UNREADABLE, AuthError, ProtocolError, RpcError, VersionMismatch
from rpc.field_texts import with_field_texts

VERSION = 1
NONCE_BYTES = 32
MAX_BODY_BYTES = 512

_MAGIC = b"TFRH"
_HEAD = struct.Struct("<4sBBH")
_TAG_BYTES = 32
_VERSION_AT = 4
_OPTIONS_AT = 5
_MAX_RANK = 2**31 - 1
_MAX_GENERATION = 2**63 - 1


class HandshakeOptions(enum.IntFlag):
    """Optional parts of the protocol that a side supports."""

    NONE = 0
    SHARE = 1
    PAYLOAD = 2
    TLS = 4
    HEADER = 8


_AGREED = HandshakeOptions.PAYLOAD | HandshakeOptions.TLS | HandshakeOptions.HEADER
"""What both sides must set alike: a side without one would weaken the other side."""

Integrity = Literal["auto", "header", "payload"]


class Role(enum.StrEnum):
    """What a process is in the cluster."""

    WORKER = "worker"
    SERVER = "server"
    FEEDER = "feeder"
    DRIVER = "driver"
    SUPERVISOR = "supervisor"


@with_field_texts
class Identity(msgspec.Struct, frozen=True):
    """Role, rank and generation of a process; trusted because the peer knows the secret.

    `generation` numbers the processes of a rank: a replacement of the same role and rank has a
    higher one.
    """

    role: Role
    rank: int
    generation: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= _MAX_RANK:
            raise ValueError(f"rank must be within 0..{_MAX_RANK}, got {self.rank}")
        if not 0 <= self.generation <= _MAX_GENERATION:
            raise ValueError(f"generation must be within 0..2**63-1, got {self.generation}")

    def __str__(self) -> str:
        return f"{self.role.value}:{self.rank}"


@with_field_texts
@dataclass(frozen=True)
class Credentials:
    """A cluster's id and its secret; `repr` never shows the secret."""

    cluster_id: str
    secret: bytes = field(repr=False)
    integrity: Integrity = "auto"
    """What is authenticated on TCP after the handshake: `header`: frames' headers and metas;
    `payload`: all bytes; `auto`: all bytes between two hosts. All processes of a cluster must be
    given the same. All bytes need the package cryptography."""
    tls: TlsCredentials | None = None
    """If set, TCP connections use TLS 1.3, the handshake included: they are encrypted, and both
    sides present a certificate of the cluster. All processes of a cluster must set it."""

    def __post_init__(self) -> None:
        if self.tls is not None:
            data_name(self.cluster_id)
            if self.integrity == "payload":
                raise ValueError(
                    "integrity='payload' and TLS authenticate every byte twice; leave integrity "
                    "at 'auto' with TLS"
                )
        if self.integrity not in get_args(Integrity):
            raise ValueError(
                f"integrity must be 'auto', 'header' or 'payload', got {self.integrity!r}"
            )
        if self.integrity == "payload" and find_spec("cryptography") is None:
            raise ValueError("integrity='payload' needs the package cryptography; install it")
        if not 1 <= len(self.cluster_id.encode()) <= 128:
            raise ValueError("cluster_id must have 1 to 128 bytes; use Credentials.generate()")
        if not 16 <= len(self.secret) <= 1024:
            raise ValueError(
                f"a secret has 16 to 1024 bytes, got {len(self.secret)}; use Credentials.generate()"
            )

    @classmethod
    def generate(cls) -> Credentials:
        """Return a fresh cluster id and a fresh 256-bit secret."""
        return cls(cluster_id=secrets.token_hex(8), secret=secrets.token_bytes(32))

    def asked(self, *, is_remote: bool) -> HandshakeOptions:
        """Return what a client must agree on with its server.

        Args:
            is_remote: whether the server is on another host.

        Raises:
            AuthError: "auto" needs the package cryptography, and it is not installed.
        """
        if self.tls is not None:
            return HandshakeOptions.TLS
        if self.integrity == "header":
            return HandshakeOptions.HEADER
        if self.integrity == "auto" and not is_remote:
            return HandshakeOptions.NONE
        if find_spec("cryptography") is None:
            raise AuthError(
                "integrity='auto' authenticates every byte between two hosts, which needs the "
                "package cryptography; install it, or set integrity='header' on all processes"
            )
        return HandshakeOptions.PAYLOAD

    def accepted(self, asked: int) -> HandshakeOptions:
        """Return what a server must agree on with a client that asks for these options."""
        if self.integrity == "auto" and self.tls is None and find_spec("cryptography") is not None:
            return HandshakeOptions(asked & HandshakeOptions.PAYLOAD)
        if self.integrity == "header" and self.tls is None and not asked & _AGREED:
            return HandshakeOptions.NONE  # the client has "auto", and is on this host
        return self.asked(is_remote=False)

    @property
    def short_id(self) -> str:
        """First characters of the cluster id, for messages."""
        return self.cluster_id if len(self.cluster_id) <= 4 else f"{self.cluster_id[:4]}…"


@dataclass(frozen=True, slots=True)
class Session:
    """Result of a handshake: the peer's identity and the 32-byte MAC key of each direction."""

    peer: Identity
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    options: HandshakeOptions = HandshakeOptions.NONE
    """HandshakeOptions that both sides use."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    cluster_id: str
    role: Role
    rank: int
    generation: int
    nonce: bytes


_body_decoder = msgspec.msgpack.Decoder(_Body)


class ServerHandshake:
    """Server's side: send `greeting`, then feed `wanted` bytes each time until `session` is set.

    Args:
        identity: this process.
        credentials: the cluster's secret.
        options: what this side supports beyond what the credentials say.
        check_peer: raises AuthError if the client's certificate is for another identity.
        nonces: 64 bytes, for tests; None draws them.
    """

    def __init__(
        self,
        identity: Identity,
        credentials: Credentials,
        *,
        options: HandshakeOptions = HandshakeOptions.NONE,
        check_peer: Callable[[Identity], None] | None = None,
        nonces: bytes | None = None,
    ) -> None:
        drawn = nonces if nonces is not None else secrets.token_bytes(2 * NONCE_BYTES)
        self.greeting = drawn[:NONCE_BYTES]
        self.session: Session | None = None
        self.wanted = _HEAD.size
        self.refusal: RpcError | None = None
        """Why a peer that proved itself cannot be served; send the answer, then close."""
        self._own_nonce = drawn[NONCE_BYTES:]
        self._check_peer = check_peer
        self._options = options
        self._identity = identity
        self._credentials = credentials
        self._head = b""

    def feed(self, data: bytes) -> bytes:
        """Take `wanted` bytes; return what to send.

        Raises:
            AuthError: the peer did not prove that it knows the secret, or its certificate is for
                another role or rank. Send nothing, close.
        """
        # First the fixed head: it says how long the body is, and bounds what is read for it.
        if not self._head:
            self.wanted = _body_and_tag_bytes(data)
            self._head = data
            return b""
        self.wanted = 0
        message = self._head + data
        # The tag before everything else: no field of an unproven message is looked at.
        _check_tag(self._credentials, b"tfrp/client" + self.greeting, message)
        required = self._credentials.accepted(message[_OPTIONS_AT])
        options = (self._options & message[_OPTIONS_AT]) | required
        answer_head_body = _pack(self._credentials, self._identity, self._own_nonce, options)
        tag = _tag(self._credentials, b"tfrp/server" + self.greeting + message, answer_head_body)
        answer = answer_head_body + tag
        peer_version = message[_VERSION_AT]
        # The answer goes out although the client is refused: it knows the secret, and learns from
        # the answer which version or setting differs.
        if peer_version != VERSION:
            self.refusal = VersionMismatch(_version_text("client", peer_version))
            return answer
        if message[_OPTIONS_AT] & _AGREED != required:
            self.refusal = AuthError(_settings_text("client", message, required))
            return answer
        peer = _peer(self._credentials, message)
        if self._check_peer is not None:
            self._check_peer(peer)
        client_key, server_key = _keys(self._credentials, self.greeting + message + answer)
        self.session = Session(peer, server_key, client_key, options)
        return answer


class ClientHandshake:
    """Client's side: feed `wanted` bytes, send what comes back, until `session` is set.

    Args:
        identity: this process.
        credentials: the cluster's secret.
        options: what this side requests beyond what the credentials say.
        is_remote: whether the server is on another host.
        nonce: 32 bytes, for tests; None draws them.

    Raises:
        AuthError: see Credentials.asked.
    """

    def __init__(
        self,
        identity: Identity,
        credentials: Credentials,
        *,
        options: HandshakeOptions = HandshakeOptions.NONE,
        is_remote: bool = False,
        nonce: bytes | None = None,
    ) -> None:
        self.session: Session | None = None
        self.wanted = NONCE_BYTES
        self._nonce = nonce if nonce is not None else secrets.token_bytes(NONCE_BYTES)
        self._asked = credentials.asked(is_remote=is_remote)
        self._options = options | self._asked
        self._identity = identity
        self._credentials = credentials
        self._greeting = b""
        self._message = b""
        self._head = b""

    @property
    def proof_sent(self) -> bool:
        """Whether the end of the connection now means that the proof was refused."""
        return bool(self._message)

    def feed(self, data: bytes) -> bytes:
        """Take `wanted` bytes; return what to send.

        Raises:
            AuthError: the server did not prove that it knows the secret.
            VersionMismatch: it did, and speaks another version.
        """
        # The server speaks first: its nonce has to be in the client's tag.
        if not self._message:
            self._greeting = data
            head_body = _pack(self._credentials, self._identity, self._nonce, self._options)
            tag = _tag(self._credentials, b"tfrp/client" + data, head_body)
            self._message = head_body + tag
            self.wanted = _HEAD.size
            return self._message
        if not self._head:
            self.wanted = _body_and_tag_bytes(data)
            self._head = data
            return b""
        self.wanted = 0
        answer = self._head + data
        label = b"tfrp/server" + self._greeting + self._message
        _check_tag(self._credentials, label, answer)
        peer_version = answer[_VERSION_AT]
        if peer_version != VERSION:
            raise VersionMismatch(_version_text("server", peer_version))
        if answer[_OPTIONS_AT] & _AGREED != self._asked:
            raise AuthError(_settings_text("server", answer, self._asked))
        # A server may drop an option that was requested, never add one.
        if answer[_OPTIONS_AT] & ~self._options:
            raise ProtocolError(f"the server added options of its own: {answer[_OPTIONS_AT]:#x}")
        peer = _peer(self._credentials, answer)
        client_key, server_key = _keys(self._credentials, self._greeting + self._message + answer)
        options = HandshakeOptions(answer[_OPTIONS_AT])
        self.session = Session(peer, client_key, server_key, options)
        return b""


def mismatch_text(credentials: Credentials) -> str:
    """Return the error text of a client whose proof was refused."""
    return (
        f"token does not match cluster {credentials.short_id}"
        " (is an old cluster still running on this port?)"
    )


def _pack(
    credentials: Credentials, identity: Identity, nonce: bytes, options: HandshakeOptions
) -> bytes:
    body = msgspec.msgpack.encode(
        _Body(credentials.cluster_id, identity.role, identity.rank, identity.generation, nonce)
    )
    return _HEAD.pack(_MAGIC, VERSION, options, len(body)) + body


def _body_and_tag_bytes(head: bytes) -> int:
    magic, _, _, body_len = _HEAD.unpack(head)
    if magic != _MAGIC or body_len > MAX_BODY_BYTES:
        raise AuthError("the peer does not speak this protocol")
    return int(body_len) + _TAG_BYTES


def _check_tag(credentials: Credentials, label: bytes, message: bytes) -> None:
    head_body, tag = message[:-_TAG_BYTES], message[-_TAG_BYTES:]
    if not hmac.compare_digest(_tag(credentials, label, head_body), tag):
        raise AuthError(mismatch_text(credentials))


def _peer(credentials: Credentials, message: bytes) -> Identity:
    try:
        body = _body_decoder.decode(message[_HEAD.size : -_TAG_BYTES])
        peer = Identity(body.role, body.rank, body.generation)
    except (*UNREADABLE, ValueError) as error:
        raise AuthError(f"the peer's handshake body is malformed: {error}") from error
    if body.cluster_id != credentials.cluster_id:
        raise AuthError(mismatch_text(credentials))
    if len(body.nonce) != NONCE_BYTES:
        raise AuthError(f"the peer's nonce has {len(body.nonce)} bytes, not {NONCE_BYTES}")
    return peer


def _tag(credentials: Credentials, label: bytes, head_body: bytes) -> bytes:
    return hmac.digest(credentials.secret, label + head_body, hashlib.sha256)


def _keys(credentials: Credentials, transcript: bytes) -> tuple[bytes, bytes]:
    secret = credentials.secret
    return (
        hmac.digest(secret, b"tfrp/key/c2s" + transcript, hashlib.sha256),
        hmac.digest(secret, b"tfrp/key/s2c" + transcript, hashlib.sha256),
    )


def _settings_text(peer: str, message: bytes, ours: HandshakeOptions) -> str:
    theirs = HandshakeOptions(message[_OPTIONS_AT])
    return (
        f"the {peer} wants {_settings(theirs)}, this side {_settings(ours)}; give all processes of "
        "the cluster the same"
    )


def _settings(options: HandshakeOptions) -> str:
    if options & HandshakeOptions.TLS:
        return "security='tls'"
    if options & HandshakeOptions.PAYLOAD:
        return "integrity='payload' (or 'auto' between two hosts), security='hmac'"
    if options & HandshakeOptions.HEADER:
        return "integrity='header', security='hmac'"
    return "integrity='auto' within one host, security='hmac'"


def _version_text(peer: str, peer_version: int) -> str:
    return (
        f"{peer} speaks rpc version {peer_version}, this side {VERSION};"
        " install the same release of tfos on all nodes"
    )
