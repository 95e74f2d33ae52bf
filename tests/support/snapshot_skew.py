"""What servers save beside their values, and how far the buckets of an asynchronous save differ."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.reader import open_shard
from ps.checkpoint.restore import read_extra
from ps.checkpoint.storage import storage_at
from ps.exactly_once import SessionRecord
from ps.manifest.manifest import Layout
from ps.server.save_restore import ShardExtra


def records_of(root: str | Path, checkpoint: Checkpoint, server: int) -> bytes:
    """What this server saved beside its values."""
    layout = Layout.whole(checkpoint.manifest)
    return read_extra(open_shard(storage_at(root), checkpoint, server, layout))


def torn_by(root: str | Path, step: int, server: int) -> int:
    """Pushes that some buckets of this server's shard hold and others do not: of its own record."""
    records = records_of(root, read_manifest(root, step), server)
    extra = msgspec.msgpack.decode(records, type=ShardExtra)
    halves = [each.applied for each in extra.sessions or () if each.applied]
    return sum(max(applied) - min(applied) for applied in halves)


def last_applied(session: SessionRecord, unit: int) -> int:
    """The session's last request that had changed this bucket or segment at the snapshot."""
    return session.applied[unit] if session.applied else session.completed
