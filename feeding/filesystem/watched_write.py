"""Watched write: a file that a package of fsspec writes, for as long as it makes progress.

Packages send a file in parts of their own size, so a large one takes as long as it takes.
Covers: the deadline of each piece; what is left of a write that was given up.
Does not: rename, retry (packages do).
Threads: the caller's waits; a thread of BoundedCalls makes the content and writes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feeding.filesystem.bounded_calls import BoundedCalls, CallTimeout
from feeding.filesystem.interface import Pieces
from feeding.filesystem.temp_files import pieces_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


@dataclass(slots=True)
class WatchedWrite:
    """One file on its way."""

    inner: AbstractFileSystem
    path: str
    """Path as `inner` has it."""
    pieces: Pieces
    turns: AbstractContextManager[object]
    """Held around each call of `inner`, not while content is made: that may need a turn itself."""
    written_bytes: int = 0
    """Grows while the write makes progress; the waiting thread reads it."""
    is_given_up: bool = False
    """Nobody waits any more; the waiting thread sets it."""

    def done(self, calls: BoundedCalls, patience_s: float) -> None:
        """Write the file and wait for its end.

        Args:
            calls: has the thread.
            patience_s: longest wait for a thread, and for the next piece.

        Raises:
            CallTimeout: no piece was written for that long; no more is, and the file is removed.
        """
        pending = calls.start(self._run, patience_s)
        try:
            pending.result_while_moving(patience_s, lambda: self.written_bytes, seen=0)
        except BaseException as error:
            self.is_given_up = True
            if isinstance(error, CallTimeout):
                raise CallTimeout(f"{error}, behind {self.written_bytes} bytes") from None
            raise

    def _run(self) -> None:
        try:
            self._write()
        finally:
            if self.is_given_up:
                # The caller has removed what was there before; a package may store a part at last.
                with suppress(Exception), self.turns:
                    self.inner.rm_file(self.path)

    def _write(self) -> None:
        head = self.path.rpartition("/")[0]
        with self.turns:
            if head:
                self.inner.makedirs(head, exist_ok=True)
            file = self.inner.open(self.path, "wb")
        try:
            for content in self.pieces():
                for piece in pieces_of(content)():
                    if self.is_given_up:
                        return
                    with self.turns:
                        file.write(piece)
                    self.written_bytes += memoryview(piece).nbytes
        finally:
            with self.turns:
                file.close()
