"""Admission by count: its error stays small for ever, and a restored filter goes on as it was."""

import numpy as np
import pytest

from ps.manifest.manifest import Hyper
from ps.manifest.table_spec import Admission
from ps.tables.admission import AdmissionFilter, sketch_width
from ps.tables.table import Table
from tests.support.tables import ones, table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

AT_ONCE = 10_000
NARROW = 1 << 16


def admitting(min_count: int, most_rows: int | None = 1) -> AdmissionFilter:
    return AdmissionFilter(table(admission=Admission(min_count=min_count)), most_rows)


def new_ids(num: int, seed: int = 0) -> np.ndarray:
    """Ids without a pattern, each once."""
    return np.random.default_rng(seed).permutation(2 * num)[:num].astype(np.int64)


def fed(made: AdmissionFilter, ids: np.ndarray) -> np.ndarray:
    pieces = np.split(ids, range(AT_ONCE, ids.size, AT_ONCE))
    return np.concatenate([made.admit(piece, 1) for piece in pieces])


@pytest.mark.slow
@pytest.mark.parametrize("min_count", [2, 3])
def test_of_two_million_ids_that_are_seen_once_less_than_two_percent_are_admitted(min_count):
    made = admitting(min_count)
    shares = [fed(made, part).mean() for part in np.split(new_ids(2_000_000), 20)]
    assert max(shares) < 0.02


def test_the_estimate_of_its_error_is_what_happens():
    made = admitting(2)
    ids = new_ids(400_000)
    seen = []
    for start in range(0, ids.size, 2_000):
        told = made.admitted_early
        seen.append((told, made.admit(ids[start : start + 2_000], 1).mean()))
    told, happened = np.mean(seen, axis=0)
    assert 0.001 < happened < 0.02
    assert told == pytest.approx(happened, rel=0.2)
    assert max(told for told, _ in seen) < 0.025


@pytest.mark.parametrize("min_count", [2, 3, 7])
def test_ids_that_come_again_and_again_are_admitted_among_any_number_of_others(min_count):
    made, others = admitting(min_count), new_ids(500_000)
    frequent = np.arange(10**9, 10**9 + 100)
    for start in range(0, others.size, 50_000):
        made.admit(others[start : start + 50_000], 1)
        pushes = [made.admit(frequent, 1).mean() for _ in range(min_count)]
        assert pushes[-1] == 1.0


def test_counting_is_exact_while_few_ids_come():
    made, ids = admitting(3), new_ids(1_000)
    assert [made.admit(ids, 1).mean() for _ in range(4)] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("most_rows", "width"),
    [(1, NARROW), (NARROW + 1, 2 * NARROW), (10**9, 1 << 20), (None, 1 << 17)],
)
def test_the_sketch_is_as_wide_as_the_segment_may_have_rows(most_rows, width):
    assert sketch_width(most_rows) == width
    assert admitting(2, most_rows).counts.shape == (4, width)
    assert admitting(1, most_rows).nbytes == 0


def test_each_segment_has_its_share_of_the_limit():
    spec = table(max_rows=4 * (NARROW + 1), admission=Admission(min_count=2), segments=4)
    made = Table(spec, rank=0, num_servers=1)
    assert {each.admission.counts.shape for each in made.segments} == {(4, 2 * NARROW)}


def test_a_restored_filter_decides_as_the_saved_one_would_have():
    saved, later = admitting(3), new_ids(200_000, seed=1)
    fed(saved, new_ids(100_000))
    restored = admitting(3)
    restored.load(saved.counts.reshape(-1).copy())
    for _ in range(3):
        assert np.array_equal(fed(saved, later), fed(restored, later))
    assert np.array_equal(saved.counts, restored.counts)


@pytest.mark.parametrize("widths", [(1, 4 * NARROW), (4 * NARROW, 1)])
def test_counts_of_another_width_forget_no_push(widths):
    saved, restored = (admitting(3, rows) for rows in widths)
    ids = new_ids(5_000)
    for _ in range(2):
        assert not saved.admit(ids, 1).any()
    restored.load(saved.counts.reshape(-1))
    assert restored.admitted_early < 0.01
    assert restored.admit(ids, 1).all()


def test_counts_that_no_filter_has_are_refused():
    for size in (3, 4 * 3 * NARROW):
        with pytest.raises(ValueError, match=f"{size} counters are not 4 rows"):
            admitting(3).load(np.zeros(size, np.uint16))
    admitting(1).load(np.zeros(3, np.uint16))  # it does not count


def test_stats_tell_the_error():
    spec = table(admission=Admission(min_count=2), segments=1, max_rows=NARROW, when_full="lru")
    made = Table(spec, rank=0, num_servers=1)
    assert made.stats().admitted_early == 0.0
    ids = new_ids(30_000)
    made.push(0, ids, ones(ids), Hyper(1.0))
    assert 0.0 < made.stats().admitted_early < 0.02
