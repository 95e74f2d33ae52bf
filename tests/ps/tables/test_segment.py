"""A segment of a table: lookups change nothing, pushes are whole, limits and ages hold."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.errors import IdError, TableFull
from ps.manifest.initializer_spec import Constant, RandomUniform
from ps.manifest.manifest import SGD
from ps.manifest.table_spec import Admission, TableSpec
from ps.tables import kernels
from ps.tables.eviction import TtlClock
from ps.tables.growable_array import GrowingArray
from ps.tables.hash_index import HashIndex
from ps.tables.quota import BESIDE_ROW_NBYTES, NoRoom, Quota
from ps.tables.row_snapshot import RowSnapshot
from ps.tables.segment import Segment
from tests.support.ps_cluster import resident_growth

DIM = 4


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    kernels.warm_server(["float32"])


def add(slab, rows, grads) -> None:
    """A rule: the value takes the gradient, the slot counts."""
    dim = grads.shape[1]
    slab[rows, :dim] += grads
    slab[rows, dim:] += 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def segment(clock: Callable[[], float] = time.monotonic, share: float = 1.0, **settings) -> Segment:
    initializer = settings.pop("initializer", Constant(0.0))
    settings = {"name": "user", "initializer": initializer, **settings}
    spec = TableSpec(dim=DIM, rule=SGD(), **settings)
    quota = Quota(spec, 8 * DIM, share, "ps:0")
    return Segment(spec, np.full(DIM, 10, np.float32), quota, clock)


def push(made: Segment, ids, value: float = 1.0):
    numbers = np.array(ids, np.int64)
    return made.push(numbers, np.full((numbers.size, DIM), value, np.float32), add)


def lookup(made: Segment, ids):
    numbers = np.array(ids, np.int64)
    out = np.full((numbers.size, DIM), np.nan, np.float32)
    missing = made.lookup(numbers, out)
    return out, missing


def test_a_lookup_changes_nothing_and_gives_what_a_row_would_start_with():
    made = segment(initializer=RandomUniform(), seed=3)
    before, missing = lookup(made, [5, 7])
    assert (missing, made.num_rows) == (2, 0)
    push(made, [7, 5], 0.0)
    after, missing = lookup(made, [5, 7])
    assert missing == 0
    assert np.array_equal(before, after)


def test_tables_without_a_seed_begin_apart_and_each_the_same_everywhere():
    names = "user", "item"
    user, item = (
        lookup(segment(name=name, initializer=RandomUniform()), [5, 7])[0] for name in names
    )
    assert not np.intersect1d(user, item).size
    made = segment(seed=7173623408806911919, initializer=RandomUniform())
    assert np.array_equal(user, lookup(made, [5, 7])[0])


def test_a_push_makes_the_row_with_its_slots_and_updates_it():
    made = segment()
    assert push(made, [5, 7]) == (2, 0, 0)
    assert push(made, [7, 9], 2.0) == (1, 0, 0)
    out, _ = lookup(made, [5, 7, 9])
    assert out[:, 0].tolist() == [1.0, 3.0, 2.0]
    batch, stop = made.dump(10, 10)
    assert stop == 0
    assert sorted(zip(batch.ids.tolist(), batch.rows[:, DIM].tolist(), strict=True)) == [
        (5, 11.0),
        (7, 12.0),
        (9, 11.0),
    ]


@pytest.mark.fault("F50")
def test_no_ids_are_a_lookup_and_a_push_of_nothing():
    made = segment()
    assert push(made, []) == (0, 0, 0)
    assert lookup(made, [])[1] == 0
    assert made.version == 1


@pytest.mark.parametrize("known", [True, False])
def test_an_id_twice_in_one_push_is_refused_and_nothing_is_updated(known: bool):
    made = segment()
    push(made, [1, 2] if known else [1])
    with pytest.raises(IdError, match="'user': id 2 occurs twice"):
        push(made, [1, 2, 2])
    assert lookup(made, [1])[0][0, 0] == 1.0


def test_rows_that_get_no_memory_are_neither_there_nor_counted(monkeypatch: pytest.MonkeyPatch):
    made = segment(max_rows=8)
    push(made, [1])

    def refuse(column: GrowingArray, num_rows: int) -> None:
        raise MemoryError("no memory for more rows")

    with monkeypatch.context() as without:
        without.setattr(GrowingArray, "reserve", refuse)
        with pytest.raises(TableFull, match="'user': no memory for more rows; lower max_rows"):
            push(made, [1, 2, 3])
    values, missing = lookup(made, [1, 2, 3])
    assert (values[0, 0], missing, made.num_rows, made._quota.used) == (1.0, 2, 1, 1)
    assert push(made, range(1, 9)).added == 7, "as many as the limit leaves"


@pytest.mark.attack("A34")
def test_a_full_table_says_its_numbers_and_serves_on():
    made = segment(max_rows=10, share=0.5)
    push(made, [1, 2, 3, 4])
    before, version = made.row_ages(), made.version
    with pytest.raises(TableFull, match=r"holds 4 of at most 5 rows.*max_rows=10.*2 new ids"):
        push(made, [1, 5, 6])
    assert [column.tolist() for column in made.row_ages()] == [each.tolist() for each in before]
    assert made.version == version
    assert lookup(made, [1, 5])[0][:, 0].tolist() == [1.0, 0.0]
    push(made, [5, 1])
    assert lookup(made, [1, 5])[0][:, 0].tolist() == [2.0, 1.0]


def test_a_server_whose_share_of_a_limit_is_less_than_a_row_holds_one():
    made = segment(max_rows=1, share=0.5)
    assert made._quota.limit == 1
    assert push(made, [7]).added == 1


@pytest.mark.attack("A34")
def test_max_bytes_counts_everything_that_a_row_needs():
    limit_bytes = 100 * (8 * DIM + BESIDE_ROW_NBYTES)
    made = segment(max_bytes=limit_bytes)
    push(made, range(100))
    assert made.nbytes <= limit_bytes
    with pytest.raises(TableFull, match=f"at most 100 rows.*max_bytes={limit_bytes}"):
        push(made, [100])


def test_the_least_recently_pushed_make_room():
    made = segment(max_rows=32, when_full="lru")
    for number in range(32):
        push(made, [number])
    push(made, [0, 1])
    assert push(made, [100, 0]) == (1, 0, 2)  # a 16th of the rows at once
    _, missing = lookup(made, [2, 3])
    assert missing == 2
    out, missing = lookup(made, [0, 1, *range(4, 32), 100])
    assert missing == 0
    assert out[:, 0].tolist() == [3.0, 2.0, *[1.0] * 28, 1.0]


def test_rows_of_the_push_itself_are_never_evicted():
    made = segment(max_rows=4, when_full="lru")
    push(made, [1, 2, 3])
    push(made, [1, 2, 4, 5])
    assert lookup(made, [1, 2, 4, 5])[1] == 0
    before, version = made.row_ages(), made.version
    with pytest.raises(NoRoom):
        push(made, [1, 2, 6, 7, 8])
    assert lookup(made, [1, 2, 4, 5])[1] == 0, "nobody is evicted in vain"
    assert [column.tolist() for column in made.row_ages()] == [each.tolist() for each in before]
    assert made.version == version


def test_rows_live_for_their_time_after_the_last_push():
    clock = Clock()
    made = segment(clock, ttl_s=100.0)
    push(made, [1, 2])
    clock.now_s += 60
    push(made, [2])
    clock.now_s += 60
    assert push(made, [3]).evicted == 1
    assert lookup(made, [1])[1] == 1
    assert lookup(made, [2, 3])[1] == 0
    clock.now_s += 1000
    assert push(made, []).evicted == 2
    assert made.num_rows == 0


def test_admission_by_count_drops_the_gradients_before():
    made = segment(admission=Admission(min_count=3), initializer=Constant(5.0))
    assert push(made, [7]) == (0, 1, 0)
    assert push(made, [7, 8]) == (0, 2, 0)
    assert lookup(made, [7])[0].tolist() == [[0.0] * DIM]
    assert push(made, [7, 8, 9]) == (1, 2, 0)
    assert lookup(made, [7])[0].tolist() == [[6.0] * DIM]


def test_unknown_ids_read_as_their_first_values_where_that_is_asked_for():
    admission = Admission(min_count=2, unknown="initial")
    made = segment(admission=admission, initializer=Constant(5.0))
    push(made, [7])
    assert lookup(made, [7])[0].tolist() == [[5.0] * DIM]


def test_admission_by_probability_is_met_on_average():
    made = segment(admission=Admission(probability=0.25))
    ids = np.arange(4000)
    counts = []
    for _ in range(3):
        push(made, ids)
        counts.append(made.num_rows / ids.size)
    assert counts == pytest.approx([1 - 0.75, 1 - 0.75**2, 1 - 0.75**3], abs=0.03)


def test_a_load_into_a_full_table_drops_no_row_of_its_own_ids():
    """The oldest rows would go for the load's new ones, and be neither kept nor loaded."""
    made = segment(max_rows=32, when_full="lru")
    for number in range(32):
        push(made, [number])
    loaded = np.full((4, DIM), 7, np.float32)
    assert made.load_new(np.array([0, 100, 1, 101]), loaded).added == 2
    ids = made.dump(99, 99)[0].ids.tolist()
    assert {0, 1, 100, 101} <= set(ids)
    assert {2, 3}.isdisjoint(ids)
    assert lookup(made, [0, 100])[0].tolist() == [[1] * DIM, [7] * DIM]
    with pytest.raises(NoRoom):
        made.load_new(np.array([*ids, 200]), np.zeros((len(ids) + 1, DIM), np.float32))
    assert sorted(made.dump(99, 99)[0].ids.tolist()) == sorted(ids)


def test_no_request_of_a_load_drops_the_rows_that_an_earlier_one_named():
    made = segment(max_rows=32, when_full="lru")
    for number in range(32):
        push(made, [number])
    rows = np.full((4, DIM), 7, np.float32)
    for ids in ([0, 1, 2, 3], [4, 5, 100, 101], [102, 103, 104, 105]):
        made.load_new(np.array(ids), rows)
    assert lookup(made, [*range(6), *range(100, 106)])[1] == 0


def test_a_longer_time_to_live_ends_no_row_early():
    """Its grain is 10 s instead of 1 s, so both marks become one, the last."""
    clock = Clock()
    ages = TtlClock(64.0, clock)
    for version, pushed_s in enumerate((1000.0, 1009.5, 1010.4)):
        clock.now_s = pushed_s
        assert ages.expired(version) is None
    ages.set_ttl(640.0)
    clock.now_s = 1010.4 + 639.9
    assert ages.expired(3) is None
    clock.now_s = 1009.5 + 650.0
    assert ages.expired(3) == 3


def test_loaded_rows_live_from_their_load_on():
    """They get the version of older rows, which says when those were pushed."""
    clock = Clock()
    made = segment(clock, ttl_s=64.0)
    push(made, [1])
    clock.now_s += 60
    made.load_new(np.array([5]), np.zeros((1, DIM), np.float32))
    clock.now_s += 60
    push(made, [7])
    assert sorted(made.dump(99, 99)[0].ids.tolist()) == [1, 5, 7]
    clock.now_s += 60
    push(made, [7])
    assert made.dump(99, 99)[0].ids.tolist() == [7]


def test_rows_are_dropped_in_any_order():
    made = segment()
    push(made, range(10))
    assert made.drop(np.array([9, 0, 77, 4])) == 3
    assert sorted(made.dump(99, 99)[0].ids.tolist()) == [1, 2, 3, 5, 6, 7, 8]


def test_dump_and_load_carry_rows_over_and_deltas_hold_what_changed():
    made, other = segment(), segment()
    push(made, range(100))
    cut = made.version
    push(made, range(50, 120), 3.0)
    stop = made.num_rows
    while stop:
        batch, stop = made.dump(stop, 7)
        other.load(batch)
    assert np.array_equal(lookup(other, range(120))[0], lookup(made, range(120))[0])
    assert other.version == made.version
    delta, _ = made.dump(made.num_rows, 1000, since=cut)
    assert sorted(delta.ids.tolist()) == list(range(50, 120))


def test_a_save_keeps_only_rows_that_it_still_needs_and_none_after_its_end():
    """Not those that its base has, that are newer than its moment, or that it has copied."""
    versions = np.array([1, 5, 5, 6, 5])
    columns = np.arange(5) + 10, np.zeros((5, DIM), np.float32), versions
    cut = RowSnapshot(since=1, version=5, stop=4)
    cut.keep(np.array([0, 2, 3, 4, -1]), columns)
    kept = cut.take()
    assert kept is not None
    assert kept.ids.tolist() == [12]
    cut.release()
    cut.keep(np.array([1]), columns)
    assert cut.take() is None


def test_rows_that_move_while_others_are_dumped_are_never_left_out():
    made = segment(max_rows=64, when_full="lru")
    for number in range(64):
        push(made, [number])
    found: dict[int, float] = {}
    stop, new = made.num_rows, 1000
    while stop:
        batch, stop = made.dump(stop, 4)
        found.update(zip(batch.ids.tolist(), batch.rows[:, 0].tolist(), strict=True))
        push(made, [new])
        new += 1
    still_there = made.dump(made.num_rows, 1000)[0].ids.tolist()
    assert {number for number in still_there if number < 64} <= found.keys()


def test_a_push_after_its_lookup_searches_only_for_rows_that_have_moved(
    monkeypatch: pytest.MonkeyPatch,
):
    made = segment(max_rows=4, when_full="lru")
    push(made, [1, 2, 3, 4])
    searched: list[list[int]] = []

    def find(index: HashIndex, row_ids, wanted, rows) -> int:
        searched.append(wanted.tolist())
        return of_index(index, row_ids, wanted, rows)

    of_index = HashIndex.find
    monkeypatch.setattr(HashIndex, "find", find)
    lookup(made, [1, 2, 3])
    push(made, [1, 2, 3])
    assert searched == [[1, 2, 3]], "by the lookup"
    lookup(made, [1, 4])
    lookup(made, [5])
    push(made, [5])  # evicts 4, the least recently pushed
    searched.clear()
    push(made, [1, 4])
    assert searched[0] == [4]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 40), max_size=12), st.integers(0, 30)), max_size=25)
)
def test_it_behaves_as_a_dictionary_of_rows_with_ages(steps):
    clock = Clock()
    made = segment(clock, ttl_s=64.0)
    model: dict[int, tuple[float, float]] = {}
    for step, (ids, later_s) in enumerate(steps):
        for ahead, _ in steps[step : step + 3]:  # rows move until they are pushed
            lookup(made, sorted(ahead))
        clock.now_s += later_s
        model = {k: (v, at) for k, (v, at) in model.items() if clock.now_s - at < 65.0}
        push(made, sorted(ids))
        for number in ids:
            model[number] = (model.get(number, (0.0, 0.0))[0] + 1.0, clock.now_s)
        out, missing = lookup(made, range(41))
        expected = [model.get(number, (0.0, 0.0))[0] for number in range(41)]
        assert out[:, 0].tolist() == expected
        assert (missing, made.num_rows) == (41 - len(model), len(model))


@pytest.mark.slow
def test_a_row_takes_little_more_than_its_numbers():
    num_rows, dim = 500_000, 16
    spec = TableSpec(name="user", dim=dim, rule=SGD())
    made = Segment(spec, np.full(dim, 0.1, np.float32), Quota(spec, 8 * dim, 1.0, "ps:0"), Clock())
    grads = np.zeros((20_000, dim), np.float32)
    payload_of_row = dim * 2 * 4
    ratios: list[float] = []

    def fill() -> None:
        for start in range(0, num_rows, len(grads)):
            made.push(np.arange(start, start + len(grads)), grads, add)
            ratios.append(made.nbytes / (made.num_rows * payload_of_row))

    made.push(np.arange(-5, 0), grads[:5], add)
    grown = resident_growth(fill)
    assert ratios[-1] <= 1.35
    assert max(ratios) <= 1.41  # while the index is in both its arrays
    assert grown <= 1.35 * num_rows * payload_of_row + (8 << 20)
