"""The client of all servers: pull, push, tables, rendezvous, saves and control.

Covers: the public calls, one at a time.
Does not: cut flat buffers (ps.client.dense), keep what is sent again (ps.client.metadata,
ps.client.rendezvous), reconnect or wait (ps.client.channel, ps.client.retry), import numba, keras
or tensorflow.
Runs in: worker processes, and drivers for stats and control.
Threads: any; one call at a time, `_lock` makes others wait. A save has connections of its own, so
no other call waits for it. `close` waits for the calls under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ps import metadata
from ps.checkpoint.choice import AS_SAVED, RestoreOptions, find
from ps.checkpoint.storage import OpenStorage, name_for_servers, storage_at
from ps.client.channel import OutgoingCall
from ps.client.channel_stats import LinkStats
from ps.client.compile_wait import wait_compiled
from ps.client.dense import DenseClient
from ps.client.metadata import MetadataClient, RunNotes
from ps.client.rendezvous import RendezvousClient
from ps.client.retry import READY_TIMEOUT_S
from ps.client.row_exchange import RowExchanger, Rows
from ps.client.saving.saver import DEFAULT_OPTIONS, DEFAULT_SAVE_TIMEOUT_S, SaveOptions, Saver
from ps.client.saving.servers import SavingServers
from ps.client.server_group import (
    PROBE_PERIOD_S,
    Answer,
    AwayProbe,
    CallTimes,
    ServerGroup,
    joined,
)
from ps.client.slices import Gradient
from ps.client.tables import TableClient
from ps.errors import (
    ManifestMismatch,
    PSSettingsError,
    RequestTimeout,
    ServerPhaseError,
)
from ps.manifest.manifest import Hyper, Layout, Manifest
from ps.metadata import AttachedMetadata
from ps.protocol import messages
from ps.protocol.descriptions import are_filled, check_serving, different_seeds
from ps.protocol.messages import MAX_REASON_LENGTH, Ack, Description
from ps.stats.server_stats import ServerStats
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint

Array = np.ndarray[Any, Any]

DEFAULT_TIMEOUT_S = 60.0
SEED_LOOK_S = 0.25
"""How often a worker asks whether the chief's seed has reached servers that have other values."""
DEFAULT_RECONNECT_S = 10.0
"""Longer than a restarted server needs to listen again, shorter than a user's patience."""


class PSClient:
    """One worker's view of the parameters.

    Arrays are flat: one 1-d contiguous array per group, all its parameters in the manifest's order,
    C order. Nothing is copied; they must not change during a call.

    Args:
        endpoints: all servers, in the order of their ranks.
        credentials: the cluster's secret.
        identity: who this worker is; `generation` grows when it is restarted.
        num_workers: number of workers in the cluster.
        timeout_s: for every call that does not set its own, waiting at a sync barrier included.
        reconnect_s: a server that cannot be reached for this long is gone. It is not the setting of
            a cluster (ClusterConfig), which is for a node that has lost its driver.
        restore_s: how long a server that restores its parameters is asked again; such a call takes
            longer than its `timeout_s`.
        open_storage: opens a checkpoint directory as its user named it.
        run_notes: notes of another client of this process, so that either sets again what both have
            set for the run; None: its own.
    """

    def __init__(  # noqa: PLR0913 - one keyword per setting, with defaults
        self,
        endpoints: Sequence[Endpoint],
        credentials: Credentials,
        identity: Identity,
        *,
        num_workers: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reconnect_s: float = DEFAULT_RECONNECT_S,
        restore_s: float = READY_TIMEOUT_S,
        open_storage: OpenStorage = storage_at,
        run_notes: RunNotes | None = None,
    ) -> None:
        self.identity = identity
        self.num_workers = num_workers
        self._lock = threading.RLock()
        self._servers = ServerGroup(
            endpoints,
            credentials,
            identity,
            num_workers=num_workers,
            times=CallTimes(timeout_s, reconnect_s, restore_s),
        )
        self._away_probe = AwayProbe(self._servers, self._lock, PROBE_PERIOD_S)
        self._exchanger = RowExchanger(self._servers)
        self._joins_first = False
        """Whether this is a newer attempt, whose servers may know no clock of it, and no member."""
        self.tables = TableClient(
            self._servers, self._lock, self._exchanger.batches, self._join_first
        )
        self._dense = DenseClient(
            self._servers,
            num_workers=num_workers,
            pushes=identity.role is Role.WORKER,
        )
        self._open_storage = open_storage
        self._saver = Saver(credentials.cluster_id, open_storage)
        self.run_notes = RunNotes() if run_notes is None else run_notes
        self._metadata = MetadataClient(self._servers, self.run_notes)
        self._saving = SavingServers(self._servers, self.run_notes)
        self._rendezvous_client = RendezvousClient(self._servers, self._metadata)

    def __enter__(self) -> PSClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def server_moved(self, rank: int, endpoint: Endpoint) -> None:
        """Reach a server at another place from now on: a newer start of it listens there.

        Args:
            rank: rank of the server.
            endpoint: where it listens.
        """
        self._servers.move(rank, endpoint)

    def bring_answers(self) -> None:
        """Tell a ps:0 that was started again which rendezvous this worker has passed.

        Each new connection does so on its own. A worker that waits for its driver or its rows makes
        none, and another worker may wait for just these answers. Nothing is raised if ps:0 cannot
        be reached within 30 s: the next request brings them.

        Threads: any; waits.
        """
        self._rendezvous_client.bring()

    @property
    def timeout_s(self) -> float:
        """Seconds of every call that does not set its own, in (0, 86400]; may be assigned."""
        return self._servers.times.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._servers.times.timeout_s = timeout_s

    @property
    def longest_push_s(self) -> float:
        """Seconds that one push takes at most, while a server restores its parameters.

        It holds for each round of the push, and for the two of the join before a newer attempt's
        first one.
        """
        num_joining = 2 if self.identity.generation else 0
        return (self._dense.num_rounds + num_joining) * self._servers.times.of_call().longest_s

    @property
    def restore_s(self) -> float:
        """Seconds for which servers that restore are waited for."""
        return self._servers.times.restore_s

    @property
    def num_servers(self) -> int:
        """Servers of the cluster."""
        return len(self._servers.links)

    @property
    def manifest(self) -> Manifest:
        """What is trained; after seed() or attach()."""
        return self._dense.manifest

    @property
    def layout(self) -> Layout:
        """The place of each parameter in the flat buffers; after seed() or attach()."""
        return self._dense.layout

    def describe(self) -> list[Description]:
        """Phase, manifest hash and clock of every server."""
        return self._ask(messages.Describe(), Description)

    def server_generations(self) -> tuple[int, ...]:
        """Return which start of each server answers now, by rank; a restarted one has gone back.

        Servers that are started by hand without checkpoints always answer 0.
        """
        with self._lock:
            self._servers.ask(messages.Describe(), Description)
            return self._servers.generations

    @property
    def heard_generations(self) -> tuple[int, ...]:
        """Which start of each server gave the last answer, by rank; sends no request."""
        return self._servers.generations

    @property
    def saved_generations(self) -> tuple[int, ...]:
        """Which start of each server the last `save` holds, by rank; sends no request."""
        return self._saving.generations

    def seed(
        self,
        manifest: Manifest,
        values: Mapping[str, Array],
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Give the servers their manifest and first values; the chief calls it once.

        Servers that already serve this manifest (restored, or seeded before) keep their values:
        call pull() and pull_frozen() afterwards. Tables without a seed take the seed of these
        servers. Servers restored from a checkpoint without frozen groups take these frozen values.
        A seed that did not reach all servers, as its chief was lost, is replaced.

        Args:
            manifest: groups, tables, rules and consistency.
            values: by group name a flat array [num_elements] of the group's dtype.
            timeout_s: for sending the values; give more than the whole model takes on this host's
                network. None: the client's own.

        Returns:
            Number of updates in the servers' values, from a checkpoint or pushes; 0 if the values
            are these.

        Raises:
            ManifestMismatch: a server serves other parameters; the text lists the differences.
            NonFiniteGradient: a value is NaN or infinite.
            PSSettingsError: a server's part, frozen values included, is too large for one request;
                the text has the least number of servers.
            ServerPhaseError: some servers have values that were restored or trained, and others
                have none; or another process of the chief seeds at the same time.
        """
        with self._lock:
            try:
                num_updates = self._dense.seed(manifest, values, timeout_s)
            except ManifestMismatch as refused:
                limit_s = self.timeout_s if timeout_s is None else timeout_s
                try:
                    serving = self._servers.fetch_manifest(timeout_s=limit_s)
                except ServerPhaseError:  # an empty server refuses what it cannot read
                    raise refused from None
                served = manifest.with_seeds_of(serving)
                if served == manifest:
                    raise
                manifest = served
                num_updates = self._dense.seed(manifest, values, timeout_s)
            self._adopt(manifest)
        return num_updates

    def is_filled(self) -> bool:
        """Whether all servers have values, or restore them, and all seeded ones have the same seed.

        If not, the chief must seed or restore them, and `attach` waits for that.
        """
        return are_filled(self.describe())

    def attach(self, *, timeout_s: float | None = None) -> Manifest:
        """Wait until every server serves values of the same seed, and take over their manifest.

        Args:
            timeout_s: seconds; None: the client's own.

        Raises:
            RequestTimeout: a server is still EMPTY (has the chief seeded it?) or RESTORING, or has
                another seed than the others.
            ServerPhaseError: a server has failed or is stopping.
            ManifestMismatch: the servers serve different manifests.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._wait_filled(limit_s)
            self._adopt(self._servers.fetch_manifest(timeout_s=limit_s))
            return self.manifest

    def pull(
        self,
        into: Mapping[str, Array],
        *,
        averages: bool = False,
        timeout_s: float | None = None,
    ) -> Ack:
        """Fill the arrays with the newest values.

        Args:
            into: by group name a flat, writable array [num_elements] of the group's dtype.
            averages: fill in the moving averages of the groups that keep them.
            timeout_s: for receiving the values; if all workers pull at once, each server sends its
                share to all of them. None: the client's own.

        Returns:
            The servers' clock and version.
        """
        with self._lock:
            return self._dense.pull(into, averages=averages, timeout_s=timeout_s)

    def pull_frozen(
        self, manifest: Manifest, into: Mapping[str, Array], *, timeout_s: float | None = None
    ) -> None:
        """Fill the arrays with the values of the frozen groups.

        Servers that were restored from a checkpoint without them get them from the chief's seed():
        this call waits for it.

        Args:
            manifest: names the frozen groups; nothing is asked if it has none.
            into: one flat array per frozen group.
            timeout_s: for the whole call; None: the client's.

        Raises:
            ManifestMismatch: the servers have other frozen groups.
            ServerPhaseError: they have none after `timeout_s`.
        """
        if not manifest.frozen_groups:
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                with self._lock:
                    self._dense.pull_frozen(manifest, into, max(left_s, SEED_LOOK_S))
            except ServerPhaseError as error:
                if error.details.get("missing") != "frozen" or left_s <= SEED_LOOK_S:
                    raise
                time.sleep(SEED_LOOK_S)
            else:
                return

    def push(
        self,
        grads: Mapping[str, Gradient],
        *,
        hyper: Hyper,
        rows: int,
        metadata: AttachedMetadata | None = None,
    ) -> Ack:
        """Push a gradient of `rows` rows; in sync mode wait until all workers' are applied.

        `metadata` (ps.pushed) is kept at the moment at which the gradient is part of the
        parameters of ps:0: a checkpoint holds both or neither.

        In ssp the gradient is applied at once, and the call waits while this worker is more than
        the manifest's `staleness_bound` pushes ahead of the slowest.

        Args:
            grads: by group name a flat array [num_elements] of the group's dtype, or a list of flat
                arrays whose concatenation it is.
            hyper: the learning rate of this push.
            rows: rows behind the gradient, 1 or more; weights the mean of sync. A worker that has
                none calls push_null.
            metadata: kept with the parameters from this push on.

        Returns:
            The servers' clock after it, and how stale the gradient was.

        Raises:
            NonFiniteGradient: NaN or infinity; that bucket is unchanged, and in async and ssp those
                before it have changed: the message says how many. In sync mode the refusing server
                counts the push as null, so the barrier holds.
            NonFiniteUpdate: the update of some elements overflows; they keep their numbers, and all
                others are updated.
            PSSettingsError: no rows; nothing was sent.
            StaleGeneration: a newer attempt of this worker runs: end this process.
            WorkerLost: sync: a member of the barrier is gone.
            RequestTimeout, ServerGone: whether it was applied is unknown; this client is done.
        """
        _check_rows(rows)
        self._prepare_push()
        with self._lock:
            return self._dense.push(grads, None, hyper, rows, metadata=metadata)

    def push_pull(  # noqa: PLR0913 - one keyword per part of a push
        self,
        grads: Mapping[str, Gradient],
        into: Mapping[str, Array],
        *,
        hyper: Hyper,
        rows: int,
        lag: int = 0,
        metadata: AttachedMetadata | None = None,
        table_grads: Rows | None = None,
        next_rows: Rows | None = None,
    ) -> Ack:
        """Push, and fill `into` with the values after it, in one round trip. Raises as push().

        The push may also carry gradients of rows and return further rows: in the same round trip,
        with the same number and clock. In sync both are reduced and applied at the clock; elsewhere
        rows are applied on arrival. What refuses a push of rows (TableClient.push) refuses this
        one; it counts as present.

        Args:
            grads: by group name a flat array [num_elements] of the group's dtype.
            into: by group name a writable array of the same shape and dtype.
            hyper: the learning rate of this push.
            rows: rows behind the gradient, 1 or more; weights the mean of sync. A worker that has
                none calls push_null.
            lag: earlier pushes of this client, 0 to 64, that the parameters of the gradients did
                not contain.
            metadata: kept with the parameters from this push on.
            table_grads: by name of the table: what `tables.route` made of the ids, and their summed
                gradients [num_unique, dim] of the table's dtype in C order, as RoutedIds.summed
                returns them. In hybrid the batch whose rows were looked up with these very routed
                ids ends. None: the push is no step of any table.
            next_rows: by name of the table: routed ids, and an array [num_unique, dim], filled with
                their rows as they are after this push (in sync: after its clock), as
                `tables.lookup_into(training=True)` fills it. In hybrid they begin a batch, which
                takes the permit over from the one that ends.

        Returns:
            The servers' clock after it, and how stale the gradient was.
        """
        _check_rows(rows)
        self._prepare_push()
        if table_grads is None and next_rows is None:
            with self._lock:
                return self._dense.push(grads, into, hyper, rows, lag, metadata)
        with self._lock, self._exchanger.exchange(table_grads, next_rows) as tables:
            return self._dense.push(grads, into, hyper, rows, lag, metadata, tables)

    def push_null(
        self,
        *,
        rows: int = 0,
        into: Mapping[str, Array] | None = None,
        next_rows: Rows | None = None,
    ) -> Ack:
        """Push nothing, so that a barrier stays whole and ssp's clock goes on. Raises as push().

        Args:
            rows: rows that were left out, for the counters.
            into: filled with the values after it, as by `push_pull`; None: nothing is pulled.
            next_rows: see `push_pull`.
        """
        self._prepare_push()
        if next_rows is None:
            with self._lock:
                return self._dense.push(None, into, None, rows)
        with self._lock, self._exchanger.exchange(None, next_rows) as tables:
            return self._dense.push(None, into, None, rows, tables=tables)

    def assign(self, values: Mapping[str, Array]) -> None:
        """Replace the values, as set_weights does; optimizer slots stay. Chief only.

        Args:
            values: by group name a flat array [num_elements] of the group's dtype.
        """
        with self._lock:
            self._dense.assign(values)

    def join(self) -> Ack:
        """Take part again: in sync from the clock that is open now, in ssp from the slowest's.

        Servers may be at different clocks at that moment; this worker begins at the largest, at all
        of them: in ssp its own clock is raised, in sync a null push fills the clock that is open.
        Workers that must all start an epoch in one clock join first and call `rendezvous` before
        the first push. A newer attempt of a worker joins on its own before its first push, in
        hybrid before its first batch of rows.
        """
        with self._lock:
            self._joins_first = False
            acks = self._servers.change(messages.Join)
            self._servers.declare_inactive(None)
            if self.manifest.consistency != "async":
                acks = self._servers.align_clocks(acks, self.manifest)
            return joined(acks)

    def leave(self) -> Ack:
        """Stop pushing until join(): nobody waits for this worker meanwhile.

        Until then the client checks the servers: a restarted one would wait for this worker.
        """
        with self._lock:
            self._joins_first = False
            acks = self._servers.change(messages.Leave)
            self._servers.declare_inactive(messages.Leave)
            self._away_probe.start()
            return joined(acks)

    def finish(self) -> None:
        """Be done for good: neither barrier nor rendezvous waits for this worker. Idempotent."""
        with self._lock:
            self._servers.change(messages.Finish)
            self._servers.declare_inactive(messages.Finish)
            self._away_probe.start()

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> dict[int, bytes]:
        """Bring a value and get those of all live workers that have not finished, by rank.

        All workers use the same keys in the same order; a key may be used again.

        Args:
            key: name of the rendezvous, of 1 to 240 characters; a # counts twice.
            value: what the other workers get, up to 1 MiB.
            timeout_s: seconds until the slowest worker has to come.

        Returns:
            By rank what each worker brought.

        Raises:
            RequestTimeout: names the workers that did not come.
        """
        with self._lock:
            return self._rendezvous_client.rendezvous(key, value, timeout_s)

    def set_metadata(self, name: str, value: Any, *, of_run: bool = False) -> None:
        """Keep a value under a name; checkpoints from now on hold it, and a restore brings it back.

        It belongs to the parameters: a ps:0 that is restarted from an earlier checkpoint has lost
        both. With `of_run`, this client and those that share its `run_notes` then set the value
        again, with their next push, rendezvous or save.

        Args:
            name: 1 to 200 of the characters 0-9 A-Z a-z . _ : / -; what it named before is gone.
            value: a JSON value of up to 1 MiB; None removes it.
            of_run: whether the value holds for the whole run, whatever the parameters are. No other
                process sets its name.

        Raises:
            PSSettingsError: another name or value, or no room: 4096 names, 16 MiB.
            ServerPhaseError: the servers are not seeded yet.
        """
        text = metadata.text_of(name, value).encode()
        with self._lock:
            self._metadata.set(name, text, of_run=of_run)

    def metadata(self) -> dict[str, Any]:
        """All metadata by name; none on servers that are EMPTY."""
        with self._lock:
            return self._metadata.get()

    def save(
        self,
        directory: str | Path,
        step: int | None,
        *,
        timeout_s: float = DEFAULT_SAVE_TIMEOUT_S,
        options: SaveOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Save all servers' shards as the checkpoint of `step`; training goes on meanwhile.

        Each shard is saved as at one moment, in sync mode all at one clock. `step` None takes that
        clock, or the number after the newest step there if that is greater. If the newest step
        already holds the servers as they are, nothing is saved and that step is returned.

        The servers and this process must see the same directory, and the job holds it until this
        client is closed. Chief or driver only.

        Args:
            directory: a path or URL that `open_storage` opens; a relative path is this process's.
            step: 0 or more, and larger than those that are there; None: the servers' clock.
            timeout_s: seconds to wait for another save, another host's lease and the servers; the
                file system's time for lease and commit is added to it.
            options: full or delta, and how many checkpoints to keep.

        Returns:
            The directory of the committed step.

        Raises:
            CheckpointError: the step exists, another job saves there, the disk is full, or a value
                is not finite; what was there before is untouched.
        """
        return self._saver.save(
            directory,
            step,
            manifest=self.manifest,
            servers=self._saving,
            timeout_s=timeout_s,
            options=options,
        )

    def restore(
        self,
        directory: str | Path,
        *,
        step: int | None = None,
        like: RestoreOptions = AS_SAVED,
        timeout_s: float = DEFAULT_SAVE_TIMEOUT_S,
    ) -> int:
        """Fill EMPTY servers from a checkpoint instead of seeding them. Chief or driver only.

        Args:
            directory: where save() wrote, seen by the servers and by this process.
            step: None: the newest that is whole; damaged ones are left out and logged.
            like: for which parameters and rules; by default those that were saved.
            timeout_s: seconds for the servers to read their parts. Before that this process reads
                the checkpoint to check it, and the servers compile kernels that are not kept.

        Returns:
            The step.

        Raises:
            CheckpointError: there is none, or the requested one is damaged or of another model.
            ServerPhaseError: a server was seeded or restored already.
        """
        storage = self._open_storage(directory)
        found, manifest = find(storage, step, like)
        encoded, digest = manifest.encode(), manifest.hash()
        name = name_for_servers(directory, storage)
        request = messages.Restore(name, found.step, digest, len(encoded), like.reset_optimizer)
        with self._lock:
            wait_compiled(self._servers, manifest, timeout_s=timeout_s)
            calls = [OutgoingCall(link, request, [encoded]) for link in self._servers.links]
            self._servers.check_size(self._servers.answers(calls, Description, timeout_s=timeout_s))
            self._adopt(manifest)
        return found.step

    def stats(self) -> list[ServerStats]:
        """Every server's counters."""
        with self._lock:
            return self._servers.stats()

    def link_stats(self) -> list[LinkStats]:
        """What this client has counted per server: bytes, latencies, cuts, the transport in use.

        Sends no request and does not wait, even while another thread's call is in progress.
        """
        return self._servers.link_stats()

    def fence(self, worker_rank: int, generation: int) -> None:
        """Refuse the worker's generations below this one. Drivers and supervisors only.

        Args:
            worker_rank: the worker, from 0.
            generation: the oldest that may still push.
        """
        self._ask(messages.Fence(worker_rank, generation), Description)

    def worker_lost(self, worker_rank: int, generation: int | None = None) -> None:
        """Report a worker as dead: no barrier waits for it. Drivers and supervisors only.

        Args:
            worker_rank: the worker, from 0.
            generation: which start of it; None: the newest that the servers know.
        """
        self._ask(messages.Lose(worker_rank, generation), Description)

    def stop_servers(self, reason: str = "") -> None:
        """Drain and end the servers. Drivers and supervisors only.

        Args:
            reason: for the clients that are refused from now on; cut to 1024 characters.
        """
        self._ask(messages.StopServer(reason[:MAX_REASON_LENGTH]), Description)

    def close(self) -> None:
        """Close the connections and release the checkpoint directories. Idempotent.

        In hybrid the batches in progress are given up first: another client of this worker may
        need their permits.
        """
        self._saver.close()
        try:
            with self._lock, contextlib.ExitStack() as stack:
                stack.callback(self._servers.close)
                if not self._servers.is_closed:
                    self.tables.return_permits()
        finally:
            self._away_probe.close()

    def _wait_filled(self, limit_s: float) -> None:
        """Raises as `attach`."""
        deadline_s = time.monotonic() + limit_s
        left_s = limit_s
        while True:
            calls = [
                OutgoingCall(link, messages.Describe(), waits=True) for link in self._servers.links
            ]
            described = self._servers.answers(calls, Description, timeout_s=left_s)
            self._servers.check_size(described)
            check_serving(described, limit_s)
            if are_filled(described):
                return
            left_s = deadline_s - time.monotonic() - SEED_LOOK_S
            if left_s <= 0:
                raise RequestTimeout(
                    f"{different_seeds(described)} after {limit_s:g} s: the chief was lost while "
                    "it seeded them, and its next attempt has not come to all of them yet"
                )
            time.sleep(SEED_LOOK_S)
            left_s = max(left_s, SEED_LOOK_S)  # else a late answer hides what is waited for

    def _ask(self, request: messages.Request, answer: type[Answer]) -> list[Answer]:
        with self._lock:
            return self._servers.ask(request, answer)

    def _adopt(self, manifest: Manifest) -> None:
        digest = manifest.hash()
        self.tables.adopt(manifest, digest)
        self._exchanger.adopt(manifest)
        self._dense.adopt(manifest, digest)
        is_replacement = self.identity.role is Role.WORKER and self.identity.generation > 0
        self._joins_first = is_replacement and manifest.consistency != "async"

    def _prepare_push(self) -> None:
        self._join_first()
        if self._metadata.is_behind:
            with self._lock:
                self._metadata.set_again()

    def _join_first(self) -> None:
        """Join a newer attempt before it trains; a client that only reads or saves never does.

        The attempt before may have been lost, or at another clock at each server, and one that was
        restarted since may know none: pushes alone would wait crosswise with the others'.
        """
        if not self._joins_first:  # without the lock, which a push of another thread may hold
            return
        with self._lock:
            if self._joins_first:
                self.join()


def _check_rows(rows: int) -> None:
    """Refuse a gradient without rows before it has a number: its mean would have no weight."""
    if rows < 1:
        raise PSSettingsError(
            f"a push needs at least 1 row, got {rows}; nothing was sent. A gradient of no rows has "
            "no weight: call push_null() instead, so that no barrier waits for it"
        )
