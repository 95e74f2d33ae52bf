"""How a cluster saves its parameters, where a run goes on, and what follows when a server dies.

Covers: the settings, checked once on the driver.
Does not: save (tfos.worker.saver, in the chief), restart servers (tfos.node.supervisor).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from feeding.filesystem.location import LOCAL, shown
from tfos.errors import SettingsError
from tfos.files import paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`ClusterConfig(checkpoints=Checkpoints(directory="hdfs:///runs/7", every_s=60, keep=3))`.

    The chief saves while training goes on: once the servers hold parameters, then periodically, and
    when its main_fun has returned, each time if anything has changed. A save that fails is a line
    in the log, never the end of the training.
    """

    directory: str
    """An absolute path that every node sees, or a URL (`hdfs://…`; see docs/files.md). One cluster
    at a time saves there."""
    every_s: float = 60.0
    """Seconds between saves. A dead server loses at most these and the time that two saves take.
    Smaller: less lost, more writing. A save that failed is tried again after 1 s, then 2 s, 4 s."""
    every_steps: int = 0
    """Also save after so many updates of the dense parameters; 0: by time alone."""
    every_batches: int = 1
    """Of a stream: save after so many micro-batches; `every_s` and `every_steps` then save between
    batches only. 1: whatever stops when, each row is in the saved parameters once. Larger: fewer
    saves, and after a crash of the whole program the batches since the last one are missing. 0: by
    time and steps alone; a batch that was under way at a save may be trained twice, too."""
    keep: int = 3
    """Newest complete checkpoints to keep."""
    full_every: int = 10
    """Every so many saves one holds everything, those between what has changed since the last."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the directory, if there is one. Without it a
    directory that holds checkpoints of another run is refused."""
    ps_restarts: int = 1
    """How often within 10 minutes each parameter server that was killed is started again, from the
    last checkpoint of this run: at once, then after 0.5 s, 1 s, 2 s up to 8 s while it lives less
    than 10 s. 0: its end fails the cluster."""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str):
            raise SettingsError(f"checkpoints need a directory as a str, got {self.directory!r}")
        location = paths.user_location(self.directory, "checkpoints")
        if location.scheme == LOCAL and not os.path.isabs(location.path):
            raise SettingsError(
                "checkpoints need an absolute directory that every node sees, or a URL such as "
                f"hdfs:///runs/7, got {shown(self.directory)}"
            )
        every_s: object = self.every_s
        is_number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
        if not is_number or not 0 < self.every_s < math.inf:
            raise SettingsError(f"every_s must be > 0 seconds and finite, got {self.every_s!r}.")
        least = {"every_steps": 0, "every_batches": 0, "keep": 1, "full_every": 1, "ps_restarts": 0}
        for name, at_least in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
                raise SettingsError(f"{name} must be an int >= {at_least}, got {value!r}.")
