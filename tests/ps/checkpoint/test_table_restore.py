"""Tables come back from chains of deltas as they were saved, whatever limits and servers there are.

What is expected comes from dictionaries of the rows at the moment of the save.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.inspect import table_arrays
from ps.checkpoint.reader import open_chain
from ps.checkpoint.tables.restore import restore_tables
from ps.config import ServerSettings
from ps.manifest.manifest import Adagrad, TableSpec
from ps.manifest.table_spec import Admission
from ps.tables import table as table_module
from ps.tables.eviction import RowAges, lru_victims
from ps.tables.rows import RowBatch
from ps.tables.table import Table
from tests.support.saved_tables import SavedTables
from tests.support.tables import table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")


class Row(NamedTuple):
    """What a checkpoint keeps of a row."""

    version: int
    numbers: bytes


def restored(
    root: Path, spec: TableSpec, num_servers: int, *, reset_optimizer: bool = False
) -> list[Table]:
    checkpoint = read_manifest(root)
    tables = [Table(spec, rank=rank, num_servers=num_servers) for rank in range(num_servers)]
    for rank, share in enumerate(tables):
        place = ServerSettings(rank=rank, num_servers=num_servers, num_workers=1)
        chain = open_chain(root, checkpoint, place)
        restore_tables(chain, [share], reset_optimizer=reset_optimizer)
    return tables


def rows_of(share: Table) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for segment in share.segments:
        batch, _ = segment.dump(10**6, 10**6)
        rows = map(Row, batch.versions.tolist(), map(bytes, batch.rows))
        found.update(zip(batch.ids.tolist(), rows, strict=True))
    return found


def segments_of(tables: list[Table]) -> list[tuple[int, bytes]]:
    """Steps of the rule, and counts of the ids that were not admitted."""
    return [
        (segment.version, segment.admission.counts.tobytes())
        for share in tables
        for segment in share.segments
    ]


def expected(saved: dict[int, Row], share: Table) -> dict[int, Row]:
    """What a server has to take over."""
    is_own = share.is_own(np.array(list(saved), np.int64))
    own = [number for number, mine in zip(saved, is_own.tolist(), strict=True) if mine]
    limit = share.stats().max_rows
    if limit is not None and len(own) > limit and share.spec.when_full == "lru":
        own = sorted(own, key=lambda number: (-saved[number].version, number))[:limit]
    return {number: saved[number] for number in own}


def all_rows(tables: list[Table]) -> dict[int, Row]:
    return {number: row for share in tables for number, row in rows_of(share).items()}


HIGHER_OR_LOWER = st.sampled_from([20, 45, 90])
SEGMENTS = st.integers(1, 4)
SPECS = st.fixed_dictionaries(
    {
        "segments": SEGMENTS,
        "max_rows": st.none() | HIGHER_OR_LOWER,
        "max_bytes": st.sampled_from([None, 72 * 60]),
        "when_full": st.sampled_from(["refuse", "lru"]),
        "ttl_s": st.sampled_from([None, 64.0]),
        "admission": st.sampled_from([Admission(), Admission(min_count=2)]),
    }
).filter(
    lambda fields: fields["when_full"] == "refuse" or fields["max_rows"] or fields["max_bytes"]
)
STEPS = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 40), st.sampled_from([0.0, 30.0, 70.0])),
    max_size=6,
)
"""Pushes: the first id, how many, seconds before."""


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    SPECS,
    st.lists(st.tuples(STEPS, st.integers(0, 3)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.fixed_dictionaries({}, optional={"max_rows": HIGHER_OR_LOWER, "segments": SEGMENTS}),
    st.booleans(),
)
def test_what_was_saved_is_restored(given_spec, saves, servers, changes, reset: bool):
    """Saves are pushes, then a full checkpoint (0) or a delta."""
    num_saved, num_restored = servers
    spec = table(rule=Adagrad(), **given_spec)
    made = SavedTables(spec, num_saved)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for step, (pushes, kind) in enumerate(saves):
            for first, count, later_s in pushes:
                made.now_s += later_s
                made.push(range(first, first + count), value=1.0 + step)
            made.save(root, step, full=kind == 0)
        saved = all_rows(made.tables)
        exported = dict(table_arrays(root, read_manifest(root)))
        assert exported["tables/user/ids"].tolist() == sorted(saved)

        asked = msgspec.structs.replace(spec, **changes)
        for rank in range(num_restored):
            place = ServerSettings(rank=rank, num_servers=num_restored, num_workers=1)
            share = Table(asked, rank=rank, num_servers=num_restored)
            wanted = expected(saved, share)
            chain = open_chain(root, read_manifest(root), place)
            restore_tables(chain, [share], reset_optimizer=reset)
            found = rows_of(share)
            if not reset:
                assert found == wanted
                continue
            assert {number: row.numbers[:16] for number, row in found.items()} == {
                number: row.numbers[:16] for number, row in wanted.items()
            }
            assert {row.version for row in found.values()} <= {0}
            assert {segment.version for segment in share.segments} == {0}
        if num_saved == num_restored and asked == spec and not reset:
            tables = restored(root, spec, num_restored)
            assert all_rows(tables) == saved
            assert segments_of(tables) == segments_of(made.tables)


@pytest.mark.fault("F42")
def test_rows_that_took_the_place_of_dropped_ones_fit_again(tmp_path: Path):
    """In a delta one segment's new rows stand before the next one's dropped ids."""
    made = SavedTables(table(max_rows=200, ttl_s=64.0, segments=4), 1)
    made.push(range(200))
    made.save(tmp_path, 1)
    made.now_s += 70.0
    made.push()  # every segment drops what has outlived its time
    made.push(range(200, 400))
    made.save(tmp_path, 2)
    saved = all_rows(made.tables)
    assert saved.keys() == set(range(200, 400))
    assert all_rows(restored(tmp_path, made.manifest.tables[0], 1)) == saved


@pytest.mark.parametrize("num_servers", [1, 2])
def test_rows_are_as_old_as_when_they_were_saved(tmp_path: Path, num_servers: int):
    spec = table(ttl_s=64.0, segments=2)
    made = SavedTables(spec, num_servers)
    made.push(range(20))
    made.save(tmp_path, 1)
    made.now_s += 30.0
    made.push(range(100, 120))
    made.save(tmp_path, 2)
    again = SavedTables(spec, num_servers)
    again.now_s = 5.0  # another host's clock; what passes between two runs does not count
    for rank, share in enumerate(again.tables):
        place = ServerSettings(rank=rank, num_servers=num_servers, num_workers=1)
        restore_tables(open_chain(tmp_path, read_manifest(tmp_path), place), [share])
    again.push(range(100, 120))
    assert all_rows(again.tables).keys() == set(range(20)) | set(range(100, 120))
    again.now_s += 36.0
    again.push()
    assert all_rows(again.tables).keys() == set(range(100, 120))


def test_an_id_that_was_dropped_and_came_again_is_there(tmp_path: Path):
    made = SavedTables(table(max_rows=20, when_full="lru", segments=1), 1)
    made.push(range(20))
    made.save(tmp_path, 1)
    made.push(range(100, 120))
    made.push(range(5))
    made.save(tmp_path, 2)
    made.push(range(200, 203))
    made.save(tmp_path, 3)
    saved = all_rows(made.tables)
    assert set(range(5)) < saved.keys()
    assert all_rows(restored(tmp_path, made.manifest.tables[0], 1)) == saved
    assert dict(table_arrays(tmp_path, read_manifest(tmp_path)))["tables/user/ids"].tolist() == (
        sorted(saved)
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_a_full_table_of_the_newest_rows_is_restored_by_any_number_of_servers(
    tmp_path: Path, num_servers: int
):
    made = SavedTables(table(max_rows=400, when_full="lru"), 2)
    for number in range(0, 2000, 20):
        made.push(range(number, number + 20))
        if number % 400 == 0:
            made.save(tmp_path, number)
    made.save(tmp_path, 2000)
    saved = all_rows(made.tables)
    tables = restored(tmp_path, made.manifest.tables[0], num_servers)
    assert [rows_of(share) for share in tables] == [expected(saved, share) for share in tables]


@pytest.mark.parametrize("reset_optimizer", [False, True])
def test_a_lowered_limit_keeps_what_was_pushed_last(
    tmp_path: Path, reset_optimizer: bool, caplog: pytest.LogCaptureFixture
):
    made = SavedTables(table(rule=Adagrad(), segments=3), 1)
    made.push(range(100))
    made.push(range(40, 60))
    made.save(tmp_path, 1)
    made.push(range(10))
    made.save(tmp_path, 2)
    lower = table(rule=Adagrad(), segments=3, max_rows=50, when_full="lru")
    with caplog.at_level(logging.WARNING):
        (share,) = restored(tmp_path, lower, 1, reset_optimizer=reset_optimizer)
    kept = {*range(30), *range(40, 60)}  # of the rest, all of one age, those with small ids
    assert rows_of(share).keys() == kept
    assert "table 'user': ps:0 restores 50 rows" in caplog.text
    caplog.clear()
    for max_rows in (50, 100):  # the server refuses new ids, it loses none
        kept_all = restored(tmp_path, table(rule=Adagrad(), segments=3, max_rows=max_rows), 1)
        assert len(rows_of(*kept_all)) == 100
    assert not caplog.text


@pytest.mark.slow
def test_a_table_never_holds_many_more_rows_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where another table, or fewer servers, would hold far more."""
    monkeypatch.setattr("ps.checkpoint.snapshot.ROWS_AT_ONCE", 16)
    monkeypatch.setattr(table_module, "ROWS_AT_ONCE", 16)
    made = SavedTables(table(), 3)
    for number in range(10):
        made.push(range(100 * number, 100 * number + 150))
        made.save(tmp_path, number, full=number == 0)
    seen: list[int] = []
    load = Table.load

    def watched(share: Table, batch: RowBatch) -> None:
        seen.append(share.num_rows + batch.ids.size)
        load(share, batch)

    monkeypatch.setattr(Table, "load", watched)
    lower = table(max_rows=100, when_full="lru")
    (share,) = restored(tmp_path, lower, 1)
    assert rows_of(share) == expected(all_rows(made.tables), share)
    assert len(seen) > 60
    assert max(seen) <= 100 + 2 * 16


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 3)), max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 20),
)
@example([[(2**63, 1), (1, 1)], [(2**64 - 1, 1)]], 2)
@settings(max_examples=30, deadline=None)
def test_the_oldest_go_first_and_of_one_age_the_largest_ids(segments, num_rows: int):
    parts = [dict(each) for each in segments]
    distinct = {number: age for part in parts for number, age in part.items()}
    ordered = sorted(distinct, key=lambda number: (distinct[number], -number))[:num_rows]
    shared = [
        [number for number in part if all(number not in other for other in parts[at + 1 :])]
        for at, part in enumerate(parts)
    ]
    ages = [
        RowAges(
            np.array(numbers, np.uint64).view(np.int64),
            np.array([distinct[number] for number in numbers], np.int64),
        )
        for numbers in shared
    ]
    found = [ids.view(np.uint64).tolist() for ids in lru_victims(ages, num_rows)]
    assert sorted(itertools.chain(*found)) == sorted(ordered)
    for numbers, chosen in zip(shared, found, strict=True):
        assert set(chosen) <= set(numbers)
