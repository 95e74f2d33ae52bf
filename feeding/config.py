"""Feed settings: FeedConfig, validated once on the driver.

Covers: the only settings of a feed; the check of whole numbers that all settings of the
room share. Settings of file access are in filesystem.config.
Threads: any; frozen data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from feeding.errors import FeedSettingsError
from rpc.field_texts import with_field_texts

MIB = 1 << 20


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse a setting that is no int, or too small.

    Args:
        name: the user's name of it.
        value: as the user gave it.
        least: smallest number allowed.

    Raises:
        FeedSettingsError: says what it must be.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FeedSettingsError(f"{name} must be an int >= {least}, got {value!r}")


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """Settings of the feed from Spark tasks to workers."""

    chunk_rows: int = 256
    """Most rows in a chunk. Larger: less overhead per row. Smaller: rows spread more evenly over
    the workers. Measured: 256 costs a feeder 5.9 µs per row of 784 numbers, 32 costs 9.5 and 1024
    5.4; narrow rows (39 numbers) 1.6, 4.8 and 1.0."""

    chunk_bytes: int = MIB
    """Target size of a chunk in bytes; a chunk of wide rows has fewer rows, down to one."""

    max_chunk_bytes: int = 256 * MIB
    """A worker refuses larger chunks before it allocates anything, so this bounds one row."""

    max_inflight_bytes: int = 64 * MIB
    """Back-pressure per worker: feeders wait while more bytes are unread. A worker holds at most
    this plus one chunk per feeder."""

    feed_timeout_s: float = 600.0
    """A feeder fails when no worker consumes anything for this long. Raise it for slow steps."""

    starve_timeout_s: float = 259_200.0
    """A consumer fails when it gets nothing for this long: the last resort, three days. The workers
    of a cluster wait without it: their supervisor ends them once no driver is left. A stopping
    cluster ends the wait at once."""

    connect_timeout_s: float = 10.0
    """Timeout for connecting to a worker and for its first answer."""

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "chunk_bytes", "max_chunk_bytes", "max_inflight_bytes"):
            check_count(name, getattr(self, name))
        for name in ("feed_timeout_s", "starve_timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise FeedSettingsError(f"{name} must be a number of seconds, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise FeedSettingsError(f"{name} must be finite and > 0, got {value!r}")
        if self.chunk_bytes > self.max_chunk_bytes:
            raise FeedSettingsError(
                f"chunk_bytes ({self.chunk_bytes}) exceeds max_chunk_bytes ({self.max_chunk_bytes})"
            )
