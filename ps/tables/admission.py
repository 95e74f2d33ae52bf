"""Admission: which unknown ids get a row, by count or by chance.

Covers: counting and drawing for one segment of a table.
Does not: create rows (ps.tables.segment).
Runs in: PS processes.      Threads: none; the segment's lock serialises all calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.manifest.table_spec import TableSpec
from ps.tables import kernels
from ps.tables.initializers import key_of

Array = np.ndarray[Any, Any]

_SKETCH_SHAPE = (4, 1 << 16)
"""512 KiB a segment; with 65,536 candidates at a time about 2 % of them are admitted early."""
_CERTAIN = 1 << 53


class AdmissionFilter:
    """Admits ids to one segment."""

    def __init__(self, spec: TableSpec) -> None:
        self._min_count = spec.admission.min_count
        self._threshold = int(spec.admission.probability * _CERTAIN)
        self._seed = spec.seed
        self._sketch: Array | None = None
        if self._min_count > 1:
            self._sketch = np.zeros(_SKETCH_SHAPE, np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the counters."""
        return 0 if self._sketch is None else self._sketch.nbytes

    @property
    def counts(self) -> Array:
        """[depth, width] uint16: how often ids were pushed, by hash; empty without counting."""
        return np.empty(0, np.uint16) if self._sketch is None else self._sketch

    def admit(self, ids: Array, version: int) -> Array:
        """Return for each id whether it gets a row now: [n] bool.

        Args:
            ids: [n] int64, unknown ids of one push, each once.
            version: number of the push.
        """
        admitted: Array = np.ones(ids.size, np.bool_)
        if self._sketch is not None:
            counts = np.empty(ids.size, np.int64)
            kernels.count_up(self._sketch, ids, counts)
            admitted = counts >= self._min_count
        if self._threshold < _CERTAIN:
            chosen = np.empty(ids.size, np.bool_)
            kernels.draw(ids, key_of(self._seed + version), self._threshold, chosen)
            admitted &= chosen
        return admitted
