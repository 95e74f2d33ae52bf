"""Decoding of msgpack bytes into typed structs: one msgspec decoder per type and thread.

Why: msgspec learns a type when it first decodes it, and two threads that are the first to decode
types with a struct in common can meet one that is half learned: the process dies by SIGSEGV (seen
with msgspec 0.22 when two workers' first requests came at the same time).

Covers: every decoding in this room.
Does not: turn errors into ours; see rpc.errors.UNREADABLE.
Threads: any.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
_making = threading.Lock()
_msgpack_decoders: dict[type, Any] = {}
_json_decoders: dict[type, Any] = {}


def msgpack(data: bytes | memoryview, kind: type[Kind]) -> Kind:
    """Return what msgpack `data` holds, or raise one of rpc.errors.UNREADABLE.

    Args:
        data: bytes that anybody may have written.
        kind: the type that is expected.
    """
    decoder = _msgpack_decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack_decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    found: Kind = decoder.decode(data)
    return found


def json(data: bytes, kind: type[Kind]) -> Kind:
    """Return what JSON `data` holds, or raise one of rpc.errors.UNREADABLE.

    Args:
        data: bytes that anybody may have written.
        kind: the type that is expected.
    """
    decoder = _json_decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _json_decoders.setdefault(kind, msgspec.json.Decoder(kind))
    found: Kind = decoder.decode(data)
    return found
