"""Messages: every request to a parameter server and every reply, as typed structs.

Covers: the structs of a frame's meta (msgpack), their bounded field types, the payload of each.
Does not: transport (rpc), decisions (ps.consistency.modes, ps.exactly_once), execution
(ps.server.handlers). Pure; no threads.

    request        payload                          reply          payload
    Describe                                        Description
    FetchManifest                                   Description    the manifest's canonical bytes
    Compile        manifest                         Compiled
    Seed           manifest, then values            Description
    Pull                                            Ack            values
    PullFrozen                                      Ack            values of the frozen groups
    Push           gradient, none if `null`         Ack            fresh values if `pull`
      with tables  counts, ids; gradient; rows'     Ack            fresh values if `pull`; rows
    Settle         squares of all servers, or none  Ack            fresh values if `pull`
    Assign         values                           Ack
    Lookup         counts, ids                      Ack            values of the rows
    LookupBatch    counts, ids                      Ack            values of the rows
    PushRows       counts, ids, gradients           Ack
    Scan                                            Scanned        ids, rows
    LoadRows       counts, ids, rows                RowsLoaded
    Join, Leave, Finish                             Ack
    JoinRendezvous the value                        RendezvousValues  the values, as in `ranks`
    BringAnswers   index, values: ps.protocol.passed Description
    SetMetadata    the value's JSON                 Description
    FetchMetadata                                   Description    all metadata, ps.metadata.encode
    TakeSnapshot                                    SnapshotMade
    Save                                            Saved
    Restore        manifest                         Description
    FetchStats                                      Description    ServerStats, msgpack
    Fence, Lose, StopServer                         Description

Of a Push `tables` says whose ids come first: of the tables that it brings gradients of rows for,
then of those that it asks for rows of. The rows' gradients come behind the groups', and the rows
behind the values.

"Values" and "gradient" are the bytes of the server's own buckets, ascending, without padding; in
groups with compression a gradient's buckets are packed as ps.compression.format says. Where
several servers clip by norm (ps.server.reduction), a push with `pull` is answered with this
server's squares instead, float64 little-endian, and Settle brings their sum.
`number` makes a changing request unique; see ps.exactly_once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from ps import codec
from ps.checkpoint.format import ShardRecord
from ps.errors import PSSettingsError
from ps.exactly_once import MAX_SEQUENCE
from ps.manifest.limits import MAX_NAME_LENGTH
from ps.manifest.manifest import MAX_LAG, MAX_PERMITS, Hyper
from ps.manifest.table_spec import MAX_SEGMENTS, MAX_TABLES
from ps.metadata import AttachedMetadata, MetadataName
from rpc.errors import UNREADABLE
from rpc.field_texts import with_field_texts

MAX_KEY_LENGTH = 256
MAX_OPEN_BYTES = 64 << 20
MAX_VALUE_BYTES = 1 << 20
"""One worker's value at a rendezvous: metrics and decisions of one epoch are a few hundred bytes;
this leaves room without a risk."""
MAX_INDEX_BYTES = 16 << 20
MAX_RANK = 1 << 20
MAX_META_BYTES = 2 * MAX_TABLES * MAX_NAME_LENGTH
"""Most of it are a push's step scalars, by the names of its tables (Hyper.scalars)."""
MAX_MANIFEST_BYTES = 16 << 20
"""100,000 parameters with names of 150 characters."""
MAX_STAGED_BYTES = 1 << 30
"""Gradients of rows that one push may leave at a server until its clock: 16 million rows of 16
float32."""
MAX_WAIT_S = 86_400.0
MAX_PATH_LENGTH = 4096
MAX_REASON_LENGTH = 1024

Sequence = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCE)]
Session = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
GenerationNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
RendezvousKey = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_LENGTH)]
Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
Digest = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
SaveId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z-]{1,64}\Z")]
TableNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TABLES)]
TableNumbers = Annotated[tuple[TableNumber, ...], msgspec.Meta(max_length=MAX_TABLES)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_LENGTH)]
DirectoryName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]


class Number(msgspec.Struct, frozen=True, array_like=True):
    """What makes a changing request of one worker unique; see ps.exactly_once."""

    session: Session
    sequence: Sequence
    acknowledged: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """The last of this session's requests that this server has answered with success."""
    acked_clock: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """The worker's newest clock in this server's answers, also in refusals of gradients. In sync a
    push is for the clock after it; a restored server learns by it how far it was."""
    acked_updates: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """How many of those requests have changed parameters; what a restored server lacks is lost."""

    @property
    def acked(self) -> tuple[int, int, int]:
        """What the session has acks of; see ps.consistency.gate.Gate.begin."""
        return self.acknowledged, self.acked_clock, self.acked_updates


class BatchName(msgspec.Struct, frozen=True, array_like=True):
    """A batch whose rows were looked up to train on: the number of that lookup."""

    session: Session
    sequence: Sequence


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Ask for phase and clock; answered when the shard is SERVING, at the latest after `wait_s`."""

    wait_s: Seconds = 0.0


class FetchManifest(msgspec.Struct, frozen=True, tag="manifest"):
    """Ask for the manifest of a seeded shard."""


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Have a server compile the kernels of a manifest before it is seeded; the payload is that.

    Answered when they are there, at the latest after `wait_s`: then it goes on, and is asked again.
    """

    manifest_hash: Digest
    manifest_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MANIFEST_BYTES)]
    wait_s: Seconds = 0.0


class Seed(msgspec.Struct, frozen=True, tag="seed"):
    """Give an EMPTY shard its manifest and first values; a SERVING one keeps what it has.

    The payload is the manifest, then the values of this server's frozen buckets, then those of the
    others. A shard that was restored from a checkpoint without frozen groups takes these.
    """

    manifest_hash: Digest
    manifest_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MANIFEST_BYTES)]
    seed_id: Session = 0
    """Names this call of the chief at all servers."""
    replaces: Session = 0
    """The seed whose values give way to these: not all servers have it, so nobody has used them."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Ask for the newest values."""

    manifest_hash: Digest
    averages: bool = False
    """Whether to answer with the moving averages instead, if the group's rule keeps them."""


class PullFrozen(msgspec.Struct, frozen=True, tag="pull_frozen"):
    """Ask for the values of the frozen groups."""

    frozen_hash: Digest


OpenNumbers = Annotated[tuple[Sequence, ...], msgspec.Meta(max_length=MAX_PERMITS + 1)]
"""Numbers of a client's batches that are under way; see ps.consistency.hybrid."""


class RowExchange(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one push: gradients that it brings, and rows that it asks for.

    The payload begins with int64 [ids here, ids that they stand for] for each of `pushed`, then of
    `wanted`, and the ids of each in the same order, int64, arranged as ps.tables.routing says.
    """

    pushed: TableNumbers = ()
    wanted: TableNumbers = ()
    """Tables whose rows come back as they are when the push is answered."""
    batch: BatchName | None = None
    """hybrid: what the pushed rows were looked up for; over with this push."""
    next_batch: BatchName | None = None
    """hybrid: the batch that the rows which are asked for begin."""
    still_open: OpenNumbers = ()
    """hybrid: of the client's batches, the next one included."""


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Bring a gradient; `wait_s` bounds the wait for other workers (sync, ssp)."""

    manifest_hash: Digest
    number: Number
    rows: Rows
    hyper: Hyper | None = None
    pull: bool = False
    null: bool = False
    wait_s: Seconds = 0.0
    lag: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAG)] = 0
    """The worker's own last pushes that its parameters did not contain; see
    ps.consistency.staleness."""
    metadata: AttachedMetadata | None = msgspec.field(default=None, name="note")
    """Metadata to keep with the gradient: a checkpoint has both, or neither."""
    tables: RowExchange | msgspec.UnsetType = msgspec.UNSET
    """Left out on the wire by a push without rows."""


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Ask for the rows of ids, of any number of tables.

    The payload is, for each of `tables`, int64 [ids here, ids that they stand for], then the ids of
    each, int64, arranged as ps.tables.routing says. The reply has the values in the same order.
    """

    manifest_hash: Digest
    tables: TableNumbers
    training: bool = True
    """False: an id without a row reads as its table's `unseen`."""


class LookupBatch(msgspec.Struct, frozen=True, tag="lookup_batch"):
    """Like Lookup, for rows that will be trained; hybrid answers when there is a permit."""

    manifest_hash: Digest
    number: Number
    """Names the batch, by a number that is the same at all servers."""
    tables: TableNumbers
    still_open: OpenNumbers = ()
    """This one included."""
    wait_s: Seconds = 0.0


class PushRows(msgspec.Struct, frozen=True, tag="push_rows"):
    """Bring gradients for rows: the payload as in Lookup, then the gradients in the same order."""

    manifest_hash: Digest
    number: Number
    hyper: Hyper
    tables: TableNumbers
    batch: BatchName | None = None
    """What the rows were looked up for; over with this push, also with one of no tables."""


class Scan(msgspec.Struct, frozen=True, tag="scan"):
    """Ask for rows of one segment of a table, from the last one down, without changing anything."""

    manifest_hash: Digest
    table: TableNumber
    segment: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEGMENTS)]
    stop: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
    """Row number to go on below; the greatest number to begin with."""
    with_slots: bool = False


class LoadRows(msgspec.Struct, frozen=True, tag="load_rows"):
    """Bring rows: the payload as in Lookup for one table, then the rows in the same order.

    An id that has a row keeps it, so a repeated request changes nothing more.
    """

    manifest_hash: Digest
    table: TableNumber


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Apply the reduced gradient of `clock`, clipped by the squares; without payload drop it.

    No gradient is of clock 0: a worker whose push was late there only asks for values.
    """

    manifest_hash: Digest
    number: Number
    clock: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
    pull: bool = False


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    """Replace the values; optimizer slots stay."""

    manifest_hash: Digest
    number: Number


class Join(msgspec.Struct, frozen=True, tag="join"):
    """This worker will push from now on."""

    number: Number
    at_least: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """ssp: the clock that it has at another server already."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """This worker will not push until it joins again."""

    number: Number


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """This worker is done for good."""

    number: Number


class JoinRendezvous(msgspec.Struct, frozen=True, tag="meet"):
    """Bring the payload under `key` and wait for everybody's."""

    key: RendezvousKey
    wait_s: Seconds


class BringAnswers(msgspec.Struct, frozen=True, tag="met"):
    """Bring the answers of rendezvous that this worker has passed; the payload has them.

    The first request of each connection to ps:0, which may be another process than it was.
    """

    index_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_INDEX_BYTES)]


class SetMetadata(msgspec.Struct, frozen=True, tag="set_note"):
    """Keep the payload, a JSON text, under a name, instead of what was there; ps:0 only."""

    number: Number
    """Number in a sequence of its own; see ps.metadata."""
    name: MetadataName


class FetchMetadata(msgspec.Struct, frozen=True, tag="notes"):
    """Ask for all metadata; an EMPTY shard has none."""


class TakeSnapshot(msgspec.Struct, frozen=True, tag="cut"):
    """Keep the shard for this save as it is now, or will be at `clock`; training goes on."""

    save_id: SaveId
    base: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z-]{0,64}\Z")] = ""
    """The save that this one adds to: buckets that it holds unchanged are left out."""
    clock: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] | None = None
    """Clock of the snapshot; None: now."""
    wait_s: Seconds = 0.0
    """Seconds to wait for that clock, or for a clipped push that is between its two rounds."""
    as_it_is: bool = False
    """Wait for no round: nobody is left who would bring it."""


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write the snapshot as a part of its save; the client commits when all servers have."""

    directory: DirectoryName
    save_id: SaveId
    wait_s: Seconds = 0.0
    """Seconds to wait for another save that is being written."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Fill an EMPTY shard from the checkpoint; the payload says for which manifest."""

    directory: DirectoryName
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
    manifest_hash: Digest
    manifest_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MANIFEST_BYTES)]
    reset_optimizer: bool = False
    """Take the values only; the optimizer starts from its initial state."""


class FetchStats(msgspec.Struct, frozen=True, tag="stats"):
    """Ask for the counters."""


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """Refuse all generations of the worker below this one."""

    worker: Rank
    generation: GenerationNumber


class Lose(msgspec.Struct, frozen=True, tag="worker_lost"):
    """This generation of the worker (None: the newest known) is gone: fence it, wait no longer."""

    worker: Rank
    generation: GenerationNumber | None = None


class StopServer(msgspec.Struct, frozen=True, tag="stop"):
    """Drain and close the shard."""

    reason: Reason = ""


Changing = Push | Settle | LookupBatch | PushRows | Assign | Join | Leave | Finish
Request = (
    Describe
    | FetchManifest
    | Compile
    | Seed
    | Pull
    | PullFrozen
    | Push
    | Settle
    | Lookup
    | LookupBatch
    | PushRows
    | Scan
    | LoadRows
    | Assign
    | Join
    | Leave
    | Finish
    | JoinRendezvous
    | BringAnswers
    | SetMetadata
    | FetchMetadata
    | TakeSnapshot
    | Save
    | Restore
    | FetchStats
    | Fence
    | Lose
    | StopServer
)


@with_field_texts
class Description(msgspec.Struct, frozen=True):
    """One server as it is now."""

    server: int
    num_servers: int
    num_workers: int
    phase: str
    manifest_hash: str = ""
    clock: int = 0
    num_buckets: int = 0
    reason: str = ""
    """Why the shard has FAILED or stopped; empty otherwise."""
    saved_as: tuple[str, ...] = ()
    """Ids of saves that hold the shard as it is now; in the answer to Describe."""
    seed_id: int = 0
    """The seed that has brought the first values; 0: there are none, or a checkpoint's."""


class Compiled(msgspec.Struct, frozen=True):
    """How far a server is with the kernels of a manifest."""

    took_s: float = 0.0
    """Seconds for which it has compiled so far; 0: all are there."""


@with_field_texts
class Ack(msgspec.Struct, frozen=True):
    """A request that is done."""

    clock: int
    """Updates of the parameters so far: pushes (async, ssp) or barriers (sync)."""
    applied: bool = False
    """Whether the gradient is part of the parameters; true for a repeated push, false for null.
    Of a refused one in two rounds: whether it is once those are over, if any is."""
    staleness: int = 0
    """Updates by others between this worker's last pull and this push."""
    has_squares: bool = False
    """Whether the payload is the squares of a reduced gradient that waits for Settle."""
    worker_clock: int = 0
    """The worker's clock, for pushes and memberships: its own in ssp, elsewhere `clock`."""
    is_late: bool = False
    """Whether the clock of a two-round push is past or undone here, and the push is unknown."""
    refusal: bytes = b""
    """The error's body (rpc.wire.frame) of a two-round push that counts as present."""


WORKER_CLOCK = "worker_clock"
"""The same, as a detail of the error that refuses a gradient: the push is part of a clock."""


class Scanned(msgspec.Struct, frozen=True):
    """Rows of a segment; the payload holds their ids, int64, then the rows."""

    num_rows: int
    stop: int
    """Where to continue; 0: the segment has no more rows."""
    num_segments: int
    """Number of the table's segments at this server."""
    start: int
    """The server's start, as in ServerStats: after another one the rows are in other places."""


class RowsLoaded(msgspec.Struct, frozen=True):
    """Rows are in the table."""

    num_added: int
    """Rows that this request has created; the other ids had one."""


class RendezvousValues(msgspec.Struct, frozen=True):
    """A rendezvous that is complete; the payload holds the values one after the other."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]

    def values(self, payload: memoryview) -> dict[int, bytes]:
        """Return what each rank brought."""
        found: dict[int, bytes] = {}
        start = 0
        for rank, size in zip(self.ranks, self.sizes, strict=True):
            found[rank] = bytes(payload[start : start + size])
            start += size
        return found


class SnapshotMade(msgspec.Struct, frozen=True):
    """What came of a snapshot."""

    clock: int
    """Clock of the snapshot, or of the shard if no snapshot was made."""
    is_made: bool
    """False: that clock is past, or it did not come in time."""


class Saved(msgspec.Struct, frozen=True):
    """A shard that is written but not committed."""

    shard: ShardRecord
    clock: int
    passed_over: tuple[int, ...] = ()
    """Steps that this server has left aside when it was restored from an older one."""
    frozen_hash: str = ""
    """Hash from the manifest that the shard was written by; see Manifest.frozen_hash."""
    limits_hash: str = ""
    """The same of the tables' limits; see Manifest.limits_hash."""


_Reply = TypeVar("_Reply")
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
"""Returns the meta bytes of a request or reply."""


def is_update(request: Request) -> bool:
    """Whether a request changes parameters once it is acknowledged."""
    if isinstance(request, Push):
        return not request.null
    return isinstance(request, Assign) or (isinstance(request, PushRows) and bool(request.tables))


def decode_request(meta: bytes) -> Request:
    """Return the request in a frame's meta.

    Raises:
        PSSettingsError: not a request that this version knows; the message names the field.
    """
    try:
        return _request_decoder.decode(meta)
    except UNREADABLE as error:
        raise PSSettingsError(f"not a request that this server knows: {error}") from error


def decode_reply(meta: bytes | memoryview, reply: type[_Reply]) -> _Reply:
    """Return the reply in a frame's meta, or the statistics in its payload.

    Args:
        meta: the encoded reply.
        reply: the type that is expected.

    Raises:
        PSSettingsError: the server sent something else; client and server differ in version.
    """
    try:
        return codec.msgpack(meta, reply)
    except UNREADABLE as error:
        raise PSSettingsError(f"the server's answer is no {reply.__name__}: {error}") from error
