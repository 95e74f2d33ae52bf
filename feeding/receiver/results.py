"""Inference results of one feed: one result per row, in order, or an error at once.

Covers: which rows were read, results per session, the check of their number.
Does not: lock or wait (channel), talk to feeders (handler).
Threads: pure; the caller serialises all calls.

A session is one partition from one feeder. It ends when the feeder takes its last result, or with
the connection that its rows came on, which may bring further sessions. `main_fun` answers each
batch before it reads the next one, so at most one batch is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.encode.arrays import ArrayPacker, Columns
from feeding.errors import FeedError, ResultCountError


@dataclass(slots=True)
class InferenceSession:
    """One partition's rows and results; `error` fails the session for its feeder."""

    packer: ArrayPacker
    connection: int
    """Generation of its feeder's connection, with which it ends."""
    is_fed: bool = False
    """Whether the last rows of the partition have come."""
    fed_rows: int = 0
    answered_rows: int = 0
    ready: deque[Chunk] = field(default_factory=deque)
    error: FeedError | None = None


class InferenceResults:
    """The sessions of one feed. The caller serialises all calls.

    Args:
        feed: its name, for messages.
        worker: name of this worker, for messages.
        config: limits of the feed, in bytes and seconds.
    """

    def __init__(self, feed: str, worker: str, config: FeedConfig) -> None:
        self._feed = feed
        self._worker = worker
        self._config = config
        self._sessions: dict[int, InferenceSession] = {}
        self._open_session = 0
        self._open_rows = 0
        self._open_results = 0

    def fed(self, chunk: Chunk, connection: int) -> None:
        """Count rows that a feeder sent in its session.

        Args:
            chunk: the rows.
            connection: generation of the feeder's connection.
        """
        meta = chunk.meta
        session = self._sessions.get(meta.session)
        if session is None:
            packer = ArrayPacker(
                self._config,
                feed=self._feed,
                partition=meta.partition,
                mode="inference",
                session=meta.session,
            )
            session = self._sessions[meta.session] = InferenceSession(packer, connection)
        session.fed_rows += chunk.num_rows
        session.is_fed = meta.last_in_partition

    def session(self, number: int) -> InferenceSession:
        """Return a session.

        Raises:
            FeedError: the session failed, or is not known.
        """
        session = self._sessions.get(number)
        if session is None:
            raise FeedError(f"{self._worker}: inference session {number} is not known here")
        if session.error is not None:
            raise session.error
        return session

    def begin_batch(self) -> None:
        """Begin a batch; the batch before must be answered.

        Raises:
            ResultCountError: it is not; the feeder gets the same error.
        """
        if self._open_results != self._open_rows:
            raise self._fail_open(
                f"returned {self._open_results} results for {self._open_rows} rows; "
                "call batch_results with one result per row before the next next_batch"
            )
        self._open_session = self._open_rows = self._open_results = 0

    def handed_out(self, session: int, num_rows: int) -> None:
        """Count rows of a session as part of the open batch.

        Args:
            session: number of the session.
            num_rows: rows that main_fun received and has not answered.
        """
        self._open_session = session
        self._open_rows += num_rows

    def add(self, results: Sequence[Any] | Columns) -> None:
        """Take results for rows of the open batch.

        Raises:
            ResultCountError: more results than rows.
            RowError: a result fits no column.
        """
        if self._open_results + len(results) > self._open_rows:
            total = self._open_results + len(results)
            raise self._fail_open(
                f"returned {total} results for {self._open_rows} rows; call batch_results with one "
                "result per row"
            )
        self._open_results += len(results)
        session = self._sessions.get(self._open_session)
        if session is None or not results:
            return
        try:
            if isinstance(results, Columns):
                session.ready.extend(session.packer.pack_columns(results))
            else:
                session.ready.extend(session.packer.pack_rows(results))
        except FeedError as error:
            session.error = type(error)(f"{self._worker}: a result fits no column: {error}")
            raise
        session.answered_rows += len(results)

    def refuse_open(self) -> None:
        """Fail the session of the open batch: who reads its rows answers none."""
        if self._open_rows:
            self._fail_open(
                f"trains on feed {self._feed!r} and answers none of its rows; call inference() "
                "once main_fun reads ctx.get_data_feed(train_mode=False), or with the qname= of "
                "another feed, which main_fun answers"
            )

    def drop_fetched(self, number: int) -> None:
        """Drop a session whose last result its feeder takes: its connection goes on."""
        session = self.session(number)
        if session.is_fed and session.answered_rows == session.fed_rows and not session.ready:
            del self._sessions[number]

    def disconnected(self, connection: int) -> list[int]:
        """Drop the sessions of a connection that has ended; return those with unanswered rows."""
        ended = {n: each for n, each in self._sessions.items() if each.connection == connection}
        for number in ended:
            del self._sessions[number]
        return [n for n, each in ended.items() if each.answered_rows < each.fed_rows]

    def end(self) -> ResultCountError | None:
        """Fail all unanswered rows: the consumer has stopped; return the open batch's error."""
        unanswered = None
        if self._open_results != self._open_rows:
            unanswered = self._fail_open(
                f"returned {self._open_results} results for {self._open_rows} rows"
            )
        for session in self._sessions.values():
            if session.answered_rows < session.fed_rows and session.error is None:
                session.error = ResultCountError(
                    f"{self._worker} stopped with {session.answered_rows} results for "
                    f"{session.fed_rows} rows; main_fun must answer batches until should_stop()"
                )
        return unanswered

    def fail_all(self, error: FeedError) -> None:
        """Fail all sessions with an error."""
        for session in self._sessions.values():
            session.error = session.error or error

    def _fail_open(self, text: str) -> ResultCountError:
        error = ResultCountError(f"{self._worker} {text}")
        session = self._sessions.get(self._open_session)
        if session is not None:
            session.error = error
        self._open_rows = self._open_results = 0
        return error
