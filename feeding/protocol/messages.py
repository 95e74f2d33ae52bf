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
No reply is held longer than the request's `hold_s`: a feeder always hears from a live worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from feeding.columnar.chunk import BAD_META, ChunkMeta, Count
from feeding.columnar.schema import Name, Schema
from feeding.errors import ChunkError

VERSION = 4
"""Of these messages and of the chunk format; a worker refuses others."""
MAX_HOLD_S = 60.0
MAX_RECALLED = 1000
"""Entries of one Recalled: a reply's meta ends at 64 KiB."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_HOLD_S)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A feeder has rows of this schema; a worker that gets none of them knows it all the same."""

    feed: Name
    schema: Schema
    version: int = VERSION
    epoch: Count = 0
    partition: Count = 0
    exactly_once: bool = False
    """Say what was accepted of this partition, and take it from this attempt only from now on."""
    attempt: Count = 0
    """Exactly once: the random number of this attempt to feed the partition."""
    greets_all: bool = False
    """The feeder sends this greeting to every worker now."""
    reopen: Count = 0
    """Take back the order to end this epoch for this round of feeding lost rows again, if its end
    was not read and the round not ended yet; 0: nothing is fed again."""


class Put(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request's payload is this chunk."""

    chunk: ChunkMeta
    attempt: Count = 0
    """Exactly once: which attempt feeds it; see Hello."""


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply when results of this session are ready or, if `room`, when the worker has room."""

    feed: Name
    hold_s: Seconds
    session: Count = 0
    room: bool = True
    drained: bool = False
    """Reply, too, when the worker has taken every row of this session."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand out the results that the last FeedStatus announced."""

    feed: Name
    session: Count


class Recall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say which rows of a partition were accepted, from entry number `start` on."""

    feed: Name
    epoch: Count
    partition: Count
    start: Count


Request = Hello | Put | Wait | Fetch | Recall


class FeedStatus(msgspec.Struct, frozen=True, array_like=True):
    """How the worker's feed stands."""

    unread_bytes: Count
    taken_bytes: Count
    """Grows whenever the trainer consumes: the sign of life that feeders look for."""
    room: bool
    draining: bool
    """The trainer wants no more rows; those that come are counted and dropped."""
    ready: bool = False
    ready_bytes: Count = 0
    answered_rows: Count = 0
    """Inference: rows of the session that have results, fetched or not."""
    session_bytes: Count = 0
    """Inference: unread bytes of the session."""
    position: Count = 0
    """Put: where the chunk's first row stands among all rows accepted of its epoch."""
    accepted: Count = 0
    """Hello: entries that Recall would get."""
    greet_all: bool = False
    """Hello: send it to every worker, so that workers without a row get the schema too; no feeder
    has done so lately."""
    ended: bool = False
    """Hello with `reopen`: the epoch's end was read, or ordered behind this round, so no row of it
    can be taken any more."""


class Results(msgspec.Struct, frozen=True, array_like=True):
    """The payload holds these results; `status` is how things are after them."""

    chunk: ChunkMeta
    status: FeedStatus


class Recalled(msgspec.Struct, frozen=True, array_like=True):
    """Rows that were accepted; see feeding.protocol.row_ranges."""

    entries: Annotated[
        tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MAX_RECALLED)
    ]


def decode_request(meta: bytes) -> Request:
    """Decode a request's meta.

    Raises:
        ChunkError: it is none; names the field.
    """
    try:
        return _REQUEST.decode(meta)
    except BAD_META as error:
        raise ChunkError(f"not a feed request: {error}") from error


def decode_status(meta: bytes) -> FeedStatus:
    """Decode a reply's meta.

    Raises:
        ChunkError: it is none.
    """
    try:
        return _STATUS.decode(meta)
    except BAD_META as error:
        raise ChunkError(f"not a feed status: {error}") from error


def decode_results(meta: bytes) -> Results:
    """Decode the meta of a reply to Fetch.

    Raises:
        ChunkError: it is none.
    """
    try:
        return _RESULTS.decode(meta)
    except BAD_META as error:
        raise ChunkError(f"not results: {error}") from error


def decode_recalled(meta: bytes) -> Recalled:
    """Decode the meta of a reply to Recall.

    Raises:
        ChunkError: it is none.
    """
    try:
        return _RECALLED.decode(meta)
    except BAD_META as error:
        raise ChunkError(f"not accepted rows: {error}") from error


_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_STATUS = msgspec.msgpack.Decoder(FeedStatus)
_RESULTS = msgspec.msgpack.Decoder(Results)
_RECALLED = msgspec.msgpack.Decoder(Recalled)
encode = msgspec.msgpack.Encoder().encode
