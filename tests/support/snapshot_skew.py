"""How far the buckets of an asynchronous save are apart."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ps.checkpoint.reader import read_manifest
from ps.checkpoint.restore import read_extra
from ps.exactly_once import SessionRecord
from ps.server.save_restore import ShardExtra


def torn_by(root: str | Path, step: int, server: int) -> int:
    """Pushes that some buckets of this server's shard hold and others do not: of its own record."""
    extra = msgspec.msgpack.decode(
        read_extra(root, read_manifest(root, step), server), type=ShardExtra
    )
    halves = [each.applied for each in extra.sessions or () if each.applied]
    return sum(max(applied) - min(applied) for applied in halves)


def last_applied(session: SessionRecord, unit: int) -> int:
    """The session's last request that had changed this bucket or segment at the snapshot."""
    return session.applied[unit] if session.applied else session.completed
