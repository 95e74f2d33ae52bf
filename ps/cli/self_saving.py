"""Periodic saves of hand-started servers: rank 0 leads and finds the others.

Every server writes where it listens beside the checkpoints (ps.checkpoint.fencing), so all need
the same `--save-dir`. Server 0 asks all of them, itself included, as a chief's client would.

Covers: finding the servers, a client that follows those that are started again elsewhere.
Does not: choose when (ps.client.saving.periodic_saver), save (ps.client.saving.saver).
Runs in: the process of ps:0.      Threads: that of ps.client.saving.periodic_saver; `close` after
it has ended.
"""

from __future__ import annotations

from ps.checkpoint.choice import latest, steps_on_disk
from ps.checkpoint.fencing import GenerationFence, endpoint_of
from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from ps.client.saving.periodic_saver import Period, PeriodicSaver
from ps.config import ServerSettings
from ps.errors import PSSettingsError, ServerGone
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint

RECONNECT_S = 2.0
"""A server that is gone or restores is looked for again with the next save."""


class SelfSaving:
    """Saves of hand-started servers, led by rank 0.

    Args:
        period: where and when.
        settings: settings of this server, which is ps:0.
        credentials: the cluster's secret.
        guard: guard of this server.
    """

    def __init__(
        self,
        period: Period,
        settings: ServerSettings,
        credentials: Credentials,
        guard: GenerationFence,
    ) -> None:
        self._storage = storage_at(period.directory)
        self._settings = settings
        self._credentials = credentials
        self._identity = Identity(Role.SERVER, settings.rank, guard.number)
        self._endpoints: tuple[Endpoint, ...] = ()
        self._made: PSClient | None = None
        self._saver = PeriodicSaver(period, self._client)

    def start(self, *, saved_step: int) -> None:
        """Save periodically; see ps.client.saving.periodic_saver."""
        self._saver.start(saved_step=saved_step)

    def close(self, *, last: bool) -> None:
        """End, after a last save if it is wanted. Idempotent."""
        self._saver.close(last=last)
        if self._made is not None:
            self._made.close()

    def _client(self) -> PSClient:
        """Return a client of the servers where they are now.

        Raises:
            ServerGone: one of them has not been started yet.
        """
        found = tuple(map(self._find, range(self._settings.num_servers)))
        if self._made is None or found != self._endpoints:
            if self._made is not None:
                self._made.close()
            self._endpoints = found
            self._made = PSClient(
                found,
                self._credentials,
                self._identity,
                num_workers=self._settings.num_workers,
                reconnect_s=RECONNECT_S,
                restore_s=0.0,
            )
        return self._made

    def _find(self, rank: int) -> Endpoint:
        found = endpoint_of(self._storage, self._credentials.cluster_id, rank)
        if found is None:
            raise ServerGone(
                f"ps:{rank} has not written its address to {self._storage.where()}; start it with "
                "the same --save-dir"
            )
        return found


def refuse_foreign(directory: str) -> None:
    """Refuse to save beside another run's checkpoints.

    Raises:
        PSSettingsError: there are some; names the newest.
        CheckpointError: the directory cannot be listed.
    """
    if steps_on_disk(storage_at(directory)):
        raise PSSettingsError(
            f"{directory} holds checkpoints of another run, newest step {latest(directory)}; pass "
            f"--restore {directory} to continue from it, or name an empty directory"
        )
