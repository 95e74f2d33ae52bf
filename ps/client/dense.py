"""A worker's dense parameters: the flat buffers, cut per server, pulled and pushed.

Covers: what follows from a manifest at the client, slicing, clipping and packing before a push,
combining the servers' answers.
Does not: number, repeat or wait for requests (ps.client.server_group, ps.client.retry), tables
(ps.client.tables) or what of them travels with a push (ps.client.row_exchange).
Runs in: worker processes.
Threads: one at a time; ps.client holds its lock around every call.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ps.client.channel import OutgoingCall
from ps.client.compile_wait import wait_compiled
from ps.client.error_feedback import ErrorFeedback
from ps.client.row_exchange import OutgoingRows
from ps.client.server_group import ServerGroup, joined
from ps.client.slices import (
    Gradient,
    Slice,
    check_arrays,
    slice_by_server,
    views_per_server,
    whole,
)
from ps.client.two_round_push import ClippedPush
from ps.errors import NonFiniteGradient, PSError, PSSettingsError, ServerPhaseError
from ps.exactly_once import MAX_SEQUENCE
from ps.manifest.manifest import Hyper, Layout, Manifest
from ps.manifest.shares import check_seed
from ps.metadata import AttachedMetadata
from ps.optim.clipping import Clipper
from ps.protocol import messages
from ps.protocol.descriptions import (
    are_filled,
    different_seeds,
    seeds_to_replace,
    updates_before,
)
from ps.protocol.messages import MAX_MANIFEST_BYTES, Ack, Description, Number
from rpc.client.connection import Buffer

Array = np.ndarray[Any, Any]


class DenseClient:
    """The dense groups of the servers' manifest; belongs to a PSClient.

    Args:
        servers: the links to the servers.
        num_workers: number of workers in the cluster.
        pushes: whether the servers take gradients of this client; others need nothing to pack with.
    """

    def __init__(self, servers: ServerGroup, *, num_workers: int, pushes: bool) -> None:
        self.layout = Layout((), ())
        self.pieces: tuple[tuple[Slice, ...], ...] = ()
        self._servers = servers
        self._num_workers = num_workers
        self._pushes = pushes
        self._manifest: Manifest | None = None
        self._hash = ""
        self._clipper: Clipper | None = None
        self._clipped_push: ClippedPush | None = None
        self._packer: ErrorFeedback | None = None

    @property
    def manifest(self) -> Manifest:
        """What is trained; raises ServerPhaseError before `adopt`."""
        if self._manifest is None:
            raise ServerPhaseError(
                "this client knows no parameters yet; call seed() or attach() first"
            )
        return self._manifest

    @property
    def num_rounds(self) -> int:
        """Round trips of a push."""
        return 1 if self._clipped_push is None else 2

    def known_hash(self) -> str:
        """Return the manifest's hash; raises as `manifest`."""
        return self._hash or self.manifest.hash()

    def adopt(self, manifest: Manifest, digest: str) -> None:
        """Use these parameters from now on.

        Args:
            manifest: what the servers serve.
            digest: its hash.
        """
        self._manifest = manifest
        self._hash = digest
        self._servers.has_barrier = manifest.has_barrier
        self.layout = Layout.of(manifest)
        self.pieces = slice_by_server(self.layout, len(self._servers.links))
        self._clipper = Clipper.if_needed(manifest, num_workers=self._num_workers)
        self._clipped_push = ClippedPush.if_needed(
            self._servers, manifest, num_workers=self._num_workers
        )
        num_servers = len(self._servers.links)
        self._packer = ErrorFeedback.if_needed(manifest, num_servers) if self._pushes else None

    def seed(self, manifest: Manifest, values: Mapping[str, Array], timeout_s: float | None) -> int:
        """Give the servers their manifest and first values. Returns and raises as PSClient.seed.

        Args:
            manifest: groups and tables of the model.
            values: per group the flat buffer, [num_elements] of its dtype.
            timeout_s: for the values to be brought; None: the client's.
        """
        layout, frozen = Layout.of(manifest), Layout.frozen(manifest)
        check_arrays(Layout.whole(manifest), values, "values")
        encoded = manifest.encode()
        if len(encoded) > MAX_MANIFEST_BYTES:
            raise PSSettingsError(
                f"the manifest has {len(encoded)} bytes, limit {MAX_MANIFEST_BYTES}; "
                "shorten the parameters' names"
            )
        num_servers = len(self._servers.links)
        check_seed(manifest, num_servers=num_servers, manifest_bytes=len(encoded))
        self._servers.check_size(self._describe())
        wait_compiled(self._servers, manifest, timeout_s=self._servers.times.timeout_s)
        # Again: from here on no server takes what an older attempt brings.
        replaced = seeds_to_replace(self._describe())
        digest, seed_id = manifest.hash(), 1 + secrets.randbelow(MAX_SEQUENCE)
        pairs = zip(
            slice_by_server(frozen, num_servers), slice_by_server(layout, num_servers), strict=True
        )
        pieces = [(*first, *rest) for first, rest in pairs]
        calls = [
            OutgoingCall(
                link, messages.Seed(digest, len(encoded), seed_id, other), [encoded, *views]
            )
            for link, other, views in zip(
                self._servers.links, replaced, views_per_server(values, pieces), strict=True
            )
        ]
        answers = self._servers.answers(calls, Description, timeout_s=timeout_s)
        if not are_filled(answers):
            raise ServerPhaseError(
                f"{different_seeds(answers)}: another process of the chief seeds them at the same "
                "time; call seed() once"
            )
        return updates_before(answers, seed_id)

    def _describe(self) -> list[Description]:
        return self._servers.ask(messages.Describe(), Description)

    def pull(
        self,
        into: Mapping[str, Array],
        *,
        averages: bool,
        timeout_s: float | None,
    ) -> Ack:
        """Fill the arrays with the newest values, or their moving averages where there are any.

        Args:
            into: per group the flat buffer, [num_elements] of its dtype; filled.
            averages: read moving averages instead of values.
            timeout_s: for the values to come; None: the client's.
        """
        request = messages.Pull(self.known_hash(), averages)
        check_arrays(self.layout, into, "into", writable=True)
        views = views_per_server(into, self.pieces)
        calls = [
            OutgoingCall(link, request, (), views[link.server]) for link in self._servers.links
        ]
        return joined(self._servers.answers(calls, Ack, timeout_s=timeout_s))

    def pull_frozen(self, manifest: Manifest, into: Mapping[str, Array], timeout_s: float) -> None:
        """Fill the arrays with the values of frozen groups. Raises as PSClient.pull_frozen.

        Args:
            manifest: has the frozen groups.
            into: per frozen group the flat buffer, [num_elements] of its dtype; filled.
            timeout_s: seconds until RequestTimeout.
        """
        layout = Layout.frozen(manifest)
        check_arrays(layout, into, "into", writable=True)
        request = messages.PullFrozen(manifest.frozen_hash())
        pieces = slice_by_server(layout, len(self._servers.links))
        calls = [
            OutgoingCall(link, request, into=own)
            for link, own in zip(self._servers.links, views_per_server(into, pieces), strict=True)
        ]
        self._servers.answers(calls, Ack, timeout_s=timeout_s)

    def push(  # noqa: PLR0913 - one for each part of a push
        self,
        grads: Mapping[str, Gradient] | None,
        into: Mapping[str, Array] | None,
        hyper: Hyper | None,
        rows: int,
        lag: int = 0,
        metadata: AttachedMetadata | None = None,
        tables: OutgoingRows | None = None,
    ) -> Ack:
        """Push a gradient, or none, and fill `into` if it is given. Raises as PSClient.push.

        Args:
            grads: per group the flat gradient, [num_elements] of its dtype, or its parts; None: a
                null push.
            into: per group the flat buffer, filled with fresh values; None: no values come back.
            hyper: learning rate and further scalars; None for a null push.
            rows: rows that the gradient is the mean of.
            lag: steps computed since the values were pulled.
            metadata: saved with the parameters that contain this push; None: none.
            tables: rows that the push takes along and brings back; None: none.
        """
        digest = self.known_hash()
        pulls, is_null = into is not None, grads is None
        part = msgspec.UNSET if tables is None else tables.part

        def request(number: Number) -> messages.Changing:
            return messages.Push(
                digest, number, rows, hyper, pulls, is_null, 0.0, lag, metadata, part
            )

        intos: Sequence[Sequence[memoryview]] = ()
        if into is not None:
            check_arrays(self.layout, into, "into", writable=True)
            intos = views_per_server(into, self.pieces)
        payloads: Sequence[Sequence[Buffer]] = ()
        packer: ErrorFeedback | None = None
        if grads is not None:
            check_arrays(self.layout, grads, "grads")
            if self._clipper is not None:
                grads = self._clipper.clip(whole(grads))
            packer = self._packer
            payloads = (
                views_per_server(grads, self.pieces)
                if packer is None
                else self._packed(packer, whole(grads), tables)
            )
        in_rounds = self._clipped_push
        change = in_rounds.change if in_rounds else self._servers.change
        if tables is not None:
            payloads = tables.around(payloads)
            if in_rounds is None:
                intos = tables.behind(intos)
            else:
                change = partial(in_rounds.change, behind=tables.intos)
        num_applied = (in_rounds or self._servers).num_applied
        with contextlib.nullcontext() if packer is None else packer.sending(num_applied):
            acks = change(request, payloads=payloads, intos=intos)
        return joined(acks)

    def assign(self, values: Mapping[str, Array]) -> None:
        """Replace the values."""
        digest = self.known_hash()
        check_arrays(self.layout, values, "values")
        self._servers.change(
            lambda number: messages.Assign(digest, number),
            payloads=views_per_server(values, self.pieces),
        )

    def _packed(
        self, packer: ErrorFeedback, grads: Mapping[str, Array], tables: OutgoingRows | None
    ) -> Sequence[Sequence[memoryview]]:
        """Pack; a gradient that cannot be packed counts as a null push, so barriers stay whole."""
        try:
            packer.pack(grads)
        except NonFiniteGradient:
            with contextlib.suppress(PSError):  # the refusal is the news
                self.push(None, None, None, 0, tables=tables and tables.given_up())
            raise
        return packer.payloads(grads)
