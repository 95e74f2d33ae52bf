"""Settings of one server.

Covers: ServerSettings.      Does not: what the model says (ps.manifest).
"""

from __future__ import annotations

from dataclasses import dataclass

from ps.consistency.policy import OnLost
from ps.errors import PSSettingsError
from rpc.field_texts import with_field_texts


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Rank, cluster and limits of one server."""

    rank: int
    num_servers: int
    num_workers: int
    """Workers 0..num_workers-1; the sync barrier waits for all of them from the start."""
    on_lost: OnLost = "fail"
    """What a lost worker does to a sync barrier: end the training with WorkerLost, or continue."""

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_workers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PSSettingsError(f"{name} must be an int of at least 1, got {value!r}")
        if type(self.rank) is not int or not 0 <= self.rank < self.num_servers:
            raise PSSettingsError(
                f"rank must be an int in 0..{self.num_servers - 1} "
                f"(num_servers={self.num_servers}), got {self.rank!r}"
            )
        if self.on_lost not in ("fail", "continue"):
            raise PSSettingsError(f"on_lost must be 'fail' or 'continue', got {self.on_lost!r}")
