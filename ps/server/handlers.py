"""Request handlers of a parameter server: one method per type of request.

Covers: decoding, permission, seeding, membership, rendezvous, checkpoints, statistics.
Does not: listen (ps.server), change phases (ps.server.lifecycle), move gradients (ps.server.shard).
Runs in: PS processes.
Threads: `handle` is called by one thread per connection; what it shares guards itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ps import metadata
from ps.checkpoint.choice import RestoreOptions, manifest_to_serve, read_manifest, steps_after
from ps.checkpoint.reader import ChainFiles, open_chain
from ps.checkpoint.storage import OpenStorage, storage_at
from ps.checkpoint.tables.restore import saved_segments
from ps.config import ServerSettings
from ps.consistency.gate import Event
from ps.consistency.modes import make_policy
from ps.dense.frozen import FrozenValues
from ps.dense.shard import DenseShard
from ps.errors import (
    ManifestMismatch,
    PSSettingsError,
    ServerPhaseError,
    ShapeError,
    StaleGeneration,
)
from ps.exactly_once import SessionRecord
from ps.kernels_ahead import KernelsAhead
from ps.manifest.diff import manifest_differences
from ps.manifest.manifest import Manifest, WorkerRank
from ps.manifest.shares import check_pulls, shares
from ps.protocol import messages
from ps.protocol.messages import MAX_VALUE_BYTES, Ack, RendezvousValues
from ps.protocol.passed import read_index
from ps.protocol.permissions import (
    ServerPhase,
    changes_state,
    check_caller,
    check_phase,
    is_allowed,
    name_of,
)
from ps.server.lifecycle import Lifecycle
from ps.server.loss_report import RestorePoint
from ps.server.rendezvous import RendezvousBoard
from ps.server.request import Attempt, attempt_of, request_id
from ps.server.save_restore import Restored, RestoreTurns, ShardSaving, restore_into
from ps.server.shard import ServingShard
from ps.stats.counters import Counters
from ps.stats.server_stats import ServerStats
from ps.tables.table import Table, make_tables
from rpc.errors import SettingsError
from rpc.server.listener import Call


def _event_of(request: messages.Join | messages.Leave | messages.Finish) -> Event:
    if isinstance(request, messages.Join):
        return lambda policy, worker: policy.on_join(worker, request.at_least)
    if isinstance(request, messages.Leave):
        return lambda policy, worker: policy.on_leave(worker)
    return lambda policy, worker: policy.on_finish(worker)


def _read_frozen(call: Call, frozen: FrozenValues) -> None:
    for view in frozen.memory():
        call.read_into(view)


_OF_SHARD: dict[type, Callable[[ServingShard, Call, Any], None]] = {
    messages.Pull: ServingShard.pull,
    messages.Push: ServingShard.push,
    messages.Settle: ServingShard.settle,
    messages.Assign: ServingShard.assign,
    messages.Lookup: ServingShard.answer_tables,
    messages.LookupBatch: ServingShard.answer_tables,
    messages.PushRows: ServingShard.answer_tables,
    messages.Scan: ServingShard.answer_tables,
    messages.LoadRows: ServingShard.answer_tables,
}
"""What a loaded shard answers on its own."""


class Service:
    """The handler behind one server's listener.

    Args:
        settings: settings of this server.
        open_connections: returns how many connections are open, for the counters.
        refuse_if_replaced: raises if a newer process serves this rank; None: nothing is checked.
        make_room: raises SettingsError if `per_worker` connections of each worker do not fit.
        open_storage: returns the storage of a checkpoint root.
        job: the cluster's id, as in its checkpoints; empty: unknown.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        open_connections: Callable[[], int],
        refuse_if_replaced: Callable[[], None] | None = None,
        make_room: Callable[..., None] = lambda **_: None,
        open_storage: OpenStorage = storage_at,
        job: str = "",
    ) -> None:
        self.settings = settings
        self._job = job
        self._refuse_if_replaced = refuse_if_replaced
        self._make_room = make_room
        self.life = Lifecycle(settings)
        self._open_connections = open_connections
        self._counters = Counters()
        self._rendezvous = RendezvousBoard(settings.num_workers)
        self._open_storage = open_storage
        self._saving = ShardSaving(settings.rank, open_storage)
        self._restored: messages.Restore | None = None
        self._restores = RestoreTurns()
        self._restore_point = RestorePoint()
        self._kernels = KernelsAhead(settings.rank)
        self._handlers: dict[type, Callable[[Call, Any], None]] = {
            messages.Describe: self._describe,
            messages.FetchManifest: self._fetch_manifest,
            messages.Compile: self._compile,
            messages.Seed: self._seed,
            messages.PullFrozen: self._pull_frozen,
            messages.Join: self._change_membership,
            messages.Leave: self._change_membership,
            messages.Finish: self._change_membership,
            messages.JoinRendezvous: self._join_rendezvous,
            messages.BringAnswers: self._bring_answers,
            messages.SetMetadata: self._set_metadata,
            messages.FetchMetadata: self._fetch_metadata,
            messages.TakeSnapshot: self._take_snapshot,
            messages.Save: self._save,
            messages.Restore: self._restore,
            messages.FetchStats: self._fetch_stats,
            messages.Fence: self._fence,
            messages.Lose: self._lose,
            messages.StopServer: self._stop,
        }

    def handle(self, call: Call) -> None:
        """Answer one request.

        Raises:
            PSError: becomes the error frame that the client gets.
        """
        self._counters.begin_call()
        started_s = time.perf_counter()
        name, failed, life = "", True, self.life
        try:
            if self._refuse_if_replaced is not None:
                self._refuse_if_replaced()
                # Again before the answer: the server may be frozen and replaced meanwhile.
                call.before_reply = self._refuse_if_replaced
            request = messages.decode_request(call.meta)
            if not is_allowed(request, call.peer, self.settings.num_workers, life.phase):
                check_caller(request, call.peer, self.settings.num_workers)
                name = str(request.__struct_config__.tag)
                if life.phase is ServerPhase.RESTORING:
                    life.wait_restored(call.peer_gone)
                check_phase(request, self.settings.rank, life.phase, life.reason)
            name = str(request.__struct_config__.tag)
            of_shard = _OF_SHARD.get(type(request))
            if of_shard is not None:
                of_shard(life.shard or life.loaded(), call, request)
            else:
                # A shard refuses replaced workers itself, as it begins a push.
                if changes_state(request) and (attempt := attempt_of(call.peer)) is not None:
                    life.hear(attempt)
                self._handlers[type(request)](call, request)
            failed = False
        finally:
            self._counters.end_call(name, time.perf_counter() - started_s, failed=failed)

    def stats(self) -> ServerStats:
        """The counters as they are now."""
        shard = self.life.shard
        base = ServerStats(
            self.settings.rank,
            self.life.phase.value,
            clock=0,
            uptime_s=0.0,
            connections=self._open_connections(),
            open_rendezvous=self._rendezvous.open_now(),
        )
        if shard is not None:
            base = msgspec.structs.replace(
                base,
                clock=shard.gate.clock,
                missing=shard.gate.missing(),
                waiting_lookups=shard.gate.lookups.num_waiting,
                lost_updates=shard.lost_updates,
                restored_step=self._restore_point.step,
                resumed_step=shard.resumed_step,
                lost_s=self._restore_point.seconds,
                parameter_bytes=shard.dense.value_nbytes,
                tables=shard.tables.stats(),
            )
        return self._counters.snapshot(base)

    def worker_lost(self, worker: WorkerRank, generation: int | None) -> None:
        """Stop waiting for the worker anywhere, and fence what is left of it.

        Args:
            worker: rank.
            generation: generation of the lost process; None: the newest known.
        """
        self._rendezvous.lose(worker, lambda: self.life.lose(worker, generation))

    def worker_done(self, worker: WorkerRank) -> None:
        """Stop waiting for the worker anywhere: it has ended in order."""
        self.life.finish(worker)
        self._rendezvous.finish(worker)

    def stop(self, reason: str) -> None:
        """End all waits; what is under way is answered with the reason."""
        self._drain(reason)
        self.life.stop(reason)

    def _drain(self, reason: str) -> None:
        self._rendezvous.end(f"ps:{self.settings.rank} stops: {reason}")
        self.life.drain(reason)

    def _describe(self, call: Call, request: messages.Describe) -> None:
        self.life.wait_until_filled(time.monotonic() + request.wait_s, call.peer_gone)
        described, shard = self.life.describe(), self.life.shard
        if shard is not None:
            saved_as = self._saving.saved_as(shard)
            described = msgspec.structs.replace(described, saved_as=saved_as)
        call.reply(messages.encode(described))

    def _reply_description(self, call: Call, *payload: bytes) -> None:
        call.reply(messages.encode(self.life.describe()), payload)

    def _fetch_manifest(self, call: Call, _request: messages.FetchManifest) -> None:
        self._reply_description(call, self.life.loaded().manifest.encode())

    def _compile(self, call: Call, request: messages.Compile) -> None:
        manifest = self._read_manifest(call, request)
        self._check_room(manifest)
        self._check_share(manifest)
        deadline_s = time.monotonic() + request.wait_s
        took_s = self._kernels.compile(manifest, deadline_s, call.peer_gone)
        call.reply(messages.encode(messages.Compiled(took_s)))

    def _seed(self, call: Call, request: messages.Seed) -> None:
        manifest = self._read_manifest(call, request)
        if self.life.shard is None:
            self._check_seed_size(call, manifest)
            self._restores.kept = None  # it takes the memory of a shard
            shard = self._new_shard(self._new_dense(manifest), self._new_tables(manifest))
            shard.seed_id = request.seed_id
            _read_frozen(call, shard.dense.frozen)
            shard.fill(call)
            self.life.install(shard, attempt_of(call.peer))
        elif request.replaces:
            self._replace_seed(call, request, manifest)
        self._refuse_other(manifest)
        self._take_changes(call, manifest)
        call.discard_rest()
        self._reply_description(call)

    def _replace_seed(self, call: Call, request: messages.Seed, manifest: Manifest) -> None:
        """Take a seed instead of the one that it names, which not all servers have."""
        self._refuse_other(manifest)
        self._check_seed_size(call, manifest)
        frozen = self._new_frozen(manifest)
        _read_frozen(call, frozen)
        self.life.loaded().replace_seed(call, request, manifest, frozen)

    def _take_changes(self, call: Call, manifest: Manifest) -> None:
        """Take what the program of a run that resumes may bring to the checkpoint's parameters.

        These are frozen groups, if the checkpoint had none, and limits of tables.
        """
        shard = self.life.loaded()
        frozen: FrozenValues | None = None
        if manifest.frozen_groups and not shard.manifest.frozen_groups:
            frozen = self._new_frozen(manifest)
            if call.remaining < frozen.nbytes:
                raise ShapeError(
                    f"seed brought {call.remaining} bytes of values, the frozen buckets of "
                    f"ps:{self.settings.rank} take {frozen.nbytes}"
                )
            _read_frozen(call, frozen)
        if frozen is None and shard.manifest.limits_hash() == manifest.limits_hash():
            return
        with shard.gate.between_clocks():  # no fence comes between
            if (attempt := attempt_of(call.peer)) is not None:
                shard.gate.hear(*attempt)
            shard.take(manifest, frozen)

    def _new_dense(self, manifest: Manifest) -> DenseShard:
        """Make the values of this server; loads or compiles the kernels, before SERVING."""
        self._check_share(manifest)
        settings = self.settings
        return DenseShard(
            manifest,
            rank=settings.rank,
            num_servers=settings.num_servers,
            num_workers=settings.num_workers,
        )

    def _new_frozen(self, manifest: Manifest) -> FrozenValues:
        settings = self.settings
        return FrozenValues(manifest, rank=settings.rank, num_servers=settings.num_servers)

    def _new_tables(
        self, manifest: Manifest, segments: Mapping[str, int] | None = None
    ) -> tuple[Table, ...]:
        self._check_room(manifest)
        settings = self.settings
        return make_tables(
            manifest, rank=settings.rank, num_servers=settings.num_servers, segments=segments
        )

    def _check_share(self, manifest: Manifest) -> None:
        check_pulls(manifest, num_servers=self.settings.num_servers, rank=self.settings.rank)

    def _check_room(self, manifest: Manifest) -> None:
        """Refuse tables whose workers' second connections, those of lookups ahead, do not fit."""
        if manifest.tables:
            try:
                self._make_room(per_worker=2)
            except SettingsError as error:
                raise PSSettingsError(str(error)) from error

    def _new_shard(
        self,
        dense: DenseShard,
        tables: Sequence[Table],
        clock: int = 0,
        sessions: Sequence[SessionRecord] | None = None,
    ) -> ServingShard:
        settings = self.settings
        policy = make_policy(
            dense.manifest, settings.num_workers, on_lost=settings.on_lost, clock=clock
        )
        return ServingShard(dense, policy, self._counters, self.life.fail, sessions, tables)

    def _read_manifest(
        self, call: Call, request: messages.Compile | messages.Seed | messages.Restore
    ) -> Manifest:
        if call.payload_bytes < request.manifest_bytes:
            raise ShapeError(
                f"{name_of(request)} announced a manifest of {request.manifest_bytes} "
                f"bytes in a payload of {call.payload_bytes}"
            )
        data = bytearray(request.manifest_bytes)
        call.read_into(memoryview(data))
        manifest = Manifest.decode(bytes(data))
        if manifest.hash() != request.manifest_hash:
            raise ManifestMismatch(
                f"the manifest's hash is {manifest.hash()}, announced was {request.manifest_hash}; "
                "both sides must run the same version"
            )
        return manifest

    def _check_seed_size(self, call: Call, manifest: Manifest) -> None:
        expected = self._value_nbytes(manifest)
        if call.remaining != expected:
            raise ShapeError(
                f"seed brought {call.remaining} bytes of values, the buckets of "
                f"ps:{self.settings.rank} of {self.settings.num_servers} take {expected}"
            )
        self._counters.add_received(expected)

    def _value_nbytes(self, manifest: Manifest) -> int:
        return shares(manifest, self.settings.num_servers)[self.settings.rank]

    def _refuse_other(self, manifest: Manifest) -> None:
        shard = self.life.loaded()
        serving = shard.manifest
        has_same_frozen = serving.frozen_groups in ((), manifest.frozen_groups)
        if serving.hash() == manifest.hash() and has_same_frozen:
            return
        asked = manifest.with_limits_of(serving)  # which it may change
        differences = "; ".join(manifest_differences(serving, asked))
        advice = "Build the same model, or start new servers"
        if shard.resumed_step >= 0:
            advice = (
                f"The run resumes from step {shard.resumed_step} of a checkpoint and keeps its "
                "parameters: build the model with the expected values, or begin a new run "
                "(docs/guides/checkpoints.md)"
            )
        raise ManifestMismatch(
            f"ps:{self.settings.rank} serves other parameters than this seed: {differences}. "
            f"{advice}",
            {"serving": serving.hash(), "seed": manifest.hash()},
        )

    def _pull_frozen(self, call: Call, request: messages.PullFrozen) -> None:
        shard, rank = self.life.loaded(), self.settings.rank
        manifest = shard.manifest
        groups = manifest.frozen_groups
        if not groups:
            raise ServerPhaseError(
                f"ps:{rank} has no frozen weights: its checkpoint had none, and the chief has not "
                "seeded them yet",
                {"missing": "frozen"},
            )
        if manifest.frozen_hash() != request.frozen_hash:
            held = ", ".join(f"{each.name!r} with {each.num_elements} elements" for each in groups)
            raise ManifestMismatch(
                f"ps:{rank} has other frozen weights than the caller: {held}; build the same model "
                "on every worker"
            )
        frozen = shard.dense.frozen
        call.reply(messages.encode(Ack(shard.gate.clock)), frozen.views())
        self._counters.add_sent(frozen.nbytes)

    def _change_membership(
        self, call: Call, request: messages.Join | messages.Leave | messages.Finish
    ) -> None:
        worker = WorkerRank(call.peer.rank)
        name = request_id(call.peer, request.number)
        if isinstance(request, messages.Finish):
            self.life.finish_unfilled(worker, call.peer.generation)
        shard = self.life.shard
        clock = worker_clock = 0
        if shard is not None:
            leaves = not isinstance(request, messages.Join)
            shard.gate.change(name, _event_of(request), *request.number.acked, leaves=leaves)
            clock, worker_clock = shard.gate.clock, shard.gate.clock_of(worker)
        if isinstance(request, messages.Finish):
            self._rendezvous.finish(worker)
        call.reply(messages.encode(Ack(clock, worker_clock=worker_clock)))

    def _join_rendezvous(self, call: Call, request: messages.JoinRendezvous) -> None:
        self._check_holds_rendezvous()
        if call.payload_bytes > MAX_VALUE_BYTES:
            raise PSSettingsError(
                f"a rendezvous value has at most {MAX_VALUE_BYTES} bytes, got "
                f"{call.payload_bytes} for {request.key!r}; send a summary instead"
            )
        worker = WorkerRank(call.peer.rank)
        value = bytearray(call.payload_bytes)
        call.read_into(memoryview(value))
        deadline_s = time.monotonic() + request.wait_s
        values = self._rendezvous.rendezvous(
            request.key,
            worker,
            bytes(value),
            deadline_s,
            call.peer_gone,
            lambda: self.life.hear(Attempt(worker, call.peer.generation)),
        )
        sizes = tuple(len(item) for item in values.values())
        call.reply(
            messages.encode(RendezvousValues(tuple(values), sizes)),
            [item for item in values.values() if item],
        )

    def _check_holds_rendezvous(self) -> None:
        if self.settings.rank != 0:
            raise PSSettingsError(f"rendezvous are held by ps:0, this is ps:{self.settings.rank}")

    def _bring_answers(self, call: Call, request: messages.BringAnswers) -> None:
        self._check_holds_rendezvous()
        if call.payload_bytes < request.index_bytes:
            raise ShapeError(
                f"an index of {request.index_bytes} bytes was announced in a payload of "
                f"{call.payload_bytes}"
            )
        attempt = Attempt(WorkerRank(call.peer.rank), call.peer.generation)
        data = bytearray(request.index_bytes)
        call.read_into(memoryview(data))
        for passed in read_index(bytes(data), call.remaining, self.settings.num_workers):
            values = bytearray(passed.num_bytes)  # of one key at a time
            call.read_into(memoryview(values))
            self._rendezvous.bring(
                passed.key,
                attempt.worker,
                passed.values(memoryview(values)),
                lambda: self.life.hear(attempt),
            )
        self._reply_description(call)

    def _set_metadata(self, call: Call, request: messages.SetMetadata) -> None:
        if self.settings.rank != 0:
            raise PSSettingsError(f"metadata is kept on ps:0, this is ps:{self.settings.rank}")
        text = metadata.read_text(request.name, call)
        shard = self.life.loaded()
        with shard.gate.between_clocks():
            shard.metadata.put_once(
                request.number.session, request.number.sequence, request.name, text
            )
        self._reply_description(call)

    def _fetch_metadata(self, call: Call, _request: messages.FetchMetadata) -> None:
        shard = self.life.shard
        kept = {} if shard is None else shard.metadata.texts()
        self._reply_description(call, metadata.encode(kept))

    def _take_snapshot(self, call: Call, request: messages.TakeSnapshot) -> None:
        made = self._saving.take_snapshot(self.life.loaded(), request, call.peer_gone)
        call.reply(messages.encode(made))

    def _save(self, call: Call, request: messages.Save) -> None:
        saved = self._saving.save(self.life.loaded(), request, call.peer_gone)
        call.reply(messages.encode(saved))

    def _restore(self, call: Call, request: messages.Restore) -> None:
        manifest = self._read_manifest(call, request)
        with self._restores.turn(request, attempt_of(call.peer), call.peer_gone):
            if self.life.shard is None:
                kept, self._restores.kept = self._restores.kept, None
                restored = kept[1] if kept else self._read_asked(request, manifest)
                try:
                    # By the newest process of the chief: one may have asked meanwhile.
                    if self.serve(restored, self._restores.by):
                        self._restored = request
                except StaleGeneration:
                    self._restores.kept = request, restored
                    raise
                self._refuse_other(manifest)
            elif self._restored != request:
                raise ServerPhaseError(
                    f"ps:{self.settings.rank} is {self.life.phase.value} already; restore needs "
                    "servers that are EMPTY: start new ones, or assign() the values"
                )
        self._reply_description(call)

    def _read_asked(self, request: messages.Restore, manifest: Manifest) -> Restored:
        storage = self._open_storage(request.directory)
        checkpoint = read_manifest(storage, request.step)
        like = RestoreOptions(manifest=manifest, reset_optimizer=request.reset_optimizer)
        chain = open_chain(storage, checkpoint, self.settings)
        return self.read(chain, like, resumes=True)

    def read(self, chain: ChainFiles, like: RestoreOptions, *, resumes: bool) -> Restored:
        """Read this server's share of a checkpoint.

        Args:
            chain: its files, for this server.
            like: what it has to fit.
            resumes: a run begins with it; False: the run that saved it goes on.

        Raises:
            CheckpointError: it is damaged or of another model.
        """
        checkpoint = chain.newest
        newer = steps_after(chain.storage, checkpoint)
        manifest = manifest_to_serve(checkpoint, like)
        dense = self._new_dense(manifest)
        tables = self._new_tables(manifest, saved_segments(chain))
        extra = restore_into(
            dense, tables, chain, reset_optimizer=like.reset_optimizer, is_alone=not resumes
        )
        # The clients of another run never send again, and nothing else would drop their sessions.
        is_of_another_run = bool(self._job and checkpoint.job) and checkpoint.job != self._job
        sessions = () if is_of_another_run else extra.sessions
        shard = self._new_shard(dense, tables, extra.clock, sessions)
        shard.metadata.fill(extra.notes)
        shard.resumed_step = checkpoint.step if resumes else extra.resumed_step
        if like.job is not None:  # in another run the attempts count from 0 again
            for session in sessions or ():
                shard.gate.fence(WorkerRank(session.worker), session.generation)
        is_whole = not like.reset_optimizer and not any(table.has_left_out for table in tables)
        return Restored(
            shard=shard,
            checkpoint=checkpoint,
            passed_over=newer,
            is_whole=is_whole and manifest == checkpoint.manifest,
            num_changes=shard.num_changes,
            saved_at_s=extra.saved_at_s,
        )

    def serve(self, restored: Restored, by: Attempt | None = None) -> bool:
        """Serve what was read; False when another one was faster.

        Args:
            restored: the shard and where it is from.
            by: the worker that has asked for it; None: no worker.

        Raises:
            StaleGeneration: the worker's process was replaced or lost meanwhile.
        """
        checkpoint = restored.checkpoint
        if not self.life.install(restored.shard, by):
            return False
        self._saving.passed_over = restored.passed_over
        if restored.is_whole:
            self._saving.note_restored(checkpoint.save_id, restored.num_changes)
        age_s = time.time() - restored.saved_at_s if restored.saved_at_s else 0.0
        self._restore_point = RestorePoint(checkpoint.step, max(0.0, age_s))
        return True

    def _fetch_stats(self, call: Call, _request: messages.FetchStats) -> None:
        self._reply_description(call, messages.encode(self.stats()))

    def _fence(self, call: Call, request: messages.Fence) -> None:
        self.life.fence(WorkerRank(request.worker), request.generation)
        self._reply_description(call)

    def _lose(self, call: Call, request: messages.Lose) -> None:
        self.worker_lost(WorkerRank(request.worker), request.generation)
        self._reply_description(call)

    def _stop(self, call: Call, request: messages.StopServer) -> None:
        self._drain(request.reason or f"asked by {call.peer}")
        try:
            self._reply_description(call)
        finally:  # a process that ends closes its connections: it may only after the answer
            self.life.stopping.set()
