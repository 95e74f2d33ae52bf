"""Orders to one node: none is lost, and a stream without end does not fill the driver's memory."""

from __future__ import annotations

from itertools import islice

import pytest

from tfos.control.messages import Flush
from tfos.control.outbox import KEPT_ORDERS, OrdersForgotten, Outbox


def orders(outbox: Outbox, after: int, count: int) -> list[tuple[int, int]]:
    outbox.open_stream(1)
    stream = outbox.stream(1, after, lambda: True)
    found = [(each.seq, each.order) for each in islice(stream, count)]
    return [(seq, order.epoch) for seq, order in found if isinstance(order, Flush)]


def test_a_new_stream_goes_on_behind_what_the_node_has():
    outbox = Outbox()
    for epoch in range(5):
        outbox.put(Flush("input", epoch))
    assert orders(outbox, 0, 5) == [(n + 1, n) for n in range(5)]
    assert orders(outbox, 3, 2) == [(4, 3), (5, 4)]
    outbox.close()
    assert orders(outbox, 5, 1) == []


def test_a_newer_stream_ends_the_one_before_it_and_one_that_comes_late_has_nothing():
    outbox = Outbox()
    outbox.put(Flush("input", 0))
    outbox.open_stream(2)
    newest = outbox.stream(2, 0, lambda: True)
    outbox.open_stream(1)
    assert list(outbox.stream(1, 0, lambda: True)) == []
    assert next(newest).seq == 1
    outbox.open_stream(3)
    assert list(newest) == []


def test_only_the_newest_orders_are_kept_and_keep_their_numbers():
    outbox = Outbox()
    last = 5 * KEPT_ORDERS
    for epoch in range(last):
        outbox.put(Flush("input", epoch))
        assert len(outbox._orders) <= 2 * KEPT_ORDERS
    assert orders(outbox, last - 3, 3) == [(n + 1, n) for n in range(last - 3, last)]
    assert orders(outbox, last - KEPT_ORDERS, KEPT_ORDERS)[0] == (
        last - KEPT_ORDERS + 1,
        last - KEPT_ORDERS,
    )
    with pytest.raises(
        OrdersForgotten, match=rf"orders before {last - 2 * KEPT_ORDERS + 1} are no longer kept"
    ):
        orders(outbox, 7, 1)
