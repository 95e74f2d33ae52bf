"""Label order: whether the labels of neighbouring rows are more alike than those of other rows.

    epoch   a b . . . . . . . . . . c d . . . . . . . . . . .
            neighbours a, b         neighbours c, d, half of the rows seen away

In shuffled rows the four labels are exchangeable: |a - b| + |c - d| is as often smaller than
|a - c| + |b - d| as it is larger, whatever the distribution of the labels. So, where they
differ, the number of smaller ones is binomial with 1/2: a sign test, exact for rare classes,
constant labels and heavy tails. No two fours share a row. An alarm needs a chance below 1e-9, and
two thirds of the fours.

Covers: LabelOrder: pairs of neighbours of one epoch, thinned out to fewer than 8,192, and the test.
Does not: warn (dataset).
Threads: one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_PAIRS = 8192
_PAIRS_OF_BATCH = 32
_LEAST_PAIRS = 64
_SHARE = 2 / 3
_LOG_CHANCE = math.log(1e-9)


class LabelOrder:
    """Test of the labels of one epoch, batch by batch."""

    def __init__(self) -> None:
        self._kept = np.empty((_MOST_PAIRS + _PAIRS_OF_BATCH, 2))
        self._num_kept = 0
        self._last: list[float] = []
        """Number of the last row, where batches have one row."""
        self._every = 1
        """Number of pairs of which one is kept."""
        self._seen = 0
        self._tested = _LEAST_PAIRS // 2
        """Value of `_num_kept` at the last test."""
        self._is_over = False

    def looks_sorted(self, y: Any) -> bool:
        """Take the labels of the next batch; return True once, when the rows look sorted.

        Args:
            y: numbers [batch, ...] of one output; anything else is ignored.
        """
        if self._is_over or not isinstance(y, np.ndarray) or y.dtype.kind not in "biuf":
            return False
        if not len(y):
            return False
        self._take(y)
        return self._num_kept >= 2 * self._tested and self._test()

    def looks_sorted_at_end(self) -> bool:
        """Return True if the rows of the whole epoch look sorted and this was not reported yet."""
        sorted_now = not self._is_over and self._num_kept >= _LEAST_PAIRS and self._test()
        self._is_over = True
        return sorted_now

    def _take(self, y: Array) -> None:
        if len(y) == 1:  # neighbours are in two batches
            self._last.append(_numbers(y)[0])
            if len(self._last) == 1:
                return
            y, self._last = np.array(self._last), []
        count = min(_PAIRS_OF_BATCH, len(y) // 2)
        firsts = 2 * (np.arange(count) * (len(y) // 2) // count)
        firsts = firsts[-self._seen % self._every :: self._every]
        self._seen += count
        if not len(firsts):
            return
        numbers, stop = _numbers(y), self._num_kept + len(firsts)
        self._kept[self._num_kept : stop, 0] = numbers[firsts]
        self._kept[self._num_kept : stop, 1] = numbers[firsts + 1]
        self._num_kept = stop
        if stop >= _MOST_PAIRS:
            self._num_kept = (stop + 1) // 2
            self._kept[: self._num_kept] = self._kept[:stop:2]
            self._every *= 2
            self._tested = self._num_kept // 2

    def _test(self) -> bool:
        self._tested = self._num_kept
        half = self._tested // 2
        a, b = self._kept[:half].T
        c, d = self._kept[half : 2 * half].T
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.abs(a - b) + np.abs(c - d)
            far = np.abs(a - c) + np.abs(b - d)
        smaller, larger = int((near < far).sum()), int((near > far).sum())
        total = smaller + larger
        if not total or smaller < _SHARE * total:
            return False
        self._is_over = _log_tail(total, smaller) < _LOG_CHANCE
        return self._is_over


def _numbers(y: Array) -> Array:
    """Return one number of each label: exchangeable rows stay so; one-hot rows get their class."""
    labels = y.reshape(len(y), -1).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return labels @ np.arange(1.0, labels.shape[1] + 1)


def _log_tail(total: int, least: int) -> float:
    """Return a bound of the log of the chance that a fair coin shows `least` heads, or more.

    Source: Chernoff's bound, exp(-n KL(k/n, 1/2)).
    """
    share = least / total
    entropy = sum(part * math.log(part) for part in (share, 1 - share) if part)
    return -total * (entropy + math.log(2))
