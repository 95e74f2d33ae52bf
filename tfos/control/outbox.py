"""Outbox: orders to one attempt of a node, kept so that a broken stream loses none.

Covers: numbering, replay after a reconnect, one live stream at a time.
Does not: know gRPC (tfos.control.server).
Threads: `put` and `close` from any thread; each stream is consumed by one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from tfos.control import messages

KEPT_ORDERS = 4096
_CHECK_S = 5.0
"""Interval at which a waiting stream checks whether its peer is connected; notify wakes it."""


class OrdersForgotten(Exception):
    """A node lacks orders that are no longer kept."""


class Outbox:
    """The orders to one attempt of one node.

    Orders are few (start, one or two per epoch, finish, stop), but a stream has epochs without end.
    The outbox keeps the newest: a node that lacks one from thousands of epochs ago does not train.
    """

    def __init__(self) -> None:
        self._orders: list[messages.Order] = []
        self._dropped = 0
        """Number of orders before the first one that is kept."""
        self._changed = threading.Condition()
        self._stream = 0
        self._closed = False

    def put(self, order: messages.Order) -> None:
        """Queue an order for the node."""
        with self._changed:
            self._orders.append(order)
            if len(self._orders) > 2 * KEPT_ORDERS:
                del self._orders[:KEPT_ORDERS]
                self._dropped += KEPT_ORDERS
            self._changed.notify_all()

    def open_stream(self, number: int) -> None:
        """Let a stream replace the one before it, unless that has the higher number."""
        with self._changed:
            self._stream = max(self._stream, number)
            self._changed.notify_all()

    def wake(self) -> None:
        """Make waiting streams check `is_active` again."""
        with self._changed:
            self._changed.notify_all()

    def stream(
        self, number: int, after: int, is_active: Callable[[], bool]
    ) -> Iterator[messages.SequencedOrder]:
        """Yield the orders after `after` as they arrive; end when replaced, closed or inactive.

        Args:
            number: this stream's number; a higher one replaces it.
            after: sequence number of the last order that the node has.
            is_active: whether the caller still listens.

        Raises:
            OrdersForgotten: the next order is no longer kept.
        """
        while True:
            with self._changed:
                while (
                    self._dropped + len(self._orders) <= after
                    and not self._closed
                    and number == self._stream
                    and is_active()
                ):
                    self._changed.wait(_CHECK_S)
                place = after - self._dropped
                if number != self._stream or not is_active() or place >= len(self._orders):
                    return
                if place < 0:
                    raise OrdersForgotten(
                        f"orders before {self._dropped + 1} are no longer kept, but this node has "
                        f"only those up to {after}"
                    )
                order = self._orders[place]
            after += 1
            yield messages.SequencedOrder(after, order)

    def close(self) -> None:
        """End the stream once everything queued was sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
