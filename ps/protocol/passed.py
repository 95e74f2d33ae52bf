"""Passed rendezvous: their answers, kept by each worker, and as the payload of BringAnswers.

Covers: how much a worker keeps, the payload's index and its checks.
Does not: say which answers go first (ps.protocol.kept_answers), send them (ps.client.rendezvous),
answer others with them (ps.server.rendezvous).
Pure; no threads.

    payload = index, then the values of all its keys one after the other
    index   = msgpack [[[key, ranks, sizes], ...]]; without ranks the values are no longer kept

Answers otherwise live in the memory of ps:0 alone. When it is started again, a worker that has not
passed a rendezvous would wait for those that have, and they for it at a later one.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec

from ps import codec
from ps.errors import PSSettingsError, ShapeError
from ps.protocol import messages
from ps.protocol.kept_answers import KeptAnswers
from ps.protocol.messages import (
    MAX_OPEN_BYTES,
    MAX_RANK,
    MAX_VALUE_BYTES,
    Rank,
    RendezvousKey,
    RendezvousValues,
)
from rpc.errors import UNREADABLE

MAX_KEPT_BYTES = 4 << 20
"""Limit of one worker: some hundred epochs of ten workers with metrics of a few hundred bytes each.
All workers bring them at once, to a server that has just started."""
MAX_KEPT_ANSWERS = 1024
"""Equal to what ps:0 keeps itself."""
MAX_KNOWN_KEYS = 8192
"""Keys that are known to be passed, most of them without their values."""
_BYTES_PER_RANK = 8

_Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANK + 1)]
_Sizes = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUE_BYTES)], ...],
    msgspec.Meta(max_length=MAX_RANK + 1),
]


class PassedKey(msgspec.Struct, frozen=True, array_like=True):
    """A rendezvous that a worker has passed."""

    key: RendezvousKey
    ranks: _Ranks = ()
    """Ranks of the workers that brought values, ascending; empty: the values are no longer kept."""
    sizes: _Sizes = ()
    """Size of each value, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Size of all values."""
        return sum(self.sizes)

    def values(self, payload: memoryview) -> dict[int, bytes] | None:
        """Return what each rank brought; None: it is no longer kept."""
        return RendezvousValues(self.ranks, self.sizes).values(payload) if self.ranks else None


class _Index(msgspec.Struct, frozen=True, array_like=True):
    keys: Annotated[tuple[PassedKey, ...], msgspec.Meta(max_length=MAX_KNOWN_KEYS)]


class PassedRendezvous:
    """The rendezvous that one worker has passed.

    The keys stay longer than the answers: a worker that uses one is refused, and does not wait.
    """

    def __init__(self) -> None:
        self._passed: KeptAnswers[tuple[PassedKey, bytes]] = KeptAnswers(
            max_answers=MAX_KEPT_ANSWERS, max_bytes=MAX_KEPT_BYTES, max_keys=MAX_KNOWN_KEYS
        )

    def add(self, key: str, answer: RendezvousValues, values: bytes) -> None:
        """Keep an answer.

        Args:
            key: name of the rendezvous.
            answer: ranks and sizes.
            values: the values one after the other.
        """
        passed = PassedKey(key, answer.ranks, answer.sizes)
        nbytes = len(key) + _BYTES_PER_RANK * len(passed.ranks) + passed.num_bytes
        self._passed.keep(key, (passed, values), nbytes)

    def request(self) -> tuple[messages.BringAnswers, list[bytes]] | None:
        """Return the request that brings all of them, and its payload; None: there are none."""
        keys: list[PassedKey] = []
        buffers: list[bytes] = []
        for key, answer in self._passed:
            passed, values = answer or (PassedKey(key), b"")
            keys.append(passed)
            if values:
                buffers.append(values)
        if not keys:
            return None
        index = messages.encode(_Index(tuple(keys)))
        return messages.BringAnswers(len(index)), [index, *buffers]


def read_index(data: bytes, values_nbytes: int, num_workers: int) -> tuple[PassedKey, ...]:
    """Return the keys that a worker brings, after all checks: their values are read after it.

    Args:
        data: the encoded index.
        values_nbytes: bytes that follow it.
        num_workers: number of workers in the cluster.

    Raises:
        PSSettingsError: it is no index, or has ranks that do not exist or too many bytes of a key.
        ShapeError: the values have another size than it says.
    """
    try:
        index = codec.msgpack(data, _Index).keys
    except UNREADABLE as error:
        raise PSSettingsError(f"not an index of passed rendezvous: {error}") from error
    for each in index:
        ranks = each.ranks
        is_ascending = all(low < high for low, high in itertools.pairwise(ranks))
        is_known = not ranks or ranks[-1] < num_workers
        if len(ranks) != len(each.sizes) or not is_ascending or not is_known:
            raise PSSettingsError(
                f"rendezvous {each.key!r} is brought with the ranks {ranks} and {len(each.sizes)} "
                f"sizes; ranks ascend, are below {num_workers} and have one size each"
            )
        if each.num_bytes > MAX_OPEN_BYTES:
            raise PSSettingsError(
                f"rendezvous {each.key!r} is brought with {each.num_bytes} bytes, the limit is "
                f"{MAX_OPEN_BYTES}"
            )
    announced = sum(each.num_bytes for each in index)
    if announced != values_nbytes:
        raise ShapeError(
            f"the index of passed rendezvous announces {announced} bytes of values, "
            f"{values_nbytes} follow"
        )
    return index
