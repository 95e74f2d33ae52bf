"""The collector of cycles in a PS process: its searches leave out what a server keeps for good.

Covers: one call of gc.freeze, when the kernels are loaded and the parameters are there.
Does not: switch the collector off. Requests make no cycles (tests/ps/test_collector.py), so
it seldom runs; but a full search walks 125,000 objects that stay, for 15 ms with the GIL held.
Runs in: the main thread of a PS process; never in a process that is not the server's own.
"""

from __future__ import annotations

import gc

from ps.protocol.permissions import ServerPhase


class StartFreeze:
    """Freezes once; ask it again and again with the server's phase."""

    def __init__(self) -> None:
        self.is_done = False

    def poll(self, phase: ServerPhase) -> None:
        """Collect and freeze if the server is SERVING for the first time.

        Args:
            phase: phase of the server, now.
        """
        if not self.is_done and phase is ServerPhase.SERVING:
            gc.collect()
            gc.freeze()
            self.is_done = True
