"""Collective calls: every rank has the same bits, and what goes wrong on one is said on all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rpc.client import connection
from rpc.errors import BusyError, DeadlineExceeded
from rpc.transport import tls_stream
from tests.support.ps_cluster import WAIT_S
from tests.support.rank_threads import Ranks
from tfos.collectives import fetching, layout, messages
from tfos.collectives.group import FEW_BYTES, PIECE_BYTES, RankGroup
from tfos.errors import (
    CollectiveError,
    CollectiveTimeout,
    RankLost,
    RankMismatch,
    SettingsError,
)

pytestmark = pytest.mark.socket


@pytest.fixture
def start(tmp_path: Any) -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:

        def start(size: int, *, tls: bool = False) -> Ranks:
            ranks = Ranks(size, None if tls else str(tmp_path))
            stack.callback(ranks.close)
            return ranks

        yield start


def brought(rank: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(rank).integers(0, 100, count)
    return (numbers / 7).astype(dtype) if dtype.startswith("f") else numbers.astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_every_rank_has_the_reduction_in_rank_order_to_the_bit(start, size, op):
    ranks = start(size)
    counts = [0, 1, 7, FEW_BYTES // 4 + 1, 2 * PIECE_BYTES // 4 * size + 13]
    for count in counts:
        found = ranks.run(lambda group, n=count: group.allreduce(brought(group.rank, n, "f4"), op))
        expected = brought(0, count, "f4")
        for rank in range(1, size):
            add = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
            expected = add(expected, brought(rank, count, "f4"))
        if op == "mean":
            expected = expected / np.float32(size)
        for each in found:
            np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u1", "c8"])
def test_each_dtype_and_shape_comes_back(start, dtype):
    ranks = start(2)

    def call(group: RankGroup) -> Any:
        arrays = {"a": np.full((2, 3), group.rank + 1, dtype), "b": [1.5, group.rank]}
        return group.allreduce({"a": arrays["a"], "b": np.array(arrays["b"])}, "sum")

    for found in ranks.run(call):
        assert found["a"].dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found["a"], np.full((2, 3), 3, dtype))
        np.testing.assert_array_equal(found["b"], [3.0, 1.0])


def test_each_dtype_of_a_reduction_is_a_call_of_its_own(start, monkeypatch):
    """A rank that is ahead would be given the bytes of the dtype before."""
    asked: set[int] = set()
    encode = messages.encode

    def encoded(fetch: Any) -> bytes:
        asked.add(fetch.call.number)
        return encode(fetch)

    monkeypatch.setattr(messages, "encode", encoded)
    value = (np.ones(3, "f4"), np.ones(3, "f8"), np.ones(3, "f4"))
    start(2).run(lambda group: [group.allreduce(value, "sum") for _ in range(2)])
    assert asked == {0, 1, 2, 3}


def test_arrays_of_files_with_the_other_byte_order_are_numbers_like_others(start):
    def call(group: RankGroup) -> Any:
        image = np.arange(3, dtype=">f4") + np.float32(group.rank)
        return group.allreduce(image.astype(">f4"), "sum"), *group.allgather(image.astype(">i2"))

    for found in start(2).run(call):
        assert [each.tolist() for each in found] == [[1, 3, 5], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize("value", [[[1], [1, 2]], None, "text"])
def test_what_is_no_array_is_refused_and_the_next_call_is_made(start, value):
    def call(group: RankGroup) -> Any:
        with pytest.raises(SettingsError, match="collective calls take arrays"):
            group.allreduce({"value": value}, "sum")
        return group.allreduce(1, "sum")

    assert start(2).run(call) == [2, 2]


@pytest.mark.parametrize(
    "value",
    [
        {"layers": [np.ones((2, 2)), np.zeros((2, 2))]},
        {"layers": [np.ones(2), np.zeros(3)]},
        {"layers": {"first": np.ones(2)}},
        [[np.ones(2)], [np.ones(2)]],
        ([{"a": 1}],),
    ],
)
def test_arrays_two_levels_deep_are_refused_instead_of_stacked(start, value):
    group = start(1).groups[0]
    text = "an element is a (list|dict).* under its own key such as 'layers/0'"
    for call in (partial(group.allreduce, op="sum"), group.broadcast, group.allgather):
        with pytest.raises(SettingsError, match=text):
            call(value)
    assert group.allreduce({"rows": [[1, 2], [3, 4]]}, "sum")["rows"].tolist() == [[1, 2], [3, 4]]


def test_half_precision_is_summed_as_single_precision(start):
    found = start(3).run(
        lambda group: group.allreduce(np.float16([2048.0, 1.0][group.rank > 0]), "sum")
    )
    assert [float(each) for each in found] == [2050.0] * 3


@pytest.mark.parametrize("count", [3, FEW_BYTES, 3_000_001])
def test_a_broadcast_brings_the_roots_value_to_all(start, count):
    ranks = start(3)
    value = [brought(7, count, "f8"), np.int32(5)]
    found = ranks.run(lambda group: group.broadcast(value if group.rank == 1 else None, root=1))
    for each in found:
        assert isinstance(each, list)
        np.testing.assert_array_equal(each[0], value[0])
        assert (each[1], each[1].shape, each[1].dtype) == (5, (), np.dtype("i4"))


def test_the_rank_that_numpy_finds_best_is_a_root(start):
    def call(group: RankGroup) -> int:
        best: Any = np.argmin(group.allgather(1.0 / (1 + group.rank)))
        return int(group.broadcast(group.rank, root=best))

    assert start(3).run(call) == [2, 2, 2]


def test_what_ranks_bring_may_differ_in_shape_and_is_gathered_in_rank_order(start):
    found = start(3).run(lambda group: group.allgather((np.arange(group.rank), True)))
    for each in found:
        assert [values[0].tolist() for values in each] == [[], [0], [0, 1]]
        assert all(bool(values[1]) for values in each)


def test_a_rank_may_change_its_array_when_its_call_is_over(start):
    ranks = start(3)

    def calls(group: RankGroup) -> list[float]:
        array = np.ones(100_000, np.float32)
        sums = []
        for _ in range(10):
            sums.append(float(group.allreduce(array, "sum")[-1]))
            array += 1.0
        return sums

    assert ranks.run(calls) == [[3.0 * (n + 1) for n in range(10)]] * 3


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("count", [3, 100_000])
def test_a_result_stays_when_the_array_that_was_passed_changes(start, size, count):
    def calls(group: RankGroup) -> list[set[float]]:
        array = np.ones(count, np.float32)
        found = [*group.allgather(array), group.broadcast(array), group.allreduce(array, "max")]
        array += 1.0
        return [set(each.tolist()) for each in found]

    assert start(size).run(calls) == [[{1.0}] * (size + 2)] * size


def test_nobody_passes_a_barrier_before_all_have_come(start):
    ranks = start(3)
    come: list[int] = []

    def call(group: RankGroup) -> int:
        come.append(group.rank)
        group.barrier()
        return len(come)

    assert ranks.run(call) == [3, 3, 3]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            [lambda g: g.barrier(), lambda g: g.allreduce(1.0, "sum")],
            "calls barrier .*allreduce sum",
        ),
        (
            [
                lambda g: g.allreduce(np.ones(3, "f4"), "sum"),
                lambda g: g.allreduce(np.ones(4, "f4"), "sum"),
            ],
            r"float32\[3\].*float32\[4\]",
        ),
        (
            [
                lambda g: g.allreduce({"w": np.ones(3, "f4"), "b": np.ones(1, "f4")}, "sum"),
                lambda g: g.allreduce({"w": np.ones(3, "f4"), "c": np.ones(1, "f4")}, "sum"),
            ],
            r"dict of w: float32\[3\], b: float32\[1\].*dict of w: float32\[3\], c: float32\[1\]",
        ),
        (
            [
                lambda g: g.allreduce({"k" * 400: np.ones(1, "f4"), "b": np.ones(1, "f4")}, "sum"),
                lambda g: g.allreduce({"k" * 400: np.ones(1, "f4"), "c": np.ones(1, "f4")}, "sum"),
            ],
            r"dict of k{152}… \(2 arrays, 8 bytes, kinds (\w+)\)(?!.*\1)",
        ),
        ([lambda g: g.broadcast(1, 0), lambda g: g.broadcast(1, 1)], "from rank 0 .*from rank 1"),
    ],
)
def test_ranks_that_make_different_calls_are_told_so(start, calls, text):
    found = start(2).run(lambda group: calls[group.rank](group))
    assert all(isinstance(each, RankMismatch | RankLost) for each in found), found
    first = [each for each in found if isinstance(each, RankMismatch)]
    assert first
    for each in first:
        with pytest.raises(RankMismatch, match=text):
            raise each


def test_a_rank_that_has_ended_is_named_and_later_calls_fail_too(start):
    ranks = start(3)

    def calls(group: RankGroup) -> None:
        group.barrier()
        if group.rank == 2:
            ranks.leave(2)
            return
        group.allreduce(np.ones(1_000_000), "sum")

    found = ranks.run(calls)
    assert found[2] is None
    for each in found[:2]:
        assert isinstance(each, RankLost)
    assert any("rank 2" in str(each) for each in found[:2])
    with pytest.raises(RankLost):
        ranks.groups[0].barrier()


@pytest.mark.fault("F28")
def test_ranks_stay_together_while_their_connections_use_up_their_keys(start, monkeypatch):
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 64)
    ranks, num_calls = start(3, tls=True), 20

    def calls(group: RankGroup) -> list[float]:
        few, many = np.ones(FEW_BYTES // 8), np.ones(FEW_BYTES // 4)
        sums = [group.allreduce(few if n % 2 else many, "sum") for n in range(num_calls)]
        sums += [group.broadcast(few * n, root=n % 3) / max(n, 1) * 3 for n in range(1, num_calls)]
        return [float(value) for each in sums for value in set(each)]

    for found in ranks.run(calls):
        assert found == [3.0] * (2 * num_calls - 1)
    replaced = [each.stats().accepted - 2 for each in ranks.listeners]
    assert min(replaced) >= 2
    assert max(each.stats().open_connections for each in ranks.listeners) <= 4


@pytest.mark.fault("F28")
def test_a_used_connection_that_cannot_be_replaced_serves_while_it_is_good(start):
    """Rank 1 has returned, and the last broadcast needs nothing of it."""
    ranks = start(3, tls=True)
    has_left = threading.Event()

    def calls(group: RankGroup) -> float:
        group.allreduce(np.ones(10), "sum")
        if group.rank == 2:
            assert has_left.wait(WAIT_S)
            stream: Any = group._links._connections[1].stream
            stream._peers_records_left = 100
            assert group._links._connections[1].is_nearly_used
        found = group.broadcast(np.ones(4) if group.rank == 0 else None, root=0)
        if group.rank == 1:
            ranks.leave(1)
            has_left.set()
        return float(found.sum())

    assert ranks.run(calls) == [4.0] * 3


@pytest.mark.fault("F28")
def test_peers_that_accept_no_connection_for_a_while_are_called_on_their_used_ones(
    start, monkeypatch
):
    def call(group: RankGroup) -> float:
        return float(group.allreduce(np.ones(10), "sum", timeout_s=8)[0])

    ranks = start(2, tls=True)
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 2**10)
    assert ranks.run(call) == [2.0] * 2
    for group in ranks.groups:
        (link,) = group._links._connections.values()
        stream: Any = link.stream
        stream._records_left = 200
    left_s: list[float] = []

    def refuse(*_: Any, timeout_s: float, **__: Any) -> Any:
        left_s.append(timeout_s)
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(fetching, "connect", refuse)
    assert ranks.run(call) == [2.0] * 2
    assert len(left_s) == 2
    assert max(left_s) <= 4, "the call itself has the other half"
    monkeypatch.setattr(fetching, "connect", connection.connect)
    assert ranks.run(call) == [2.0] * 2
    assert [each.stats().accepted for each in ranks.listeners] == [2, 2]


def test_the_root_of_a_broadcast_does_not_wait_for_a_rank_that_has_ended(start):
    ranks = start(2)

    def calls(group: RankGroup) -> None:
        group.barrier()
        if group.rank == 1:
            ranks.leave(1)
        else:
            group.broadcast(np.ones(10))

    with pytest.raises(RankLost, match="rank 1"):
        raise ranks.run(calls)[0]


def test_a_late_rank_is_named_at_the_timeout(start):
    ranks = start(2)
    with pytest.raises(CollectiveTimeout, match=r"waited 0.2 s in barrier .* for rank 1"):
        ranks.groups[0].barrier(timeout_s=0.2)


def test_no_rank_waits_for_the_slice_of_a_rank_that_has_given_up(start):
    ranks = start(2)
    array = np.ones(FEW_BYTES, np.float32)
    with pytest.raises(CollectiveTimeout):
        ranks.groups[0].allreduce(array, "sum", timeout_s=0.2)
    with pytest.raises(RankLost, match="rank 0 has failed in allreduce sum"):
        ranks.groups[1].allreduce(array, "sum", timeout_s=WAIT_S)


class Model:
    """As a Keras model."""

    def get_weights(self):
        return [np.ones(2)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda g: g.allreduce("text", "sum"), "got str of dtype <U4$"),
        (lambda g: g.broadcast(Model()), r"got Model of dtype object; pass its get_weights\(\)"),
        (
            lambda g: g.allreduce(np.ones(2, ml_dtypes.bfloat16), "sum"),
            r"pass x\.astype\('float32'\)",
        ),
        (lambda g: g.allreduce(np.ma.masked_less([1.0, -1.0], 0), "sum"), "mask of a masked array"),
        (lambda g: g.allreduce(1, "median"), "'median'"),
        (lambda g: g.allreduce(1, "mean"), "takes floats, got int64"),
        (lambda g: g.allreduce(True, "sum"), "booleans"),
        (lambda g: g.allreduce(1j, "max"), "no order"),
        (lambda g: g.broadcast(1, root=2), "rank from 0 to 0, got 2"),
        (lambda g: g.broadcast(1, root=np.int64(-1)), r"rank from 0 to 0, got np\.int64\(-1\)"),
        (lambda g: g.broadcast(1, root=False), "rank from 0 to 0, got False"),
        (lambda g: g.broadcast(1, root=0.0), "rank from 0 to 0, got 0.0"),
        (lambda g: g.allgather({1: 2}), r"must be text, got \[1\]"),
    ],
)
def test_values_that_cannot_travel_are_refused_before_anything_is_sent(start, call, text):
    group = start(1).groups[0]
    with pytest.raises(SettingsError, match=text):
        call(group)
    assert float(group.allreduce(2.0, "sum")) == 2.0


@pytest.mark.parametrize("call", ["allgather", "broadcast"])
def test_a_value_of_more_arrays_than_a_layout_tells_is_refused_before_it_is_sent(start, call):
    def calls(group: RankGroup) -> Any:
        if call == "allgather" or group.rank == 0:
            with pytest.raises(SettingsError, match=r"list of 200,000 arrays .*Pass .* np.asarray"):
                getattr(group, call)([0.0] * 200_000)
        return group.allgather(np.zeros(200_000))[1].size

    assert start(2).run(calls) == [200_000] * 2


def test_an_answer_that_breaks_a_limit_is_told_as_it_is_and_not_as_a_lost_rank(start, monkeypatch):
    monkeypatch.setattr(layout, "MAX_ENCODED_BYTES", 8 << 20)
    found = start(2).run(lambda group: group.allgather([0.0] * 200_000))
    told = [each for each in found if not isinstance(each, RankLost)]
    assert told, found
    for each in told:
        assert isinstance(each, CollectiveError)
        assert "is unusable" in str(each)
        assert "max_reply_bytes" in str(each)


def test_a_call_beside_another_one_is_no_lost_rank(start, monkeypatch):
    ranks = start(2)
    group = ranks.groups[0]

    def busy(*_: Any, **__: Any) -> None:
        raise BusyError("a call is under way")

    group._links.open(time.monotonic() + 10.0)
    monkeypatch.setattr(group._links._connections[1], "begin", busy)
    with pytest.raises(CollectiveError, match="a call is under way") as found:
        group.barrier()
    assert not isinstance(found.value, RankLost)


def test_slices_cover_everything_once():
    assert layout.bounds(10, 4) == [0, 2, 5, 7, 10]
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]
    for start in range(8):
        for stop in range(start, 8):
            found = b"".join(layout.cut(views, start, stop))
            assert found == b"abcdefg"[start:stop]


def test_after_an_interrupt_no_call_takes_the_answers_of_the_one_before(start, monkeypatch):
    ranks = start(2)
    group = ranks.groups[0]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group._links, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.barrier()
    monkeypatch.undo()
    with pytest.raises(CollectiveError, match="rank 0 was interrupted in barrier"):
        group.barrier()
    with pytest.raises(RankLost, match=r"rank 0 (has failed in|ended in the middle of) barrier"):
        ranks.groups[1].barrier()


@pytest.mark.parametrize("count", [3, FEW_BYTES])
def test_a_rank_that_goes_on_waits_for_the_root_to_have_asked(start, monkeypatch, count):
    ranks = start(2)
    links, arrived = ranks.groups[0]._links, threading.Event()
    begin, post = links.begin, ranks.offers[1].post

    def late(wanted: Any) -> None:
        if wanted[0].fetch.call.text.startswith("broadcast"):
            arrived.wait(0.1)  # until rank 1 has gone on, which it must not
        begin(wanted)

    def posted(offer: Any) -> None:
        post(offer)
        if offer.call.text == "barrier":
            arrived.set()

    monkeypatch.setattr(links, "begin", late)
    monkeypatch.setattr(ranks.offers[1], "post", posted)

    def calls(group: RankGroup) -> float:
        value = group.broadcast(np.ones(count))
        group.barrier()
        return float(value.sum())

    assert ranks.run(calls) == [count, count]


def test_a_reduction_of_nothing_meets_the_other_ranks_too(start):
    ranks = start(2)
    with pytest.raises(CollectiveTimeout, match="for rank 1"):
        ranks.groups[0].allreduce([], "sum", timeout_s=0.1)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1, None, "5"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(start, timeout_s):
    group = start(1).groups[0]
    with pytest.raises(SettingsError, match="timeout_s"):
        group.barrier(timeout_s=timeout_s)
    group.barrier()


def test_a_timeout_that_no_lock_takes_waits_all_the_same(start):
    def calls(group: RankGroup) -> None:
        for _ in range(20):
            group.barrier(timeout_s=1e30)

    assert start(3).run(calls) == [None] * 3


def test_a_peer_that_is_not_reached_holds_a_call_up_no_longer_than_its_timeout(start, monkeypatch):
    asked = []

    def unreachable(*_: Any, timeout_s: float, **__: Any) -> None:
        asked.append(timeout_s)
        raise DeadlineExceeded("no answer")

    monkeypatch.setattr(fetching, "connect", unreachable)
    with pytest.raises(RankLost, match="rank 1 cannot be reached: no answer"):
        start(2).groups[0].barrier(timeout_s=30.0)
    assert 1.0 < asked[0] <= 30.0
