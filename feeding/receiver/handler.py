"""Feed handler: the worker's side of a feeder: chunks in, delayed replies and results out.

Covers: the RPC handler, checks before memory is allocated, back-pressure.
Does not: order rows (feed_queue), check results (results), serve the trainer (channel).
Runs in: a worker process.
Threads: one per feeder; shared state is FeedState, under its condition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from feeding.columnar.chunk import Chunk, decode, payload_bytes
from feeding.errors import ChunkError, FeedError, TrainerFailed
from feeding.protocol import messages
from feeding.protocol.messages import FeedStatus, Fetch, Hello, Put, Recall, Recalled, Results, Wait
from feeding.receiver.state import FeedState
from rpc.auth.handshake import Identity, Role
from rpc.server.listener import Call

MAX_TEXT_CHARS = 16_000
"""An error frame ends at 64 KiB."""


class FeedHandler:
    """Answers feeders; one instance per channel."""

    def __init__(self, state: FeedState) -> None:
        self._state = state

    def handle(self, call: Call) -> None:
        """Answer one call; a refusal is sent as the code of its error."""
        try:
            if call.peer.role is not Role.FEEDER:
                raise FeedError(f"{call.peer} may not feed {self._state.worker}; only feeders may")
            self._answer(call)
        except TrainerFailed as error:
            details = {"error_type": error.error_type, "traceback": error.remote_traceback}
            call.fail(error.code, str(error)[:MAX_TEXT_CHARS], details)
        except FeedError as error:
            call.fail(error.code, str(error)[:MAX_TEXT_CHARS])

    def disconnected(self, peer: Identity) -> None:
        """End the inference sessions of a feeder's connection that has ended."""
        if peer.role is not Role.FEEDER or not peer.generation:
            return
        state = self._state
        with state.changed:
            for feed, answers in state.answers.items():
                for session in answers.disconnected(peer.generation):
                    state.queues[feed].abandon(session)
            state.changed.notify_all()

    def _answer(self, call: Call) -> None:
        request = messages.decode_request(call.meta)
        if isinstance(request, Put):
            position = self._receive(call, request)
            with self._state.changed:
                status = self._status(request.chunk.feed, request.chunk.session, position=position)
        elif call.payload_bytes:
            raise ChunkError(f"{type(request).__name__} has no payload, got {call.payload_bytes}")
        elif isinstance(request, Fetch):
            chunk, status = self._fetch(request)
            call.reply(messages.encode(Results(chunk.meta, status)), chunk.encode())
            return
        elif isinstance(request, Recall):
            call.reply(messages.encode(self._recall(request)))
            return
        elif isinstance(request, Hello):
            status = self._hello(request)
        else:
            with self._state.changed:
                self._state.queue(request.feed)
                status = self._hold(call, request)
        call.reply(messages.encode(status))

    def _hello(self, request: Hello) -> FeedStatus:
        messages.check_version(request.version)
        with self._state.changed:
            self._state.check_open()
            queue = self._state.queue(request.feed)
            accepted = 0
            if request.exactly_once:
                rows = queue.rows(request.epoch)
                accepted = len(rows.claim(request.partition, request.attempt))
            ended = request.reopen > 0 and not queue.reopen(request.epoch, request.reopen)
            return self._status(request.feed, 0, accepted=accepted, ended=ended)

    def _recall(self, request: Recall) -> Recalled:
        with self._state.changed:
            self._state.check_open()
            rows = self._state.queue(request.feed).rows(request.epoch)
            accepted = rows.accepted_of(request.partition)
            return Recalled(accepted.page(request.start, messages.MAX_RECALLED))

    def _receive(self, call: Call, request: Put) -> int:
        state, meta = self._state, request.chunk
        expected = payload_bytes(meta)
        if expected != call.payload_bytes:
            raise ChunkError(f"chunk of {expected} bytes came with {call.payload_bytes}")
        limit = state.config.max_chunk_bytes
        if expected > limit:
            raise ChunkError(f"chunk of {expected} bytes, max_chunk_bytes is {limit}")
        payload = memoryview(np.empty(expected, np.uint8).data)
        call.read_into(payload)
        chunk = decode(meta, payload)
        with state.changed:
            state.check_open()
            queue, answers = state.queue(meta.feed), state.answers_of(meta.feed)
            position = queue.offer(chunk, request.attempt)
            if meta.mode == "inference":
                answers.fed(chunk, call.peer.generation)
                if queue.draining:
                    answers.end()
            state.changed.notify_all()
            return position

    def _hold(self, call: Call, request: Wait) -> FeedStatus:
        """Delay the reply until there is room or a result, at most for `hold_s`."""
        feed, number = request.feed, request.session
        session = self._state.answers_of(feed).session

        def done() -> bool | None:
            ready = bool(number) and bool(session(number).ready)
            drained = request.drained and not self._state.queue(feed).session_bytes(number)
            return ready or drained or (request.room and self._has_room(feed, number)) or None

        self._state.wait_for(done, request.hold_s, call.peer_gone)
        self._state.check_open()
        return self._status(feed, number)

    def _has_room(self, feed: str, number: int) -> bool:
        queue = self._state.queue(feed)
        if queue.draining or queue.unread_bytes <= self._state.config.max_inflight_bytes:
            return True
        # A batch has rows of one session only. If other sessions could fill the worker while all
        # rows of this one are read, its half full batch would wait for ever.
        return bool(number) and not queue.session_bytes(number)

    def _status(self, feed: str, number: int, **fields: Any) -> FeedStatus:
        queue = self._state.queue(feed)
        session = self._state.answers_of(feed).session(number) if number else None
        ready: Chunk | None = session.ready[0] if session and session.ready else None
        return FeedStatus(
            unread_bytes=queue.unread_bytes,
            taken_bytes=queue.taken_bytes,
            room=self._has_room(feed, number),
            draining=queue.draining,
            ready=ready is not None,
            ready_bytes=payload_bytes(ready.meta) if ready else 0,
            answered_rows=session.answered_rows if session else 0,
            session_bytes=queue.session_bytes(number),
            **fields,
        )

    def _fetch(self, request: Fetch) -> tuple[Chunk, FeedStatus]:
        with self._state.changed:
            self._state.check_open()
            answers = self._state.answers_of(request.feed)
            session = answers.session(request.session)
            if not session.ready:
                raise FeedError(f"{self._state.worker}: no results are ready; Wait announces them")
            chunk, status = session.ready.popleft(), self._status(request.feed, request.session)
            answers.drop_fetched(request.session)
            return chunk, status
