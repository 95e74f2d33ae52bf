"""What streams have in common that put records around the bytes of another stream.

Covers: sending a record to its end before the next, readiness, ending.
Does not: make or open records (sealed_stream, tls_stream).
Threads: as every Stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rpc.transport.stream import Stream


class RecordStream(ABC):
    """One end over another stream."""

    def __init__(self, inner: Stream, transport: str) -> None:
        self.transport = transport
        self.peer_address = inner.peer_address
        self._inner = inner
        self._sealed = memoryview(b"")
        """Records that have not left yet."""
        self._sealed_bytes = 0
        """Bytes of the views that they hold."""

    @abstractmethod
    def _seal(self, views: Sequence[memoryview]) -> None:
        """Set `_sealed` and `_sealed_bytes` from the first bytes of the views."""

    @abstractmethod
    def _has_bytes(self) -> bool:
        """Whether `recv_into` may give bytes without asking the inner stream."""

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream; what was sealed counts as taken when all of it has left.

        Until then the next call has to begin with the same views, which it does when the first
        ones were not taken.
        """
        if not self._sealed:
            self._seal(views)
        while self._sealed:
            sent = self._inner.sendmsg((self._sealed,))
            if sent is None:
                return None
            self._sealed = self._sealed[sent:]
        return self._sealed_bytes

    def interest(self, *, read: bool, write: bool) -> list[tuple[int, int]]:
        """See Stream."""
        if read and self._has_bytes():
            return [(-1, 0)]
        return self._inner.interest(read=read, write=write)

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """See Stream."""
        if read and self._has_bytes():
            return True
        return self._inner.wait(read=read, write=write, timeout_s=timeout_s)

    def peer_closed(self) -> bool:
        """See Stream."""
        return self._inner.peer_closed()

    def shutdown(self) -> None:
        """See Stream."""
        self._inner.shutdown()

    def close(self) -> None:
        """See Stream. Without a farewell: frames say where they end, and a cut is a cut."""
        self._inner.close()
