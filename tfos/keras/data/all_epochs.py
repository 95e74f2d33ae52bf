"""`ctx.all_epochs`: as many epochs as are fed, for `fit(epochs=...)`.

Covers: a number that no feed reaches and that prints as unknown.
Does not: end `fit` (epochs: the feed's end does).

A stream has no known number of epochs: each micro-batch is one. `fit` of a distributed model leaves
its loop when the feed ends, with a warning if a number of epochs was asked for; with this one there
is nothing to warn of.
"""

from __future__ import annotations

import sys


class AllEpochs(int):
    """All epochs of a feed."""

    def __new__(cls) -> AllEpochs:
        """Return the number."""
        return super().__new__(cls, sys.maxsize)

    def __reduce__(self) -> tuple[type[AllEpochs], tuple[()]]:
        return AllEpochs, ()

    def __repr__(self) -> str:
        return "?"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format("?", spec)
