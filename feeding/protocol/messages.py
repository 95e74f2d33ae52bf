"""Feed messages: typed metas of the RPC calls between feeders and workers.

Covers: requests, replies, their codecs.
Does not: send or decide anything.
Threads: any; frozen data.

    Hello   a greeting: what will be fed                         -> FeedStatus, at once
    Put     one chunk as payload                                 -> FeedStatus, at once: accepted
    Wait    the last FeedStatus had no room, or results are due  -> FeedStatus, when that changes
    Fetch   inference: the results that a FeedStatus announced   -> Results, with `ready_bytes`
    Recall  exactly once: what a FeedStatus said was accepted    -> Recalled
A connection begins with a Hello and carries the partitions of one feed, one after the other. A
feeder sends another Hello where the last status is old, and to claim a partition.
A feeder sends no Put while the last FeedStatus says that there is no room: that is the
back-pressure.
No reply is held longer than the request's `hold_s`: a live worker always answers in time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from feeding.columnar.chunk import ChunkMeta, Count
from feeding.columnar.schema import Name
from feeding.errors import ChunkError
from rpc.errors import UNREADABLE
from rpc.limits import Limits

VERSION = 1
"""Version of these messages and of the chunk format; a worker refuses others."""
MAX_HOLD_S = 60.0
LIMITS = Limits(max_meta_bytes=1 << 20)
"""Limits of connections between feeders and workers: a chunk's meta holds a schema."""
MAX_RECALLED = 1000
"""Entries of one Recalled, so that its meta is small."""
_ONE_VERSION = "install one version of tfos on all executors"
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_HOLD_S)]
Meta = TypeVar("Meta")


class _HelloHead(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """What a Hello of every version begins with, so that each can tell another."""

    version: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """A feeder asks for the state of a feed, and may claim a partition or reopen an epoch."""

    version: int = VERSION
    """Version of the protocol, always the first field; see decode_request."""
    feed: Name
    epoch: Count = 0
    partition: Count = 0
    exactly_once: bool = False
    """Report the accepted rows of this partition, and accept it from this attempt only."""
    attempt: Count = 0
    """Random number of this attempt to feed the partition, with exactly_once."""
    reopen: Count = 0
    """Reopen this epoch for this round of feeding lost rows again, unless its end was read or the
    round is over; 0: nothing is fed again."""


class Put(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request's payload is this chunk."""

    chunk: ChunkMeta
    attempt: Count = 0
    """The attempt that feeds the chunk, with exactly_once; see Hello."""


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply when results of this session are ready or, if `room`, when the worker has room."""

    feed: Name
    hold_s: Seconds
    session: Count = 0
    room: bool = True
    drained: bool = False
    """Reply also when the consumer has read every row of this session."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send the results that the last FeedStatus announced."""

    feed: Name
    session: Count


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report the accepted rows of a partition, from entry number `start` on."""

    feed: Name
    epoch: Count
    partition: Count
    start: Count


Request = Hello | Put | Wait | Fetch | Recall


class FeedStatus(msgspec.Struct, frozen=True, array_like=True):
    """State of the worker's feed."""

    unread_bytes: Count
    taken_bytes: Count
    """Grows whenever the trainer reads rows: feeders use it to detect progress."""
    room: bool
    draining: bool
    """The trainer has stopped reading; rows that arrive are counted and dropped."""
    ready: bool = False
    ready_bytes: Count = 0
    answered_rows: Count = 0
    """Inference: rows of the session that have results, fetched or not."""
    session_bytes: Count = 0
    """Inference: unread bytes of the session."""
    position: Count = 0
    """Put: position of the chunk's first row among all accepted rows of its epoch."""
    accepted: Count = 0
    """Hello: number of entries for Recall."""
    ended: bool = False
    """Hello with `reopen`: the epoch's end was read, or ordered after this round, so the worker
    refuses its rows."""


class Results(msgspec.Struct, frozen=True, array_like=True):
    """The payload holds these results; `status` is the state after them."""

    chunk: ChunkMeta
    status: FeedStatus


class Recalled(msgspec.Struct, frozen=True, array_like=True):
    """Rows that were accepted; see feeding.protocol.row_ranges."""

    entries: Annotated[
        tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MAX_RECALLED)
    ]


def check_version(version: int) -> None:
    """Refuse a feeder of another version.

    Args:
        version: version of its Hello.

    Raises:
        ChunkError: it is not VERSION.
    """
    if version != VERSION:
        raise ChunkError(
            f"this worker speaks chunk version {VERSION}, this feeder {version}; {_ONE_VERSION}"
        )


def decode_request(meta: bytes) -> Request:
    """Decode the meta of a request; a Hello that decodes may be of another version.

    Raises:
        ChunkError: the meta is of no request of this version; names the field, or both versions.
    """
    try:
        return _REQUEST.decode(meta)
    except UNREADABLE as error:
        with suppress(*UNREADABLE):
            check_version(_HELLO_HEAD.decode(meta).version)
        raise ChunkError(f"not a feed request: {error}; {_ONE_VERSION}") from error


def _decoding(decoder: msgspec.msgpack.Decoder[Meta], what: str) -> Callable[[bytes], Meta]:
    """Return a function that decodes the meta of one kind of message.

    Args:
        decoder: decoder of the kind.
        what: it is, for the error.

    Raises:
        ChunkError: (the returned function) the meta is of no such message; names the field.
    """

    def decode(meta: bytes) -> Meta:
        try:
            return decoder.decode(meta)
        except UNREADABLE as error:
            raise ChunkError(f"not {what}: {error}") from error

    return decode


_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_HELLO_HEAD = msgspec.msgpack.Decoder(_HelloHead)
decode_status = _decoding(msgspec.msgpack.Decoder(FeedStatus), "a feed status")
decode_results = _decoding(msgspec.msgpack.Decoder(Results), "results")
decode_recalled = _decoding(msgspec.msgpack.Decoder(Recalled), "accepted rows")
encode = msgspec.msgpack.Encoder().encode
