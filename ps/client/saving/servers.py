"""Servers as a save asks them: ps:0 has what holds for the run before its snapshot.

Does not: save (ps.client.saving.saver), keep what holds for the run (ps.client.metadata).
Threads: that of the save.
"""

from __future__ import annotations

from ps.client.metadata import MetadataClient, RunNotes
from ps.client.server_group import Answer, ServerGroup
from ps.errors import CheckpointError
from ps.manifest.manifest import Manifest
from ps.protocol import messages


class SavingServers:
    """A client's servers, asked over links that only saves use.

    Args:
        servers: the client's; the links close with its own.
        notes: notes of this process.
    """

    def __init__(self, servers: ServerGroup, notes: RunNotes) -> None:
        self._servers = servers
        self._notes = notes
        self._metadata: MetadataClient | None = None

    def ask(
        self, request: messages.Request, answer: type[Answer], *, timeout_s: float
    ) -> list[Answer]:
        """See ServerGroup.ask.

        Raises:
            CheckpointError: ps:0 was started again, and has taken its snapshot without its notes.
        """
        servers = self._servers.separate("saves")
        if not isinstance(request, messages.TakeSnapshot):
            return servers.ask(request, answer, timeout_s=timeout_s)
        if self._metadata is None:  # one for all saves: it numbers what it sends
            self._metadata = MetadataClient(servers, self._notes)
        self._metadata.bring(timeout_s)
        answers = servers.ask(request, answer, timeout_s=timeout_s)
        if self._metadata.is_behind:
            raise CheckpointError(
                "ps:0 was started again during its snapshot, which lacks the run's metadata "
                "(set_metadata(..., of_run=True)). The save is not committed; save again"
            )
        return answers

    def fetch_manifest(self, *, timeout_s: float) -> Manifest:
        """See ServerGroup.fetch_manifest."""
        return self._servers.separate("saves").fetch_manifest(timeout_s=timeout_s)

    @property
    def generations(self) -> tuple[int, ...]:
        """See ServerGroup.generations."""
        return self._servers.separate("saves").generations
