"""Gradient clipping: who does it, and the part of the worker.

Covers: what Keras does with clipvalue, clipnorm and global_clipnorm, on flat buffers.
Does not: import numba, because workers run this; talk to servers (ps.client.two_round_push), clip
on them (ps.dense.shard, ps.server.reduction).
Threads: one `Clipper` per caller.

    mode              clipvalue       clipnorm, global_clipnorm
    async, ssp        the worker      the worker: norms belong to the gradient of the whole model
    sync, one worker  the server      the worker: its gradient is the mean
    sync, several     the server      the servers: norms of the mean, which no worker has
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ps.manifest.manifest import Layout, Manifest
from ps.optim.norms import Norms, clip_of

Array = np.ndarray[Any, Any]


def servers_take_norms(manifest: Manifest, *, num_workers: int) -> bool:
    """Whether the reduced gradient is clipped by norm, which needs the servers."""
    return manifest.has_barrier and num_workers > 1 and Norms(manifest).size > 0


class Clipper:
    """Clips a worker's own gradients before they are pushed.

    Args:
        manifest: what is trained; groups without clipping pass through untouched.
        num_workers: of the whole cluster.
    """

    def __init__(self, manifest: Manifest, *, num_workers: int) -> None:
        self._norms = Norms(manifest)
        self._takes_norms = not servers_take_norms(manifest, num_workers=num_workers)
        self._limits: dict[str, float] = {}
        for spec in manifest.groups:
            clip = clip_of(spec.rule)
            if clip is not None and clip[0] == "clipvalue" and not manifest.has_barrier:
                self._limits[spec.name] = clip[1]
        layout = Layout.of(manifest)
        mine = {*self._limits, *(self._norms.groups if self._takes_norms else ())}
        self._out = {
            name: np.empty(layout.group(name).num_elements, layout.group(name).numpy_dtype)
            for name in mine
        }

    def clip(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients as they are to be pushed.

        Args:
            gradients: by group name; flat, of the group's dtype and size. They are not changed.

        Returns:
            The same arrays for groups that are not clipped; for the others buffers of this object,
            which the next call overwrites.
        """
        clipped = dict(gradients)
        for name, limit in self._limits.items():
            clipped[name] = np.clip(gradients[name], -limit, limit, out=self._out[name])
        if self._takes_norms:
            squares = self._norms.zeros()
            for name in self._norms.groups:
                self._norms.add(squares, name, 0, gradients[name])
            for name in self._norms.groups:
                self._norms.scale(squares, name, 0, gradients[name], self._out[name])
                clipped[name] = self._out[name]
        return clipped
