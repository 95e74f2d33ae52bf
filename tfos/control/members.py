"""Member: the driver's record of one node. Data only; control.state changes it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from rpc.endpoint import Endpoint
from tfos.control.messages import (
    BatchReport,
    Done,
    FeedSnapshot,
    FlushReached,
    Heartbeat,
    InCollective,
    PhaseChanged,
    Register,
    ServesShard,
    StrategyBuilt,
)
from tfos.control.restarts.budget import RestartBudget
from tfos.failure import NodeFailure, NodeId, is_crash
from tfos.topology import PlannedNode


class NodeStatus(enum.Enum):
    """Status of a node; the value is the text that status() shows."""

    MISSING = "not registered"
    REGISTERED = "starting"
    READY = "serves, waits for the roster"
    RUNNING = "running"
    DONE = "main_fun returned"
    LOST = "lost"
    RESTARTING = "lost, is started again"
    FAILED = "failed"
    ENDED = "ended"


WINDOW_BEATS = 16
"""Heartbeats of half a minute, the window of status()."""
_KEPT_ANSWERS = 64
"""Answers of the chief to keep, per feed; a thread that waits for one looks at once."""
LIVE = frozenset({NodeStatus.REGISTERED, NodeStatus.READY, NodeStatus.RUNNING, NodeStatus.DONE})
"""Statuses of a node whose supervisor runs and takes orders."""

GONE = frozenset({NodeStatus.LOST, NodeStatus.RESTARTING})
"""Statuses of a node whose attempt has ended or was given up, in a cluster that goes on."""


@dataclass(slots=True)
class Member:
    """One planned node and its newest attempt."""

    planned: PlannedNode
    status: NodeStatus = NodeStatus.MISSING
    attempt: int = -1
    first_attempt: int = 0
    """First attempt of the newest job that starts this node; Spark counts on from there."""
    executor_id: str = ""
    host: str = ""
    pid: int = 0
    endpoint: Endpoint | None = None
    free_port: int = 0
    phase: str = ""
    phase_since_s: float = 0.0
    """When the driver heard of it, in monotonic seconds."""
    registered_s: float = 0.0
    heard_s: float = 0.0
    last_report: int = 0
    """Number of its newest event."""
    stream: int = 0
    """Number of its newest stream of orders; 0: it has had none."""
    stream_lost_s: float | None = None
    """When that ended, in monotonic seconds; None: it is open."""
    moved_s: float = 0.0
    """When its training was last seen to go on, or main_fun to return, in monotonic seconds."""
    end: NodeFailure | None = None
    """How its newest attempt ended without an order; None: it has not."""
    lost_s: float = 0.0
    """When its newest attempt was lost, in monotonic seconds."""
    is_unheard: bool = False
    """Whether it is missing because it was silent at its start; it goes on if it is heard again."""
    stop_ordered: bool = False
    serves_shard: bool = False
    """Whether it is a worker that serves a shard of the parameters."""
    in_collective: bool = False
    """Whether it is a worker whose TensorFlow waits for other workers."""
    num_tied: int = 0
    """Workers of its strategy, including itself."""
    has_strategy: bool = False
    """Whether it is a chief that has built ParameterServerStrategy."""
    beats: deque[Heartbeat] = field(default_factory=lambda: deque(maxlen=WINDOW_BEATS))
    """The last heartbeats, the newest last."""
    flushes: dict[str, FlushReached] = field(default_factory=dict)
    done: Done | None = None
    """Last counts and numbers of a worker whose main_fun has returned, and what it returned."""
    last_feeds: tuple[FeedSnapshot, ...] = ()
    """Counts that its supervisor read after its end."""
    batches: dict[str, dict[int, BatchReport]] = field(default_factory=dict)
    """The chief's last answers by feed and number of the order; "" and 0: it has started."""
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(0))
    """Restarts of all its attempts."""

    @property
    def name(self) -> str:
        """`worker:1`."""
        return self.planned.name

    @property
    def node(self) -> NodeId:
        """Its newest attempt."""
        return NodeId(self.planned.role, self.planned.index, max(self.attempt, 0))

    @property
    def where(self) -> str:
        """`worker:1@host`, with the host of its newest attempt."""
        return f"{self.name}@{self.host}"

    @property
    def is_live(self) -> bool:
        """Whether orders reach it."""
        return self.status in LIVE

    @property
    def crash(self) -> NodeFailure | None:
        """How its newest attempt crashed; None: it lives, or ended in another way."""
        return self.end if self.end is not None and is_crash(self.end) else None

    @property
    def loss(self) -> NodeFailure:
        """How its newest attempt, which is lost, ended."""
        return self.end or self.failure("", f"{self.name} was lost")

    def ends_by(self, failure: NodeFailure) -> None:
        """Keep how its newest attempt ended: the first record, or the first of a crash."""
        if failure.node != self.node:
            return
        if self.end is None or (is_crash(failure) and not is_crash(self.end)):
            self.end = failure

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The newest heartbeat of the newest attempt."""
        return self.beats[-1] if self.beats else None

    def take_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Keep a heartbeat unless a newer one has arrived.

        Args:
            heartbeat: heartbeat of the newest attempt.
            now_s: monotonic seconds.
        """
        if not self.beats or heartbeat.seq > self.beats[-1].seq:
            before = self.movement
            self.beats.append(heartbeat)
            if self.movement != before:
                self.moved_s = now_s
            self._enter(heartbeat.phase or self.phase, now_s)

    def _enter(self, phase: str, now_s: float) -> None:
        if phase != self.phase:
            self.phase, self.phase_since_s = phase, now_s

    def note(
        self,
        event: PhaseChanged
        | ServesShard
        | InCollective
        | StrategyBuilt
        | FlushReached
        | BatchReport,
        now_s: float,
    ) -> None:
        """Keep an event about what it does and how far it is.

        Args:
            event: the event as the node reports it.
            now_s: monotonic seconds.
        """
        match event:
            case PhaseChanged(phase):
                self._enter(phase, now_s)
            case ServesShard():
                self.serves_shard = True
            case InCollective(num_workers):
                self.in_collective, self.num_tied = True, num_workers
                self.moved_s = now_s
            case StrategyBuilt():
                self.has_strategy = True
            case FlushReached(feed, epoch):
                known = self.flushes.get(feed)
                # The threads that wait for epochs may report in another order.
                if known is None or epoch >= known.epoch:
                    self.flushes[feed] = event
                    self.moved_s = now_s
            case BatchReport(feed, number):
                answers = self.batches.setdefault(feed, {})
                answers[number] = event  # each waits for its own, and they may overtake each other
                while len(answers) > _KEPT_ANSWERS:
                    del answers[min(answers)]

    def take(self, register: Register, now_s: float) -> None:
        """Become the attempt that registers.

        Args:
            register: the node, its attempt, host and process.
            now_s: monotonic seconds.
        """
        self.status = NodeStatus.REGISTERED
        self.attempt = register.node.attempt
        self.executor_id = register.executor_id
        self.host = register.host
        self.pid = register.pid
        self.endpoint = None
        self.free_port = 0
        self._enter("registered", now_s)
        self.registered_s = self.heard_s = self.moved_s = now_s
        self.last_report = 0
        self.end = None
        self.stream, self.stream_lost_s = 0, None
        self.is_unheard = self.stop_ordered = False
        self.in_collective = self.has_strategy = False
        self.beats.clear()
        self.flushes = {}
        self.done = None
        self.last_feeds = ()
        self.batches = {}

    def copied(self) -> Member:
        """Return a copy that stays as it is when the node goes on."""
        batches = {feed: answers.copy() for feed, answers in self.batches.items()}
        return replace(self, beats=self.beats.copy(), flushes=self.flushes.copy(), batches=batches)

    def as_lost(self, *, is_first: bool) -> Member:
        """Return a record of this attempt that stays as it is when another one registers.

        Args:
            is_first: keep how it ended as a whole: that may become the cluster's error. Of later
                ones, which a stream has without end, only what is asked for stays.
        """
        end = self.end
        if end is not None and not is_first:
            end = msgspec.structs.replace(end, traceback="", log_tail=())
        beats = deque([self.beats[-1]] if self.beats else [], maxlen=WINDOW_BEATS)
        return replace(self, status=NodeStatus.LOST, end=end, beats=beats, batches={})

    @property
    def progress(self) -> dict[str, float]:
        """The newest numbers of its training loop: a heartbeat's, a flush's or the last; or {}."""
        beat = self.heartbeat
        known = [beat.progress] if beat is not None else []
        known += [flush.progress for flush in self.flushes.values()]
        if self.done is not None:
            known.append(self.done.progress)
        # Heartbeats and events overtake each other; `at_s` is the worker's own clock.
        return max(known, key=lambda each: each.get("at_s", 0.0), default={})

    @property
    def movement(self) -> float:
        """A number that changes whenever its heartbeats or epochs show that it does something."""
        if self.heartbeat is None:
            return 0.0
        feeds = self.heartbeat.feeds
        rows = sum(feed.taken_rows + feed.trained_rows + feed.dropped_rows for feed in feeds)
        return rows + self.progress.get("steps", 0.0) + len(self.flushes)

    def feed(self, feed: str) -> FeedSnapshot:
        """Return the newest counts of one feed: a flush's, a later heartbeat's, or the last."""
        return max(self._snapshots(feed), key=_progress_of, default=FeedSnapshot(feed))

    def reads(self, feed: str) -> bool:
        """Whether its main_fun may read further rows of a feed: it never begins again."""
        return not any(each.is_drained for each in self._snapshots(feed))

    def has_terminated(self, feed: str) -> bool:
        """Whether its main_fun has ended a feed by terminate(), returned or not."""
        return any(each.is_terminated for each in self._snapshots(feed))

    @property
    def feeds(self) -> tuple[FeedSnapshot, ...]:
        """The newest counts of each feed."""
        return tuple(map(self.feed, dict.fromkeys(each.feed for each in self._known())))

    @property
    def trained_rows(self) -> int:
        """Rows of all feeds that it has trained, by the newest counts of each."""
        return sum(each.trained_rows for each in self.feeds)

    @property
    def reads_own_rows(self) -> bool:
        """Whether main_fun reads rows itself: none was fed to it, or fewer than it has trained."""
        fed = sum(each.fed_rows for each in self.feeds)
        return not fed or self.progress.get("rows", 0.0) > fed

    def _snapshots(self, feed: str) -> list[FeedSnapshot]:
        """Return all that is known of one feed at this attempt."""
        return [snapshot for snapshot in self._known() if snapshot.feed == feed]

    def _known(self) -> list[FeedSnapshot]:
        return [
            *(self.heartbeat.feeds if self.heartbeat else ()),
            *(self.done.feeds if self.done else ()),
            *self.last_feeds,
            *(flush.stats for flush in self.flushes.values() if flush.stats is not None),
        ]

    def failure(self, error_type: str, message: str) -> NodeFailure:
        """Return a record for a failure that the node could not report.

        Args:
            error_type: kind of the failure.
            message: its text.
        """
        return NodeFailure(
            self.node,
            self.host,
            self.pid,
            executor_id=self.executor_id,
            phase=self.phase,
            error_type=error_type,
            message=message,
        )

    def describe(self, now_s: float) -> str:
        """Return `worker:2 (executor 5 on host-b, 58 s since it registered, last phase: ...)`."""
        if self.attempt < 0:
            return f"{self.name} (never registered)"
        age_s = now_s - self.registered_s
        gone = "; gone since" if self.status is NodeStatus.MISSING else ""
        if self.status is NodeStatus.RESTARTING:
            gone = f"; {self.status.value}"
        return (
            f"{self.name} (executor {self.executor_id} on {self.host}, pid {self.pid}, "
            f"{age_s:.0f} s since it registered, last phase: {self.phase}{gone})"
        )


def mean_loss(workers: Iterable[Member]) -> float | None:
    """Return the mean of the losses that workers reported last; None: none has.

    A lost worker's loss does not count: it belongs to older parameters.
    """
    progress = [worker.progress for worker in workers if worker.status not in GONE]
    losses = [each["loss"] for each in progress if "loss" in each]
    return sum(losses) / len(losses) if losses else None


def _progress_of(snapshot: FeedSnapshot) -> tuple[int, int, bool]:
    """The sum never falls: rows that were dropped and then trained move from one to the other."""
    is_last = any(each.taken_rows >= 0 for each in snapshot.epochs)
    return snapshot.trained_rows + snapshot.dropped_rows, snapshot.taken_rows, is_last
