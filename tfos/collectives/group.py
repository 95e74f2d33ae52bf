"""RankGroup: barrier, broadcast, allgather and allreduce of the processes of one run.

Covers: the calls and their algorithms.
Does not: move bytes (fetching, offers), take values apart (layout).
Threads: one at a time calls; every rank makes the same calls in the same order.

A rank offers its values and fetches what it needs, so no rank receives more than it asked for. A
call ends on a rank when it has its result and its peers have what it offered.

allreduce of many bytes: each rank reduces one slice, which it fetches piece by piece from all
others; then all fetch the finished slices. A rank receives and sends 2 (n - 1) / n of the bytes, as
in a ring (Patarasuk and Yuan 2009), in 2 steps instead of 2 (n - 1). Pieces are added in rank
order. Few bytes: each rank fetches all of them and reduces them itself.
broadcast of many bytes: the root sends as many slices as there are ranks once, and the ranks pass
them on (van de Geijn 1991).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rpc.array_bytes import bytes_of
from rpc.auth.handshake import Credentials, Identity
from tfos.collectives import layout
from tfos.collectives.fetching import PeerLinks, RankPeer, Wanted
from tfos.collectives.layout import Array, ValueLayout
from tfos.collectives.memory import ReusedMemory
from tfos.collectives.messages import BROUGHT, LAYOUT, MADE, ArrayFetch, CollectiveCall
from tfos.collectives.offers import CallOffer, Offers
from tfos.errors import CollectiveError, SettingsError

Arrays: TypeAlias = Sequence[Array]
Result = TypeVar("Result")
Op = Literal["sum", "mean", "min", "max"]
DEFAULT_TIMEOUT_S = 600.0
FEW_BYTES = 64 << 10
"""Up to this size, each rank fetches everything from everyone, in one round trip."""
PIECE_BYTES = 4 << 20
"""Size of one fetch while a slice is reduced: smaller ones wait for replies more often, larger
ones have left the processor's cache before they are added."""
PIECES_BYTES = 32 << 20
"""Total size of the pieces that are fetched at once, above 8 ranks; as many are added meanwhile.
Without it, 100 ranks would take 800 MB, and a rank would keep no memory for its next call."""
_LEAST_PIECE_BYTES = 64 << 10
"""Smallest piece, above 512 ranks: a smaller one mostly waits for its reply."""
_ADD: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
}

__all__ = ["DEFAULT_TIMEOUT_S", "Op", "RankGroup", "RankPeer"]


class RankGroup:
    """The ranks of one run, as seen by one of them.

    Args:
        identity: identity of this process; its rank is the rank in the group.
        credentials: the run's secret.
        offers: answers the peers; its `handle` serves this process's listener.
        peers: the other ranks' processes, by rank; ranks go from 0 to `len(peers)`.
    """

    def __init__(
        self,
        identity: Identity,
        credentials: Credentials,
        offers: Offers,
        peers: Mapping[int, RankPeer],
    ) -> None:
        self.rank = identity.rank
        self.size = len(peers) + 1
        self._others = sorted(peers)
        self._offers = offers
        self._links = PeerLinks(identity, credentials, peers)
        self._memory = ReusedMemory()
        self._number = 0
        self._broken: CollectiveError | None = None
        self._deadline_s = 0.0
        self._timeout_s = DEFAULT_TIMEOUT_S

    def barrier(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return when every rank has made this call.

        Args:
            timeout_s: seconds to wait for the slowest rank.

        Raises:
            CollectiveError: a rank is lost, in another call, or late.
        """
        self._run("barrier", timeout_s, lambda call: self._gather(call, *layout.taken_apart([])))

    def allgather(self, value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
        """Return the values of all ranks, in rank order; shapes and dtypes may differ.

        Args:
            value: numbers or numpy arrays of any shape, alone or in a list, tuple or dict.
            timeout_s: seconds to wait for the slowest rank.

        Raises:
            SettingsError: the value contains something else, or too many arrays.
            CollectiveError: a rank is lost, in another call, or late.
        """
        found = layout.taken_apart(value)
        layout.check_tells(found[0])
        return self._run("allgather", timeout_s, lambda call: self._gather(call, *found))

    def broadcast(
        self, value: Any = None, root: int = 0, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Any:
        """Return one rank's value.

        Args:
            value: the root's value, as for `allgather`; those of other ranks are ignored.
            root: rank whose value is returned.
            timeout_s: seconds to wait for the slowest rank.

        Raises:
            SettingsError: there is no such rank, or the root's value contains something else, or
                too many arrays.
            CollectiveError: a rank is lost, in another call, or late.
        """
        root = _checked_root(root, self.size)
        text = f"broadcast from rank {root}"
        if self.rank == root:
            found = layout.taken_apart(value)
            layout.check_tells(found[0])
            return self._run(text, timeout_s, lambda call: self._send(call, *found))
        return self._run(text, timeout_s, lambda call: self._receive(call, root))

    def allreduce(self, value: Any, op: Op, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Return the sum, mean, minimum or maximum of all ranks' values, on every rank.

        float16 is summed as float32; integers keep their dtype and wrap around as in numpy. All
        ranks get the same bits: sums are taken in rank order.

        Args:
            value: as for `allgather`, with the same shapes and dtypes on all ranks.
            op: "sum", "mean" (of floats), "min" or "max".
            timeout_s: seconds to wait for the slowest rank.

        Raises:
            SettingsError: the value contains something else, or op does not fit it.
            CollectiveError: a rank is lost, in another call, has other shapes, or is late.
        """
        _check_op(op)
        form, arrays = layout.taken_apart(value)
        for each in arrays:
            _check_dtype(op, each.dtype)
        text = f"allreduce {op} of {form}"
        return self._run(text, timeout_s, lambda call: self._reduce(call, form, arrays, op))

    def close(self, reason: str = "has ended") -> None:
        """Leave: later calls of other ranks fail, because this rank has ended."""
        self._offers.end(reason)
        self._links.close()
        self._memory.clear()

    # ---- inside ----

    def _run(
        self, text: str, timeout_s: float, algorithm: Callable[[CollectiveCall], Result]
    ) -> Result:
        if self._broken is not None:
            raise self._broken
        _check_timeout(timeout_s)
        limit_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + limit_s
        call = CollectiveCall(self._number, text)
        self._number += 1
        try:
            self._links.open(self._deadline_s)
            return algorithm(call)
        except BaseException as error:  # even Ctrl-C: ranks are no longer in step
            interrupted = CollectiveError(f"rank {self.rank} was interrupted in {call}")
            self._broken = error if isinstance(error, CollectiveError) else interrupted
            self.close(f"has failed in {call}")  # no peer waits for this rank's fetches
            raise

    def _gather(self, call: CollectiveCall, form: ValueLayout, arrays: Arrays) -> list[Any]:
        offer = CallOffer(call, self._others, layout.encode(form))
        self._offer(offer, arrays)
        forms = self._layouts(call, self._others)
        buffers = {rank: self._memory.take(forms[rank].num_bytes).data for rank in self._others}
        self._fetch(
            [_wanted(call, rank, BROUGHT, 0, buffers[rank], last=True) for rank in self._others]
        )
        own = [each.copy() for each in arrays]
        self._wait(offer)
        return [
            layout.put_together(form, own)
            if rank == self.rank
            else layout.put_together(forms[rank], layout.arrays_of(forms[rank], buffers[rank]))
            for rank in range(self.size)
        ]

    def _send(self, call: CollectiveCall, form: ValueLayout, arrays: Arrays) -> Any:
        offer = CallOffer(call, self._others, layout.encode(form))
        offer.views[MADE] = [bytes_of(each) for each in arrays]  # its own slice among them
        offer.ready[MADE] = form.num_bytes
        self._offer(offer, arrays)
        # The root needs nothing; it asks so that it learns of a rank in another call.
        self._fetch(
            [Wanted(rank, ArrayFetch(call, LAYOUT, 0, 0, last=True)) for rank in self._others]
        )
        self._wait(offer)
        return layout.put_together(form, [each.copy() for each in arrays])

    def _receive(self, call: CollectiveCall, root: int) -> Any:
        form = self._layouts(call, [root])[root]
        data = self._memory.take(form.num_bytes).data
        bounds = layout.bounds(len(data), self.size)
        if len(data) <= FEW_BYTES:
            offer = CallOffer(call, [root])  # the next call could not answer the root
            self._offers.post(offer)
            self._fetch([_wanted(call, root, BROUGHT, 0, data, last=True)])
            self._wait(offer)
            return layout.put_together(form, layout.arrays_of(form, data))
        offer = CallOffer(call, self._others)
        offer.views[MADE] = [data]
        self._offers.post(offer)
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        self._fetch([_wanted(call, root, BROUGHT, start, data[start:stop], last=False)])
        self._finish_slices(offer, data, bounds)
        return layout.put_together(form, layout.arrays_of(form, data))

    def _reduce(self, call: CollectiveCall, form: ValueLayout, arrays: Arrays, op: Op) -> Any:
        """Reduce arrays of one dtype as one; each dtype takes its own call."""
        if not arrays:  # nothing to reduce, but the ranks must meet
            self._gather(call, form, arrays)
        dtypes = sorted({each.dtype.str for each in arrays})
        reduced: dict[int, Array] = {}
        for dtype in dtypes:
            places = [at for at, each in enumerate(arrays) if each.dtype.str == dtype]
            flat = _joined([arrays[at] for at in places])
            made = self._reduce_flat(call, flat, op)
            start = 0
            for at in places:
                stop = start + arrays[at].size
                reduced[at] = made[start:stop].reshape(arrays[at].shape)
                start = stop
            if dtype != dtypes[-1]:
                call = CollectiveCall(self._number, call.text)
                self._number += 1
        return layout.put_together(form, [reduced[at] for at in range(len(arrays))])

    def _reduce_flat(self, call: CollectiveCall, flat: Array, op: Op) -> Array:
        offer = CallOffer(call, self._others)
        made: Array = self._memory.take(flat.nbytes).view(flat.dtype)
        if flat.nbytes <= FEW_BYTES:
            self._offer(offer, [flat])
            self._reduce_slice(call, flat, (0, flat.size), op, made, is_all=True)
            self._wait(offer)
            return made
        offer.views[MADE] = [bytes_of(made)]
        self._offer(offer, [flat])
        bounds = layout.bounds(flat.size, self.size)
        own = bounds[self.rank], bounds[self.rank + 1]
        self._reduce_slice(call, flat, own, op, made[slice(*own)], is_all=False)
        self._finish_slices(offer, bytes_of(made), [bound * flat.itemsize for bound in bounds])
        return made

    def _reduce_slice(
        self,
        call: CollectiveCall,
        flat: Array,
        bounds: tuple[int, int],
        op: Op,
        out: Array,
        *,
        is_all: bool,
    ) -> None:
        """Reduce a slice of `flat` over all ranks into `out`, piece by piece."""
        start, stop = bounds
        step = max(1, _piece_bytes(self.size) // flat.itemsize)
        pieces = [(at, min(at + step, stop)) for at in range(start, stop, step)] or [(start, stop)]
        # The next piece arrives while one is added.
        count = min(step, stop - start)
        taken = self._memory.take(2 * self.size * count * flat.itemsize)
        spare = taken.view(flat.dtype).reshape(2, self.size, count)

        def begun(number: int) -> list[Wanted]:
            first, end = pieces[number]
            wanted = [
                _wanted(
                    call,
                    rank,
                    BROUGHT,
                    first * flat.itemsize,
                    bytes_of(spare[number % 2][rank, : end - first]),
                    last=is_all and number == len(pieces) - 1,
                )
                for rank in self._others
            ]
            self._links.begin(wanted)
            return wanted

        asked = begun(0)
        for number, (first, end) in enumerate(pieces):
            self._links.finish(asked, self._deadline_s, self._timeout_s)
            if number + 1 < len(pieces):
                asked = begun(number + 1)
            rows = [row[: end - first] for row in spare[number % 2]]
            rows[self.rank] = flat[first:end]
            _reduce_rows(rows, op, out[first - start : end - start])

    def _finish_slices(self, offer: CallOffer, data: memoryview, bounds: Sequence[int]) -> None:
        """Let peers fetch this rank's finished slice, fetch those of the others into `data`."""
        self._offers.grow(offer, MADE, len(data))
        self._fetch(
            [
                _wanted(
                    offer.call,
                    rank,
                    MADE,
                    bounds[rank],
                    data[bounds[rank] : bounds[rank + 1]],
                    last=True,
                )
                for rank in self._others
            ]
        )
        self._wait(offer)

    def _layouts(self, call: CollectiveCall, ranks: Sequence[int]) -> dict[int, ValueLayout]:
        wanted = [Wanted(rank, ArrayFetch(call, LAYOUT, 0, 0, last=False)) for rank in ranks]
        self._fetch(wanted)
        return {each.rank: layout.decode(each.data) for each in wanted}

    def _offer(self, offer: CallOffer, arrays: Arrays) -> None:
        views = [bytes_of(each) for each in arrays]
        offer.views[BROUGHT] = views
        offer.ready[BROUGHT] = sum(map(len, views))
        self._offers.post(offer)

    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        self._links.begin(wanted)
        self._links.finish(wanted, self._deadline_s, self._timeout_s)

    def _wait(self, offer: CallOffer) -> None:
        self._offers.wait_fetched(offer, self._deadline_s, self._timeout_s)
        offer.views = [(), ()]  # they would keep the result's memory


def _piece_bytes(num_ranks: int) -> int:
    return max(_LEAST_PIECE_BYTES, min(PIECE_BYTES, PIECES_BYTES // num_ranks))


def _wanted(
    call: CollectiveCall, rank: int, part: int, start: int, into: memoryview, *, last: bool
) -> Wanted:
    return Wanted(rank, ArrayFetch(call, part, start, start + len(into), last), into)


def _check_timeout(timeout_s: Any) -> None:
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise SettingsError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")


def _check_op(op: str) -> None:
    if op not in _ADD:
        raise SettingsError(f"op must be one of {', '.join(_ADD)}, got {op!r}")


def _checked_root(root: Any, size: int) -> int:
    # numpy's, too: np.argmin over what an allgather has brought.
    is_whole = isinstance(root, int | np.integer) and not isinstance(root, bool)
    if not is_whole or not 0 <= root < size:
        raise SettingsError(f"root must be a rank from 0 to {size - 1}, got {root!r}")
    return int(root)


def _check_dtype(op: str, dtype: np.dtype[Any]) -> None:
    if op == "mean" and dtype.kind not in "fc":
        raise SettingsError(f"op='mean' takes floats, got {dtype}; sum and divide")
    if op in ("min", "max") and dtype.kind == "c":
        raise SettingsError(f"complex numbers have no order: op={op!r} takes others, got {dtype}")
    if op == "sum" and dtype.kind == "b":
        raise SettingsError("op='sum' does not count booleans; pass integers, or use op='max'")


def _joined(arrays: Arrays) -> Array:
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return np.concatenate([each.reshape(-1) for each in arrays])


def _reduce_rows(rows: Sequence[Array], op: Op, out: Array) -> None:
    """Reduce rows[rank][element] over ranks, in rank order, into out[element]."""
    add = _ADD[op]
    total = np.empty(out.shape, np.float32) if out.dtype == np.float16 else out
    if len(rows) == 1:
        total[...] = rows[0]
    else:
        add(rows[0], rows[1], out=total, dtype=total.dtype)
    for row in rows[2:]:
        add(total, row, out=total)
    if op == "mean":
        total /= len(rows)
    if total is not out:
        out[...] = total
