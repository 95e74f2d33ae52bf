"""Consistency modes: which there are, and the way from a manifest to the policy of its mode.

Does not: decide when a push counts (ps.consistency.asp, ps.consistency.bsp, ps.consistency.ssp,
ps.consistency.hybrid). Pure.

    mode     a gradient is applied         push() is answered               a lost worker
    async    as it arrives                 at once                          is not missed
    ssp      as it arrives                 when its worker is at most       is waited for no more
                                           `staleness_bound` clocks ahead
    sync     with everybody's, reduced     when everybody's is applied      ends the barrier, or is
             in rank order, as one                                          waited for no more
    hybrid   dense: as in sync             as in sync; rows at once         as in sync; its permits
             rows: as it arrives, with     (their lookup waits instead)     are free
             a permit from their lookup
"""

from __future__ import annotations

from ps.consistency.asp import ASP
from ps.consistency.bsp import BSP
from ps.consistency.hybrid import Hybrid
from ps.consistency.policy import OnLost, Policy
from ps.consistency.ssp import SSP
from ps.errors import PSSettingsError
from ps.manifest.manifest import Manifest


def make_policy(
    manifest: Manifest, num_workers: int, *, on_lost: OnLost = "fail", clock: int = 0
) -> Policy:
    """Return the policy that the manifest asks for.

    Args:
        manifest: has the mode and its bounds.
        num_workers: number of workers in the cluster.
        on_lost: what a lost worker means: "fail" or "continue".
        clock: updates so far, after a restore.
    """
    if num_workers < 1:
        raise PSSettingsError(f"num_workers must be at least 1, got {num_workers}")
    if manifest.consistency == "sync":
        return BSP(num_workers, on_lost=on_lost, clock=clock)
    if manifest.consistency == "hybrid":
        return Hybrid(num_workers, manifest.staleness_bound, on_lost=on_lost, clock=clock)
    if manifest.consistency == "ssp":
        return SSP(num_workers, manifest.staleness_bound, clock=clock)
    return ASP(clock=clock)
