"""Which number a save gets to which its user has given none."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ps.client.saving.saver import next_step

STEPS = st.frozensets(st.integers(0, 12))


@given(clock=st.integers(0, 14), on_disk=STEPS, passed_over=STEPS)
def test_it_is_the_least_that_makes_the_save_the_newest(
    clock: int, on_disk: frozenset[int], passed_over: frozenset[int]
):
    def is_newest(step: int) -> bool:
        is_new = step not in on_disk and step not in passed_over
        return is_new and all(step > other for other in on_disk if other not in passed_over)

    expected = next(step for step in itertools.count(clock) if is_newest(step))
    assert next_step(clock, on_disk, passed_over) == expected
