"""Durations in bins: every one lands where its percentile says, to within an eighth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.histogram import Latency, LatencyHistogram

DURATIONS_S = st.floats(0.0, 4000.0)


def histogram_of(durations_s):
    histogram = LatencyHistogram()
    for each in durations_s:
        histogram.add(each)
    return histogram


def test_nothing_counted_is_all_zeros():
    assert LatencyHistogram().snapshot() == Latency()


@given(DURATIONS_S)
def test_one_duration_is_its_own_percentiles(duration_s):
    found = histogram_of([duration_s]).snapshot()
    assert (found.count, found.total_s, found.max_s) == (1, duration_s, duration_s)
    assert found.p50_s == found.p99_s
    assert found.p50_s == pytest.approx(duration_s, rel=0.125, abs=1e-6)


@given(st.lists(DURATIONS_S, min_size=1, max_size=300), st.sampled_from([1.0, 50.0, 99.0, 100.0]))
def test_a_percentile_is_within_an_eighth_of_the_exact_one(durations_s, percent):
    ordered = sorted(durations_s)
    exact_s = ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
    found_s = histogram_of(durations_s).percentile_s(percent)
    assert exact_s - 1e-9 <= found_s <= exact_s * 1.125 + 1e-6


def test_a_clock_that_stood_still_and_a_day_have_bins_too():
    histogram = histogram_of([-1e-9, 0.0, 86_400.0])
    assert histogram.snapshot().count == 3
    assert histogram.percentile_s(100.0) > 4000.0


@given(st.lists(DURATIONS_S, max_size=300))
def test_octaves_say_how_many_took_less_than_each_power_of_two(durations_s):
    octaves = histogram_of(durations_s).snapshot().octaves
    micros = [int(each * 1e6) for each in durations_s]
    assert sum(octaves) == len(durations_s)
    for place in range(len(octaves)):
        assert sum(octaves[: place + 1]) == sum(each < 2**place for each in micros)
