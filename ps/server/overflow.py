"""The overflow of a push: all of its buckets are updated before the push is refused.

Covers: keeping the first NonFiniteUpdate of several updates.
Does not: find it (ps.dense.shard, ps.tables.table), refuse (ps.server.shard).
Runs in: PS processes.      Threads: one.
"""

from __future__ import annotations

from ps.errors import NonFiniteUpdate


class FirstOverflow:
    """Keeps what `with` around each update raises, if it is a NonFiniteUpdate."""

    def __init__(self) -> None:
        self.error: NonFiniteUpdate | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, NonFiniteUpdate):
            return False
        self.error = self.error or error
        return True

    def check(self) -> None:
        """Raise it, if there was one."""
        if self.error is not None:
            raise self.error
