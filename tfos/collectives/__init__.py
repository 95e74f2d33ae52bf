"""Collectives: how the processes of one run exchange arrays: barrier, broadcast, reduce, gather.

Public names: RankGroup (the calls), Offers (what this process has for its peers), RankPeer.

Numpy arrays travel over `rpc/`, from the process that has them to the one that asks. The sum is
always taken in rank order, so every rank gets the same bits, in repeated runs too.
"""

from __future__ import annotations

from tfos.collectives.group import RankGroup, RankPeer
from tfos.collectives.offers import Offers

__all__ = ["Offers", "RankGroup", "RankPeer"]
