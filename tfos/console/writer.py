"""Writer: lines on their way to the user's screen, written by one thread.

A stream that nobody reads, as a pager's pipe or a stopped terminal, blocks its writers. Only
this thread is ever blocked; what does not fit the queue meanwhile is dropped, counted and reported.

Covers: order, the bound of the queue, the live line of a terminal, waiting with a deadline.
Does not: make text (tfos.console.console), bytes (tfos.console.direct_stream).
Threads: any may call; the thread lives while there is something to write. The lock is never held
while something is written, and waiting threads use a plain lock, which Ctrl-C leaves intact.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tfos.console.direct_stream import DirectStream
from tfos.console.terminal import TerminalLine

MOST_CHARS = 1_000_000
"""Characters that may wait to be written: some thousands of lines."""
PATIENCE_S = 1.0
"""How long a line of the driver is waited for: what the program writes next comes after it."""
EXIT_S = 5.0
"""How long the last lines are waited for when the interpreter exits."""


@dataclass(slots=True)
class _Text:
    """Something to write."""

    number: int
    kind: Literal["lines", "live", "end", "mark"]
    stream: Any
    text: str = ""
    done: threading.Lock = field(default_factory=threading.Lock)
    """Held until it is written or dropped."""

    def __post_init__(self) -> None:
        self.done.acquire()


class Writer:
    """A queue of texts and the thread that writes them.

    Args:
        on_closed: called on that thread when a stream cannot be written to.
    """

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self._lock = threading.RLock()  # a signal handler or finalizer may write within a write
        self._own: deque[_Text] = deque()
        self._output: deque[_Text] = deque()
        self._num_chars = 0
        self._num_texts = 0
        self._num_dropped = 0
        self._is_stuck = False
        self._thread: threading.Thread | None = None
        self._live: TerminalLine | None = None
        atexit.register(_flush_at_exit, weakref.ref(self))

    def write(self, text: str, stream: Any, *, waits: bool) -> None:
        """Write lines of the driver.

        Args:
            text: one or more lines.
            stream: where to write.
            waits: whether to wait PATIENCE_S for it; not under a lock that others need.
        """
        done = self._put(self._own, "lines", stream, text)
        if waits:
            self._await(done)

    def write_output(self, text: str, stream: Any) -> None:
        """Write lines of a node, which are dropped before those of the driver; never waits.

        Args:
            text: one or more lines.
            stream: where to write.
        """
        self._put(self._output, "lines", stream, text)

    def show_live(self, text: str, stream: Any) -> None:
        """Replace the live line of a terminal; never waits.

        Args:
            text: one line.
            stream: the terminal.
        """
        with self._lock:
            last = self._own[-1] if self._own else None
            if last is not None and last.kind == "live" and last.number == self._num_texts:
                last.text = text  # nobody has seen the one before
                return
            self._put(self._own, "live", stream, text)

    def end_live(self, stream: Any) -> None:
        """Remove the live line."""
        self._await(self._put(self._own, "end", stream))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; return whether it was in time.

        Args:
            timeout_s: seconds to wait at most.
        """
        with self._lock:
            if not self._own and not self._output and self._thread is None:
                return True
            done = self._put(self._own, "mark", None)
            is_written = self._thread is not None
        if not is_written:
            self._drain()  # the interpreter exits and starts no thread any more
        return done.acquire(timeout=max(0.0, timeout_s))

    # ---- inside ----

    def _put(
        self, queue: deque[_Text], kind: Literal["lines", "live", "end", "mark"], stream: Any,
        text: str = "",
    ) -> threading.Lock:  # fmt: skip
        with self._lock:
            self._num_texts += 1
            new = _Text(self._num_texts, kind, stream, text)
            queue.append(new)
            self._num_chars += len(text)
            while self._num_chars > MOST_CHARS and len(self._own) + len(self._output) > 1:
                self._drop()
            if self._thread is None or not self._thread.is_alive():
                self._start()
            return new.done

    def _drop(self) -> None:
        """Drop the oldest output, or the oldest line of the driver: the newest say how it ends."""
        dropped = (self._output or self._own).popleft()
        self._num_chars -= len(dropped.text)
        if dropped.kind == "lines":
            self._num_dropped += dropped.text.count("\n") + 1
        dropped.done.release()

    def _start(self) -> None:
        thread = threading.Thread(target=self._drain, name="tfos-console", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits: flush() writes
            self._thread = None

    def _await(self, done: threading.Lock) -> None:
        """Wait a moment; a thread waits for a blocked stream once, not for each line."""
        if not self._is_stuck and not done.acquire(timeout=PATIENCE_S):
            self._is_stuck = self._thread is not None

    def _drain(self) -> None:
        while (text := self._next()) is not None:
            try:
                self._write(text)
            except Exception:  # noqa: BLE001 - whatever the stream raises: output ends no training
                self._live = None
                self._on_closed()
            self._is_stuck = False
            text.done.release()

    def _next(self) -> _Text | None:
        with self._lock:
            heads = [queue for queue in (self._own, self._output) if queue]
            if not heads:
                self._thread = None
                return None
            queue = min(heads, key=lambda queue: queue[0].number)
            if self._num_dropped and queue[0].stream is not None:
                number, self._num_dropped = self._num_dropped, 0
                gap = f"tfos | ({number} lines dropped: nobody read standard error for a while)"
                return _Text(0, "lines", queue[0].stream, gap)
            text = queue.popleft()
            self._num_chars -= len(text.text)
            return text

    def _write(self, text: _Text) -> None:
        if text.kind == "live":
            if self._live is None:
                self._live = TerminalLine(DirectStream(text.stream))
            self._live.update(text.text)
        elif text.kind == "end":
            live, self._live = self._live, None
            if live is not None:
                with contextlib.suppress(Exception):
                    live.close()
        elif text.kind == "lines" and self._live is not None:
            self._live.print(text.text)
        elif text.kind == "lines":
            out = DirectStream(text.stream)
            out.write(text.text + "\n")
            out.flush()


def _flush_at_exit(writer: weakref.ref[Writer]) -> None:
    alive = writer()
    if alive is not None:
        alive.flush(EXIT_S)
