"""Batches of table rows: looked up to train on, then pushed once or given up.

Covers: their names, which are under way, what ends one.
Does not: send (ps.client.tables), wait for permits (ps.consistency.hybrid, at the servers).
Threads: one for each batch; `OpenBatches` any.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ps.errors import ClosedError, ManifestMismatch, PSError, ServerPhaseError, ShapeError
from ps.manifest.manifest import Hyper
from ps.protocol.messages import Ack, BatchName

if TYPE_CHECKING:
    from ps.tables.routing import RoutedIds

Array = np.ndarray[Any, Any]


class OpenBatches:
    """The numbers of one client's batches that are under way.

    A batch without an object of its own is known by its routed ids: the push that brings those ends
    it, and it is over as well once nobody holds them any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, tuple[weakref.ref[RoutedIds], ...]] = {}

    def begin(self, known_by: Iterable[RoutedIds] = ()) -> tuple[int, tuple[int, ...]]:
        """Return a new batch's number, and those of all that are under way with it.

        Args:
            known_by: its routed ids; none: it is under way until `end`.
        """
        with self._lock:
            for number, ids in tuple(self._open.items()):
                if ids and not any(each() is not None for each in ids):
                    del self._open[number]
            self._last += 1
            self._open[self._last] = tuple(map(weakref.ref, known_by))
            return self._last, tuple(self._open)

    @property
    def have_begun(self) -> bool:
        """Whether any batch was ever under way."""
        with self._lock:
            return self._last > 0

    def known_by(self, ids: Iterable[RoutedIds]) -> int | None:
        """Return the oldest batch that is known by any of these ids; None: there is none."""
        wanted = set(map(id, ids))
        with self._lock:
            for number, known_by in self._open.items():
                if not wanted.isdisjoint(id(each()) for each in known_by):
                    return number
        return None

    def of(self, ids: Iterable[RoutedIds]) -> int | None:
        """Return the batch that gradients for these ids end; None: none is under way.

        Gradients of several batches may have ids of their own: those end the oldest.
        """
        found = self.known_by(ids)
        if found is None:
            with self._lock:
                found = next((number for number, refs in self._open.items() if refs), None)
        return found

    def end(self, number: int | None) -> None:
        """The batch, if there is one, is over; later lookups tell servers that missed it."""
        with self._lock:
            if number is not None:
                self._open.pop(number, None)


Push = Callable[[Mapping[str, tuple[Any, Array]], Hyper, BatchName | None], Ack]


class TrainingBatch:
    """Rows to train on; leave its `with` block, or close it, so that the next one may begin.

    Attributes:
        ids: by name of the table, routed once.
        rows: by name of the table, [*shape of the ids, dim], as they were when the batch began.

    Args:
        ids: by name of the table, routed once.
        rows: by name of the table, [*shape of the ids, dim] of the table's dtype.
        push: brings the gradients to the servers.
        name: the batch's number at the servers; None: they count no batches.
        on_over: called once when the batch has ended.
    """

    def __init__(
        self,
        ids: dict[str, RoutedIds],
        rows: dict[str, Array],
        push: Push,
        name: BatchName | None = None,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.ids = ids
        self.rows = rows
        self._push = push
        self._name = name
        self._on_over = on_over
        self._is_over = False

    def __enter__(self) -> TrainingBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(*(() if error is None else (PSError,))):
            self.close()

    def push(self, grads: Mapping[str, Array], *, hyper: Hyper) -> Ack:
        """Bring the gradients of the rows, which ends the batch.

        Args:
            grads: by name of the table, shaped as `rows`. Tables that are left out are no step of
                their rule.
            hyper: the learning rate.

        Raises:
            ServerPhaseError: this batch was pushed or closed before.
            PSError: as `TableClient.push`. After a refusal of the servers the batch is over; an
                array of another shape was not sent, so it is not.
        """
        if self._is_over:
            raise ServerPhaseError("this batch was pushed or closed already; begin another one")
        unknown = grads.keys() - self.ids.keys()
        if unknown:
            raise ManifestMismatch(
                f"gradients for {sorted(unknown)}, but the batch has rows of {sorted(self.ids)}"
            )
        given = {name: (self.ids[name], array) for name, array in grads.items()}
        try:
            ack = self._push(given, hyper, self._name)
        except (ShapeError, ClosedError):  # nothing was sent
            raise
        except PSError:
            self._end()
            raise
        self._end()
        return ack

    def close(self) -> None:
        """Give the batch up: its gradients will not come. Idempotent."""
        if self._is_over:
            return
        self._end()
        if self._name is not None:
            self._push({}, Hyper(0.0), self._name)

    def _end(self) -> None:
        self._is_over = True
        self._on_over()
