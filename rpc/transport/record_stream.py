"""Record stream: base of the streams that wrap the bytes of another stream in records.

Covers: sending a record to its end before the next, readiness, closing.
Does not: make or open records (gmac_stream, tls_stream).
Threads: as every Stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rpc.transport.stream import Stream


class RecordStream(ABC):
    """One end of a stream of records over another stream.

    Args:
        inner: the stream that carries the records.
        transport: name of the result, for logs and statistics.
    """

    def __init__(self, inner: Stream, transport: str) -> None:
        self.transport = transport
        self.peer_address = inner.peer_address
        self._inner = inner
        self._sealed = memoryview(b"")
        """Bytes of sealed records that are not sent yet."""
        self._sealed_bytes = 0
        """Payload bytes in those records."""

    @property
    @abstractmethod
    def is_mid_record(self) -> bool:
        """See Stream. Its tag is checked once it is complete, so its length may be a wrong one."""

    @abstractmethod
    def _seal(self, views: Sequence[memoryview]) -> None:
        """Set `_sealed` and `_sealed_bytes` from the first bytes of the views."""

    @abstractmethod
    def _has_bytes(self) -> bool:
        """Whether `recv_into` can return bytes without the inner stream."""

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream; a record's payload counts as sent when the whole record was sent.

        Until then the next call must begin with the same views. It does: `None` says that no byte
        of them was taken.
        """
        if not self._sealed:
            self._seal(views)
        while self._sealed:
            sent = self._inner.sendmsg((self._sealed,))
            if sent is None:
                return None
            self._sealed = self._sealed[sent:]
        return self._sealed_bytes

    def interest(self, *, read: bool, write: bool) -> tuple[int, int]:
        """See Stream."""
        if read and self._has_bytes():
            return -1, 0
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
        """See Stream. No closing record is needed: frames show where a message ends."""
        self._inner.close()
