"""A whole server without sockets and threads: one request at a time, cut wherever one likes.

A request's sender is gone as soon as its answer takes time, so a push that waits for others leaves
the handler at once, and its retry shows whether it still waits. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ps.checkpoint.choice import RestoreOptions, read_manifest
from ps.checkpoint.reader import open_chain
from ps.client.saving.saver import Saver
from ps.client.server_group import Answer
from ps.config import ServerSettings
from ps.consistency.policy import OnLost
from ps.errors import (
    NonFiniteGradient,
    PSError,
    PSSettingsError,
    RequestTimeout,
    ServerPhaseError,
    StaleGeneration,
    WorkerLost,
)
from ps.manifest.manifest import Add, GroupSpec, Hyper, Manifest, ParamSpec
from ps.protocol import messages
from ps.protocol.messages import BatchName, Number
from ps.server.handlers import Service
from rpc.auth.handshake import Identity, Role
from rpc.errors import PeerGone, RpcError
from tests.support.sim.gate_model import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    NUM_WORKERS,
    Kind,
    Mode,
    Name,
    Outcome,
)
from tests.support.tables import table

HYPER = Hyper(0.5)
ELEMENTS = BUCKET_BYTES // 4
WHOLE = 1 << 30
PUSHES, EVENTS, ROWS, LOOKUPS = range(1, 5)
"""Sessions of one worker: its clients for pushes, membership, gradients of rows and lookups."""

_OUTCOMES: tuple[tuple[type[Exception], Outcome], ...] = (
    (StaleGeneration, "stale"),
    (WorkerLost, "lost"),
    (ServerPhaseError, "phase"),
    (NonFiniteGradient, "nan"),
    (PSSettingsError, "settings"),
    (RequestTimeout, "timeout"),
)


class CutCall:
    """A request of which `delivered` bytes come, and whose sender is not there any more."""

    def __init__(self, peer: Identity, meta: bytes, payload: bytes, delivered: int) -> None:
        self.peer = peer
        self.meta = meta
        self.payload_bytes = self.remaining = len(payload)
        self.answered = False
        self.meta_back = b""
        self._payload = payload
        self._delivered = delivered

    def read_into(self, view: memoryview) -> None:
        start = self.payload_bytes - self.remaining
        if start + len(view) > self._delivered:
            raise PeerGone("cut")
        view[:] = self._payload[start : start + len(view)]
        self.remaining -= len(view)

    def discard_rest(self) -> None:
        if self._delivered < self.payload_bytes:
            raise PeerGone("cut")
        self.remaining = 0

    def send(self, buffers: Sequence[Any]) -> None:
        pass

    def reply(self, meta: bytes, buffers: Sequence[Any] = ()) -> None:
        self.answered = True
        self.meta_back = meta

    def peer_gone(self) -> bool:
        return True


class _Driver:
    """Asks the server and stays for the answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def ask(
        self, request: messages.Request, answer: type[Answer], *, timeout_s: float
    ) -> list[Answer]:
        call = CutCall(Identity(Role.DRIVER, 0), messages.encode(request), b"", WHOLE)
        call.peer_gone = bool  # type: ignore[method-assign]
        self._service.handle(call)  # type: ignore[arg-type]
        return [messages.decode_reply(call.meta_back, answer)]

    def fetch_manifest(self, *, timeout_s: float) -> Manifest:
        manifest: Manifest = self._service.life.loaded().manifest
        return manifest

    @property
    def generations(self) -> tuple[int, ...]:
        return (0,)


class GateBed:
    """One server of three workers; requests in, outcomes out."""

    def __init__(self, mode: Mode, bound: int, on_lost: OnLost) -> None:
        params = (ParamSpec("w", (NUM_BUCKETS * ELEMENTS,)),)
        self.manifest = Manifest(
            groups=(GroupSpec("g", "float32", Add(), params),),
            tables=(table(segments=1),),
            bucket_bytes=BUCKET_BYTES,
            consistency=mode,
            reduction="sum",
            staleness_bound=bound,
        )
        self.digest = self.manifest.hash()
        self.service = Service(
            ServerSettings(rank=0, num_servers=1, num_workers=NUM_WORKERS, on_lost=on_lost),
            open_connections=int,
        )
        encoded = self.manifest.encode()
        zeros = bytes(NUM_BUCKETS * BUCKET_BYTES)
        self.ask(0, 0, messages.Seed(self.digest, len(encoded)), encoded + zeros)

    @property
    def shard(self) -> Any:
        return self.service.life.loaded()

    def ask(
        self,
        rank: int,
        generation: int,
        request: messages.Request,
        payload: bytes = b"",
        delivered: int = WHOLE,
    ) -> Outcome:
        identity = Identity(Role.WORKER, rank, generation)
        call = CutCall(identity, messages.encode(request), payload, delivered)
        try:
            self.service.handle(call)  # type: ignore[arg-type]
        except RpcError:
            return "gone"
        except PSError as error:
            found = [outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)]
            return found[0] if found else "gone"
        assert call.answered
        return "ack"

    def push(self, name: Name, kind: Kind, delivered: int = WHOLE) -> Outcome:
        gradient = np.zeros((NUM_BUCKETS, ELEMENTS), np.float32)
        gradient[:, name.rank] = 1.0
        if kind == "nan":
            gradient[NUM_BUCKETS // 2, name.rank] = np.nan
        is_null = kind == "null"
        request = messages.Push(
            self.digest,
            Number(PUSHES, name.sequence),
            1,
            None if is_null else HYPER,
            pull=True,
            null=is_null,
            wait_s=60.0,
        )
        payload = b"" if is_null else gradient.tobytes()
        return self.ask(name.rank, name.generation, request, payload, delivered)

    def change(self, rank: int, generation: int, event: str, sequence: int) -> Outcome:
        made = {"join": messages.Join, "leave": messages.Leave, "finish": messages.Finish}
        return self.ask(rank, generation, made[event](Number(EVENTS, sequence)))

    def push_rows(
        self, rank: int, generation: int, sequence: int, batch: int, *, is_whole: bool = True
    ) -> Outcome:
        request = messages.PushRows(
            self.digest,
            Number(ROWS, sequence),
            HYPER,
            (0,),
            BatchName(LOOKUPS, batch) if batch else None,
        )
        ids = np.array([1, 1, rank], np.int64).tobytes()
        payload = ids + np.ones(4, np.float32).tobytes()
        return self.ask(rank, generation, request, payload, WHOLE if is_whole else len(ids))

    def give_up(self, rank: int, generation: int, sequence: int, batch: int) -> Outcome:
        name = BatchName(LOOKUPS, batch)
        request = messages.PushRows(self.digest, Number(ROWS, sequence), HYPER, (), name)
        return self.ask(rank, generation, request)

    def save(self, directory: Path) -> None:
        """Commit step 1 of a directory."""
        saver = Saver("test")
        try:
            saver.save(
                directory, 1, manifest=self.manifest, servers=_Driver(self.service), timeout_s=60.0
            )
        finally:
            saver.close()

    def restored(self, directory: Path) -> GateBed:
        """Another server, filled from that step."""
        bed = GateBed.__new__(GateBed)
        bed.manifest, bed.digest = self.manifest, self.digest
        bed.service = Service(self.service.settings, open_connections=int)
        like = RestoreOptions(manifest=self.manifest)
        chain = open_chain(directory, read_manifest(directory, 1), bed.service.settings)
        assert bed.service.serve(bed.service.read(chain, like, resumes=False))
        return bed

    def look_up(self, rank: int, generation: int, batch: int, known: set[int]) -> Outcome:
        request = messages.LookupBatch(
            self.digest, Number(LOOKUPS, batch), (0,), tuple(sorted(known))
        )
        ids = np.array([1, 1, rank], np.int64).tobytes()
        return self.ask(rank, generation, request, ids)

    def counts(self) -> Any:
        """Of [bucket, worker]."""
        dense = self.shard.dense
        found = [
            np.frombuffer(dense.value_bytes(bucket.id), np.float32)[:NUM_WORKERS]
            for bucket in dense.buckets
        ]
        return np.array(found)

    def rows(self) -> list[float]:
        out = np.empty((NUM_WORKERS, 4), np.float32)
        self.shard.tables.tables[0].lookup(0, np.arange(NUM_WORKERS), out)
        return [float(value) for value in out[:, 0]]
