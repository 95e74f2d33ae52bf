"""Kernels of a shard, compiled before it is filled: no request waits for the compiler then.

Covers: what a manifest needs, one thread that compiles it, waiting for that a while.
Does not: compile (ps.optim.kernels, ps.tables.kernels, ps.compression.kernels), fill a shard.
Runs in: PS processes.
Threads: any; `_changed` guards what is under way. The compiler runs on `ps-compile`.

Where nothing is kept on disk, compiling takes 20 s on an idle core and minutes on a loaded host:
more than a client waits for an answer. So the chief asks for it first, and again until it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ps.compression import kernels as packing
from ps.consistency.waits import wait_until
from ps.errors import ServerError
from ps.manifest.manifest import Manifest
from ps.optim import kernels as rules
from ps.tables.table import warm_for as warm_table

_logger = logging.getLogger(__name__)


def compile_for(manifest: Manifest) -> None:
    """Load or compile all that a shard of this manifest calls."""
    rules.warm_for(manifest)
    packing.warm_server({each.compression for each in manifest.groups} - {"none"})
    for table in manifest.tables:
        warm_table(table)


class _Compilation:
    """One run of the compiler: when it began, and how it has ended."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        """When its kernels were first requested."""
        self.is_ended = False
        self.failed = ""
        """Why it failed; empty if it did not, or has not ended."""


class KernelsAhead:
    """What one server compiles for manifests that it does not serve yet.

    Args:
        rank: rank of the server, for the message of a failure.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._newest: dict[str, _Compilation] = {}
        """The newest one by manifest hash. Requests keep theirs, so all get its end."""

    def compile(self, manifest: Manifest, deadline_s: float, is_gone: Callable[[], bool]) -> float:
        """Begin unless it has begun, and wait a while; return for how many seconds it has run.

        Args:
            manifest: the manifest that will be seeded.
            deadline_s: monotonic seconds at which to answer that it goes on.
            is_gone: whether the caller's connection has ended.

        Returns:
            0.0 once all kernels are there.

        Raises:
            ServerError: the compiler failed; the next request tries again.
        """
        name = manifest.hash()
        with self._changed:
            ours = self._newest.get(name)
            if ours is None or ours.failed:
                ours = self._newest[name] = _Compilation()
                work = threading.Thread(
                    target=self._run, args=(ours, manifest), name="ps-compile", daemon=True
                )
                work.start()
            wait_until(self._changed, lambda: ours.is_ended, deadline_s, is_gone)
            if not ours.is_ended:
                return max(time.monotonic() - ours.began_s, 1e-9)
            if ours.failed:
                raise ServerError(f"ps:{self._rank} cannot compile its kernels: {ours.failed}")
        return 0.0

    def _run(self, ours: _Compilation, manifest: Manifest) -> None:
        failed = "the compiler has ended its thread"
        try:
            compile_for(manifest)
            failed = ""
        except Exception as error:  # whatever it is, the chief must get it
            _logger.exception("compiling kernels failed")
            failed = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                ours.failed, ours.is_ended = failed, True
                self._changed.notify_all()
