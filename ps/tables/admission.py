"""Admission: which unknown ids get a row, by count or by chance.

Covers: counting and drawing for one segment of a table; ageing and resizing of the counts.
Does not: create rows (ps.tables.segment).
Runs in: PS processes.      Threads: none; the segment's lock serialises all calls.

A sketch counts in fixed memory, so unknown ids share counters, and one whose counters others have
raised is admitted early. Each new id raises some, so without ageing every id is admitted in the
end. Therefore all counts are halved whenever 3/8 of a row of counters are above 0: then all four of
an id's counters are with probability (3/8)^4, 2 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.manifest.table_spec import TableSpec
from ps.tables import kernels
from ps.tables.initializers import key_of

Array = np.ndarray[Any, Any]

_DEPTH = 4
_LEAST_WIDTH, _USUAL_WIDTH, _MOST_WIDTH = 1 << 16, 1 << 17, 1 << 20
"""Counters in a row of the sketch: 0.5, 1 and 8 MiB a segment, which each save writes."""
_CERTAIN = 1 << 53
_SAMPLE = 1 << 12


def sketch_width(most_rows: int | None) -> int:
    """Return the counters in a row of the sketch, a power of 2.

    Args:
        most_rows: rows that the segment may hold; None: no limit.
    """
    if most_rows is None:
        return _USUAL_WIDTH
    return min(max(_LEAST_WIDTH, 1 << (most_rows - 1).bit_length()), _MOST_WIDTH)


class AdmissionFilter:
    """Admits ids to one segment.

    Args:
        spec: the table.
        most_rows: rows that the segment may hold, about; None: no limit.
    """

    def __init__(self, spec: TableSpec, most_rows: int | None) -> None:
        self._min_count = spec.admission.min_count
        self._threshold = int(spec.admission.probability * _CERTAIN)
        self._seed = spec.row_seed
        self._sketch: Array | None = None
        self._num_used = 0
        """Counters above 0 in the first row of the sketch."""
        if self._min_count > 1:
            self._sketch = np.zeros((_DEPTH, sketch_width(most_rows)), np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes of the counters."""
        return 0 if self._sketch is None else self._sketch.nbytes

    @property
    def counts(self) -> Array:
        """[depth, width] uint16: how often ids were pushed, by hash; empty without counting."""
        return np.empty(0, np.uint16) if self._sketch is None else self._sketch

    @property
    def admitted_early(self) -> float:
        """Estimate which share of ids never pushed before would be admitted now by the counts."""
        if self._sketch is None:
            return 0.0
        sample = self._sketch[:, :_SAMPLE] >= self._min_count - 1
        return float(np.prod(sample.mean(axis=1)))

    def load(self, counts: Array) -> None:
        """Go on from the counts of a checkpoint, also of another width.

        No id's count gets smaller: two halves are joined by their maximum, or repeated.

        Args:
            counts: [depth * width] uint16; empty: keep the own.

        Raises:
            ValueError: the width is no power of 2.
        """
        width, rest = divmod(counts.size, _DEPTH)
        if self._sketch is None or not counts.size:
            return
        if rest or width.bit_count() != 1:
            raise ValueError(f"{counts.size} counters are not {_DEPTH} rows of a power of 2")
        saved = counts.reshape(_DEPTH, width)
        while saved.shape[1] > self._sketch.shape[1]:
            saved = np.maximum(*np.split(saved, 2, axis=1))
        repeats = self._sketch.shape[1] // saved.shape[1]
        self._sketch[:] = np.tile(saved, repeats)
        self._num_used = int(np.count_nonzero(self._sketch[0]))

    def admit(self, ids: Array, version: int) -> Array:
        """Return for each id whether it gets a row now: [n] bool.

        Args:
            ids: [n] int64, unknown ids of one push, each once.
            version: number of the push.
        """
        admitted: Array = np.ones(ids.size, np.bool_)
        if self._sketch is not None:
            counts = np.empty(ids.size, np.int64)
            at_once = self._sketch.shape[1] // 32
            for start in range(0, ids.size, at_once):
                some = slice(start, start + at_once)
                self._count(self._sketch, ids[some], counts[some])
            admitted = counts >= self._min_count
        if self._threshold < _CERTAIN:
            chosen = np.empty(ids.size, np.bool_)
            kernels.draw(ids, key_of(self._seed + version), self._threshold, chosen)
            admitted &= chosen
        return admitted

    def _count(self, sketch: Array, ids: Array, counts: Array) -> None:
        """Age the sketch if it is full, then count ids, [n] int64, into `counts`, [n] int64."""
        while 8 * self._num_used > 3 * sketch.shape[1]:
            sketch >>= 1
            self._num_used = int(np.count_nonzero(sketch[0]))
        self._num_used += kernels.count_up(sketch, ids, counts)
