"""Time series in DataFrames: `tfos.timeseries.windows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from tfos.timeseries.window_frame import windows

__all__ = ["windows"]

_HOMES = {"windows": "tfos.timeseries.window_frame"}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
