"""The age of gradients, also of those that were computed while pushes travelled."""

from ps.consistency.staleness import StalenessTracker
from ps.manifest.manifest import MAX_LAG, WorkerRank

ONE, OTHER = WorkerRank(0), WorkerRank(1)


def test_only_updates_by_others_since_the_last_pull_count():
    views = StalenessTracker(first_clock=100)
    assert views.staleness(ONE, 100) == 0, "what a restored server had is no age"
    views.pushed(ONE)
    assert (views.staleness(ONE, 101), views.staleness(OTHER, 101)) == (0, 1)
    views.pulled(OTHER, 101)
    views.pushed(ONE)
    assert views.staleness(OTHER, 102) == 1


def test_with_a_lag_they_count_from_an_earlier_pull():
    """One pushes at the clocks 1, 3, 5, ... and OTHER in between; one's answers come at once."""
    views, clock = StalenessTracker(0), 0
    views.pulled(ONE, clock)
    for turn in range(1, 6):
        for worker in (ONE, OTHER):
            views.pushed(worker)
            clock += 1
            if worker == ONE:
                views.pulled(ONE, clock)
        assert [views.staleness(ONE, clock, lag) for lag in range(3)] == [
            1,
            min(2, turn),
            min(3, turn),
        ]


def test_the_memory_of_pulls_is_bounded():
    views = StalenessTracker(0)
    for clock in range(10 * MAX_LAG):
        views.pulled(ONE, clock)
    assert views.staleness(ONE, 10 * MAX_LAG, MAX_LAG) == MAX_LAG + 1
