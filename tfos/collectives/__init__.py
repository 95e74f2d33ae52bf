"""Collectives: what the processes of one run tell each other: barrier, broadcast, reduce, gather.

Public names: RankGroup (the calls), Offers (what this process has for its peers), RankPeer.

Numpy arrays travel over `rpc/`, from the process that has them to the one that asks. The sum is
always taken in rank order, so every rank has the same bits, and a repeated run has them again.
"""

from __future__ import annotations

from tfos.collectives.group import RankGroup, RankPeer
from tfos.collectives.offers import Offers

__all__ = ["Offers", "RankGroup", "RankPeer"]
