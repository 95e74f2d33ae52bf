"""Error feedback of compressed pushes: packs each bucket and keeps what the packing rounds away.

Covers: the memory of packed gradients, error feedback, when what was left out counts.
Does not: know the formats (ps.compression.format) or loops (ps.compression.kernels), send or
retry (ps.client.server_group).
Threads: as ps.client.server_group.

    packed = pack(gradient + left)       once per push: what is sent again has the same bytes
    left   = gradient + left - packed    when its server has applied it, else `left` stays

So for the pushes that a server has applied, what it got plus what is left is the sum of the
gradients. A push that is refused leaves nothing behind. What is left ends with its client: a worker
that is replaced starts with nothing left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np

from ps.client.slices import Slice, slice_by_server, views_per_server
from ps.compression.format import Compression, packed_nbytes
from ps.errors import NonFiniteGradient
from ps.manifest.manifest import Bucket, Layout, Manifest

Array = np.ndarray[Any, Any]


class _Packed(NamedTuple):
    """One bucket's place in the payload of its server."""

    bucket: Bucket
    kind: Compression
    data: Array


class ErrorFeedback:
    """Packs one worker's gradients. Holds 8 bytes per element of a packed group, and the packed.

    Args:
        manifest: what is trained; groups without compression pass through as they are.
        num_servers: number of servers that share the buckets.
    """

    def __init__(self, manifest: Manifest, num_servers: int) -> None:
        from ps.compression import kernels as packing_kernels  # here: most workers do without numba
        from ps.optim import kernels

        self._pack = packing_kernels.pack
        self._count_nonfinite = kernels.count_nonfinite
        groups = manifest.pushed_groups
        self._kinds = {spec.name: spec.compression for spec in groups}
        packing_kernels.warm_client({kind for kind in self._kinds.values() if kind != "none"})
        kernels.warm(("largest_masked", spec.dtype) for spec in groups)
        self._layout = Layout.of(manifest)
        self._left = {
            spec.name: np.zeros(spec.num_elements, np.float32)
            for spec in groups
            if spec.compression != "none"
        }
        self._new_left = {name: np.empty_like(left) for name, left in self._left.items()}
        self._pieces = slice_by_server(self._layout, num_servers)
        self._packed: list[_Packed] = []
        self._memory = {
            piece: self._place(piece)
            for pieces in self._pieces
            for piece in pieces
            if piece.group in self._left
        }

    @classmethod
    def if_needed(cls, manifest: Manifest, num_servers: int) -> Self | None:
        """Return one if any group is compressed.

        Args:
            manifest: has the groups' compression.
            num_servers: number of servers that share the buckets.
        """
        is_needed = any(spec.compression != "none" for spec in manifest.groups)
        return cls(manifest, num_servers) if is_needed else None

    def pack(self, gradients: Mapping[str, Array]) -> None:
        """Pack them for `payloads`; `sending` keeps what that leaves out.

        Raises:
            NonFiniteGradient: in any group; names the first parameter. Nothing has changed.
        """
        for name in self._kinds.keys() - self._left.keys():
            if count := self._count_nonfinite(gradients[name]):
                first = int(np.argmin(np.isfinite(gradients[name])))
                text = f"{count} of {gradients[name].size} values are NaN or infinite"
                raise self._refused(text, name, first)
        for bucket, kind, data in self._packed:
            part = slice(bucket.start, bucket.stop)
            left, new_left = self._left[bucket.group], self._new_left[bucket.group]
            try:
                self._pack(kind, gradients[bucket.group][part], left[part], new_left[part], data)
            except NonFiniteGradient as error:
                first = bucket.start + int(error.details["at"])
                raise self._refused(error.message, bucket.group, first) from None

    def payloads(self, gradients: Mapping[str, Array]) -> Sequence[Sequence[memoryview]]:
        """Return what to send to each server; packed groups as `pack` has left them."""
        return [
            [
                self._memory[piece].data if piece in self._memory else view
                for piece, view in zip(pieces, views, strict=True)
            ]
            for pieces, views in zip(
                self._pieces, views_per_server(gradients, self._pieces), strict=True
            )
        ]

    @contextmanager
    def sending(self, num_applied: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Send what was packed in this block; what it left out counts where it was applied.

        Args:
            num_applied: how many gradients each server has applied, as last reported.
        """
        before = num_applied()
        try:
            yield
        finally:
            pairs = enumerate(zip(num_applied(), before, strict=True))
            self._keep([server for server, (now, last) in pairs if now > last])

    def _keep(self, servers: Sequence[int]) -> None:
        if len(servers) == len(self._pieces):
            self._left, self._new_left = self._new_left, self._left
            return
        for piece in (piece for server in servers for piece in self._pieces[server]):
            if piece in self._memory:
                part = slice(piece.start, piece.stop)
                self._left[piece.group][part] = self._new_left[piece.group][part]

    def _place(self, piece: Slice) -> Array:
        """Give a piece memory, one bucket after the other."""
        kind = self._kinds[piece.group]
        buckets = [
            bucket
            for bucket in self._layout.buckets
            if bucket.group == piece.group and piece.start <= bucket.start < piece.stop
        ]
        sizes = [packed_nbytes(kind, bucket.num_elements) for bucket in buckets]
        memory = np.zeros(sum(sizes), np.uint8)
        stop = 0
        for bucket, size in zip(buckets, sizes, strict=True):
            self._packed.append(_Packed(bucket, kind, memory[stop : stop + size]))
            stop += size
        return memory

    def _refused(self, text: str, group: str, first: int) -> NonFiniteGradient:
        name = self._layout.group(group).param_at(first)
        return NonFiniteGradient(
            f"{text}, the first in {name!r} of group {group!r}; nothing of this push was sent",
            {"group": group, "param": name},
        )
