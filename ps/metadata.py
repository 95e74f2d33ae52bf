"""Metadata: small named values that are saved and restored together with the parameters.

    set_metadata        a client sets one: it is in every snapshot that is taken after the answer
    push(metadata=...)  it is kept at the moment at which the gradient becomes part of the
                        parameters:
                        a checkpoint has both or neither (in sync and hybrid: all of one clock)

Metadata is JSON texts by name; ps:0 keeps them all, the last one set under a name counts.

Covers: bounds, exactly-once, encoding.      Does not: choose the moment (ps.consistency.gate,
ps.checkpoint.snapshot).
Threads: the gate's lock guards a server's metadata; the functions stand alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import msgspec

from ps import codec
from ps.errors import PSSettingsError
from rpc.errors import UNREADABLE

MAX_ENTRIES = 4096
MAX_ENTRY_BYTES = 1 << 20
MAX_PUSHED_LENGTH = 32 << 10
"""Limit of metadata that comes with a push: it is in the request's meta. The position of a reader
of 1,000 pieces side by side, as sorted data may need, fits."""
MAX_ALL_BYTES = 16 << 20
"""They are held in memory, copied by every snapshot and read by any client."""
_MAX_SESSIONS = 1024

MetadataName = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._:/-]{1,200}\Z")]
REMOVED = "null"
"""The text that removes a name."""
NO_ROOM = "no_room_for"
"""Names, in the details of a refusal, the value for which others leave no room."""


class Payload(Protocol):
    """The part of rpc's Call that brings metadata."""

    payload_bytes: int

    def read_into(self, view: memoryview) -> None:
        """Read exactly the view's bytes."""


class AttachedMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata that comes with a push; `pushed` makes it."""

    name: MetadataName
    text: Annotated[str, msgspec.Meta(max_length=MAX_PUSHED_LENGTH)]


class Metadata:
    """What one server keeps.

    Args:
        is_kept: False on servers other than ps:0, which get the metadata of pushes as well.
    """

    def __init__(self, *, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self.num_changes = 0
        """Metadata set to another text than before."""
        self._texts: dict[str, str] = {}
        self._num_bytes = 0
        self._done: OrderedDict[int, int] = OrderedDict()

    def texts(self) -> dict[str, str]:
        """Return a copy: texts by name."""
        return self._texts.copy()

    def fill(self, texts: Mapping[str, str]) -> None:
        """Take over those of a checkpoint."""
        for name, text in texts.items():
            self.put(name, text)

    def check_room(self, name: str, text: str) -> None:
        """Refuse a text for which there is no room.

        Args:
            name: name of the value.
            text: its JSON; REMOVED if it will be removed.

        Raises:
            PSSettingsError: there are too many, or they are too large.
        """
        if text == REMOVED:
            return
        before = self._texts.get(name)
        if before is None and len(self._texts) >= MAX_ENTRIES:
            raise PSSettingsError(
                f"metadata {name!r} would exceed the limit of {MAX_ENTRIES} names; reuse a name, "
                "or remove some: set_metadata(name, None)",
                {NO_ROOM: name},
            )
        replaced = 0 if before is None else _size(name, before)
        total = self._num_bytes - replaced + _size(name, text)
        if total > MAX_ALL_BYTES:
            raise PSSettingsError(
                f"with {name!r} all metadata would have {total} bytes, the limit is "
                f"{MAX_ALL_BYTES}; keep large values in a file, and its path here",
                {NO_ROOM: name},
            )

    def put(self, name: str, text: str) -> None:
        """Keep a text under a name, or remove what is there.

        Args:
            name: name of the value.
            text: its JSON; REMOVED removes it.
        """
        if not self._is_kept or self._texts.get(name, REMOVED) == text:
            return
        self.num_changes += 1
        before = self._texts.pop(name, None)
        if before is not None:
            self._num_bytes -= _size(name, before)
        if text != REMOVED:
            self._texts[name] = text
            self._num_bytes += _size(name, text)

    def put_once(self, session: int, sequence: int, name: str, text: str) -> None:
        """Like `put`, unless this request of the session, or a later one, was here before.

        Args:
            session: number of the client.
            sequence: number of the request in its session.
            name: name of the value.
            text: its JSON; REMOVED removes it.

        Raises:
            PSSettingsError: see `check_room`.
        """
        if sequence <= self._done.get(session, 0):
            return
        self.check_room(name, text)
        self.put(name, text)
        self._done[session] = sequence
        self._done.move_to_end(session)
        if len(self._done) > _MAX_SESSIONS:
            self._done.popitem(last=False)


def pushed(name: str, value: Any) -> AttachedMetadata:
    """Return metadata for a push.

    Args:
        name: name of the value.
        value: anything that JSON can express.

    Raises:
        PSSettingsError: see `text_of`; or it is too long to come with a push.
    """
    text = text_of(name, value)
    if len(text) > MAX_PUSHED_LENGTH:
        raise PSSettingsError(
            f"metadata {name!r} has {len(text)} characters; metadata that comes with a push may "
            f"have {MAX_PUSHED_LENGTH}"
        )
    return AttachedMetadata(name, text)


def text_of(name: str, value: Any) -> str:
    """Return a value as JSON.

    Args:
        name: name of the value.
        value: anything that JSON can express.

    Raises:
        PSSettingsError: the name is none, JSON has no such value, or its text is too long.
    """
    try:
        msgspec.convert(name, MetadataName)
        encoded = msgspec.json.encode(value)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise PSSettingsError(f"metadata {name!r} cannot be kept: {error}") from error
    if len(encoded) > MAX_ENTRY_BYTES:
        raise PSSettingsError(
            f"metadata {name!r} has {len(encoded)} bytes, the limit is {MAX_ENTRY_BYTES}; keep "
            "large values in a file, and its path here"
        )
    return encoded.decode()


def read_text(name: str, call: Payload) -> str:
    """Return the text that a request brings.

    Args:
        name: name of the value.
        call: the request, whose payload is the text.

    Raises:
        PSSettingsError: it is too long, or no JSON.
    """
    if call.payload_bytes > MAX_ENTRY_BYTES:
        raise PSSettingsError(
            f"metadata {name!r} has {call.payload_bytes} bytes, the limit is {MAX_ENTRY_BYTES}"
        )
    data = bytearray(call.payload_bytes)
    call.read_into(memoryview(data))
    try:
        msgspec.json.decode(data)
        return data.decode()
    except UNREADABLE as error:
        raise PSSettingsError(f"metadata {name!r} is not JSON: {error}") from error


def encode(texts: Mapping[str, str]) -> bytes:
    """Return metadata as the payload of an answer."""
    return msgspec.msgpack.encode(texts)


def decode(payload: bytes | memoryview) -> dict[str, Any]:
    """Return values by name.

    Raises:
        PSSettingsError: the server sent something else.
    """
    try:
        texts = codec.msgpack(payload, dict[str, str])
        return {name: msgspec.json.decode(text) for name, text in texts.items()}
    except UNREADABLE as error:
        raise PSSettingsError(f"the server's metadata cannot be read: {error}") from error


def _size(name: str, text: str) -> int:
    """Return the bytes of an entry; names are ASCII."""
    return len(name) + (len(text) if text.isascii() else len(text.encode()))
