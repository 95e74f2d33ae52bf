"""The number of ranks of tfos.run where the program names none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.runner import spark_run
from tfos.slots.offer import ExecutorSlots, Offer


@pytest.mark.parametrize(("slots", "count"), [([2, 2], 4), ([1], 1), ([], 1)])
def test_as_many_ranks_as_slots_run_where_none_are_asked_for(monkeypatch, slots, count):
    """Spark's default parallelism counts cores, and at least 2."""
    offer = Offer(tuple(ExecutorSlots(str(each), "h", num) for each, num in enumerate(slots)))
    for name in ("classic_context", "read_facts"):
        monkeypatch.setattr(spark_run, name, lambda sc: sc)
    monkeypatch.setattr(spark_run, "read_offer", lambda sc, facts: offer)
    context: Any = SimpleNamespace(defaultParallelism=8)
    assert spark_run._count(None, context) == count
