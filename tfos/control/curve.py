"""Curve of a training: a few numbers of all workers over time, in bounded memory. Pure.

Covers: when a point is taken, thinning the oldest half when it is full.
Does not: know the workers (tfos.control.state gives the numbers), draw (tfos.watch).
Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_POINTS = 512
_LEAST_S = 2.0
"""Least seconds between two points: the usual time between heartbeats."""


class CurvePoint(NamedTuple):
    """The training at one moment."""

    at_s: float
    """Monotonic seconds of the driver."""
    steps: float
    """Steps of all workers, lost attempts included."""
    rows: float
    loss: float | None
    """The mean of the last losses of the workers that were not lost."""


@dataclass
class Curve:
    """Points of a whole run: as it grows, the oldest are thinned out and the newest kept."""

    _points: list[CurvePoint] = field(default_factory=list)

    def copied(self) -> Curve:
        """Return a copy that stays as it is when the training goes on."""
        return Curve(self._points.copy())

    def is_due(self, now_s: float) -> bool:
        """Whether the newest point is old enough for another one."""
        return not self._points or now_s - self._points[-1].at_s >= _LEAST_S

    def add(self, point: CurvePoint) -> None:
        """Add a point; one without a step since the last one, or a finite count, is left out."""
        if not math.isfinite(point.steps + point.rows):
            return
        last = self._points[-1] if self._points else None
        if not point.steps or (last is not None and point[1:] == last[1:]):
            return
        self._points.append(point)
        if len(self._points) > MOST_POINTS:
            half = MOST_POINTS // 2
            self._points[:half] = self._points[:half:2]

    def after(self, at_s: float) -> list[CurvePoint]:
        """Return the points later than this moment."""
        return [point for point in self._points if point.at_s > at_s]
