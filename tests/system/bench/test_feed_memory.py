"""Memory of feeder and worker over ten million rows: the benchmark, held to its bar."""

from __future__ import annotations

import pytest

from scripts.benchmarks.feed_memory import NUM_ROWS, change, measure


@pytest.mark.fault("F35")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", NUM_ROWS)
def test_memory_stays_flat_over_millions_of_rows(kind):
    for name, seen in measure(kind, NUM_ROWS[kind]).items():
        assert len(seen) > 10
        assert change(seen)[1] < 1.1, name
