"""Latency histogram of fixed size, cheap enough for every call.

Covers: counting durations, their percentiles.
Does not: measure, lock.
Threads: one writer at a time; a reader in another thread may miss the last few counts.

Eight bins of equal width per power of two, from 1 us on, so a percentile is exact to an eighth at
every scale. Below 8 us a bin is 1 us wide; the last bin holds everything above about an hour.
Source: the bin layout of HdrHistogram (Tene), with 3 bits of precision.
"""

from __future__ import annotations

import msgspec

from rpc.field_texts import with_field_texts

_BITS = 3
_PER_OCTAVE = 1 << _BITS
_MAX_US = (1 << 32) - 1
_NUM_BINS = (32 - _BITS) * _PER_OCTAVE + _PER_OCTAVE


@with_field_texts
class Latency(msgspec.Struct, frozen=True):
    """Snapshot of a histogram: count, sum and percentiles; zeros before the first duration."""

    count: int = 0
    total_s: float = 0.0
    p50_s: float = 0.0
    """Half of them took no longer, to within an eighth."""
    p99_s: float = 0.0
    """One of a hundred took longer; far above the median: something makes single calls wait."""
    max_s: float = 0.0
    octaves: tuple[int, ...] = ()
    """Counts per octave: below 1 us, 1 to 2 us, 2 to 4 us ...; trailing zeros are left out. Octaves
    can be summed over processes and over time; percentiles cannot."""

    def __str__(self) -> str:
        return f"p50 {duration_text(self.p50_s)}, p99 {duration_text(self.p99_s)}"


class LatencyHistogram:
    """Counts durations in logarithmic bins."""

    __slots__ = ("_bins", "_max_s", "_total_s")

    def __init__(self) -> None:
        self._bins = [0] * _NUM_BINS
        self._total_s = 0.0
        self._max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        micros = int(seconds * 1e6)
        if micros < _PER_OCTAVE:
            self._bins[max(0, micros)] += 1
        else:
            micros = min(micros, _MAX_US)
            shift = micros.bit_length() - _BITS - 1
            self._bins[(shift << _BITS) + (micros >> shift)] += 1
        self._total_s += seconds
        if seconds > self._max_s:
            self._max_s = seconds

    def percentile_s(self, percent: float) -> float:
        """Return the duration that this percentage of those counted did not exceed, 0 if none."""
        bins = list(self._bins)
        needed = max(1.0, sum(bins) * percent / 100.0)
        seen = 0
        for index, count in enumerate(bins):
            seen += count
            if count and seen >= needed:
                return min(_upper_s(index), self._max_s)
        return 0.0

    def snapshot(self) -> Latency:
        """Return what was counted so far."""
        return Latency(
            count=sum(self._bins),
            total_s=self._total_s,
            p50_s=self.percentile_s(50.0),
            p99_s=self.percentile_s(99.0),
            max_s=self._max_s,
            octaves=self._octaves(),
        )

    def _octaves(self) -> tuple[int, ...]:
        octaves = [0] * (_MAX_US.bit_length() + 1)
        for index, count in enumerate(self._bins):
            if count:
                octaves[_octave(index)] += count
        while octaves and not octaves[-1]:
            octaves.pop()
        return tuple(octaves)


def duration_text(seconds: float) -> str:
    """Return a duration in the unit that people would use."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def _octave(index: int) -> int:
    """Return the octave of a bin: 0 below 1 us, k below 2**k us."""
    return index.bit_length() if index < _PER_OCTAVE else (index >> _BITS) + _BITS


def _upper_s(index: int) -> float:
    """Return the end of a bin."""
    if index < _PER_OCTAVE:
        return (index + 1) * 1e-6
    shift = (index >> _BITS) - 1
    return ((index - (shift << _BITS) + 1) << shift) * 1e-6
