"""Messages between the driver and a node's supervisor, as typed structs.

Covers: the messages of the control plane (gRPC, msgpack bodies) both ways, their calls' deadlines.
Does not: transport (tfos.control.server, tfos.control.client), decisions (tfos.control.state),
tensors (rpc).

Direction and call:
    supervisor -> driver
        Register -> RegisterReply       unary, upsert by (role, index, attempt)
        Heartbeat -> HeartbeatReply     unary, every `heartbeat_s`; carries progress
        EventReport -> EventAck         unary, at once: Listening, FlushReached, Failed, Done ...
        LogBatch -> EventAck            unary, rate-limited lines of the node's output
    driver -> supervisor
        Subscribe -> SequencedOrder ...     server stream; orders arrive at once
    operator -> driver
        Ask -> Answer                   unary; another process of the driver's user, see tfos.watch

A node proves its identity by its TLS certificate; the server refuses a message whose node differs.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from rpc.endpoint import Endpoint, is_loopback
from tfos.failure import NodeFailure, NodeId
from tfos.fit_place import FitPlace

CALL_TIMEOUT_S = 5.0
"""Deadline of a unary call; well under the lease, so that several attempts fit into it."""
REGISTER_TIMEOUT_S = 20.0
"""The first call also connects; the driver may be busy starting jobs."""
MAX_LOG_LINES = 1000
"""Lines of one LogBatch; a supervisor sends at most 200."""
MAX_RESULT_BYTES = 1 << 20
"""Limit of one worker's return value: the driver keeps those of all workers."""
MAX_METRICS = 100
"""Limit of metrics of one epoch; the driver keeps many epochs."""
ShortText: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,4096}\Z")]
"""Text without control characters: the driver shows it in errors and in status()."""


DRIVER_EXECUTOR = "driver"
"""`Register.executor_id` of a node beside the driver: Spark's own name for the one executor of
`local[n]`, which has no `--executor-id`."""


class Register(msgspec.Struct, frozen=True):
    """A supervisor is up; a newer attempt of the same node replaces and fences the older one."""

    node: NodeId
    executor_id: ShortText
    host: ShortText
    pid: int
    skew: ShortText = ""
    """Versions on this executor that differ from the driver's, in one line."""


class RegisterReply(msgspec.Struct, frozen=True):
    """`accepted` is false when a newer attempt is already registered or the cluster is closing."""

    accepted: bool
    reason: str = ""
    heartbeat_s: float = 2.0
    lease_s: float = 20.0
    hang_s: float = 20.0
    """Seconds after which the supervisor ends a suspended child."""
    has_begun: bool = False
    """Whether the cluster trains already: a server restores what the attempt before it held."""


METRIC = "metric "
"""Prefix in `progress` of the names of metrics that main_fun reports itself."""
MOST_METRICS = 20
"""Reported metrics, as many as are shown: each goes with every heartbeat."""


class EpochRowCounts(msgspec.Struct, frozen=True, array_like=True):
    """One epoch of one feed at a worker; see feeding.receiver.epoch_rows."""

    epoch: int
    accepted_rows: int = 0
    trained_rows: int = 0
    taken_rows: int = -1
    """No row from this position on was read; -1: unknown."""
    dropped_rows: int = 0
    """Dropped rows among those before `position`."""

    @property
    def position(self) -> int:
        """All rows before this position are trained, but those dropped."""
        return self.trained_rows + self.dropped_rows


class FeedSnapshot(msgspec.Struct, frozen=True):
    """Rows of one feed as its worker counts them; see feeding.receiver.feed_queue.FeedStats."""

    feed: str
    fed_rows: int = 0
    taken_rows: int = 0
    dropped_rows: int = 0
    unread_bytes: int = 0
    starved_s: float = 0.0
    trained_rows: int = 0
    epochs: tuple[EpochRowCounts, ...] = ()
    """The last epochs."""
    is_drained: bool = False
    """Whether main_fun reads no more rows of it: it has called terminate(), or returned."""
    is_terminated: bool = False
    """Whether main_fun has called terminate()."""

    def epoch(self, number: int) -> EpochRowCounts:
        """Return the counts of an epoch; zeros if no row of it arrived."""
        return next((each for each in self.epochs if each.epoch == number), EpochRowCounts(number))


class Heartbeat(msgspec.Struct, frozen=True):
    """Heartbeat with the node's latest counters."""

    node: NodeId
    seq: int
    phase: ShortText
    child_pid: int = 0
    rss_bytes: int = 0
    progress: dict[str, float] = {}
    """steps, rows, loss and more, see tfos.worker.reports.progress_meter; the user's own metrics
    have METRIC before their names, so that none is taken for one of these."""
    feeds: tuple[FeedSnapshot, ...] = ()
    stats: bytes = b""
    """Counters of a parameter server, a `ps.stats.server_stats.ServerStats`, which only the driver
    decodes."""


Output: TypeAlias = Literal["all", "piece", "none"]
"""Which lines of a node's output its driver wants: all of them, those that a reader of this one log
takes, or none, as nobody reads them."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """`fenced`: the attempt was replaced and must exit."""

    fenced: bool = False
    output: Output = "all"
    """Lines to send until the next reply."""


class LogBatch(msgspec.Struct, frozen=True):
    """Lines of the node's output since the last batch; `dropped` were over the rate limit."""

    node: NodeId
    lines: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LOG_LINES)]
    dropped: Annotated[int, msgspec.Meta(ge=0)] = 0


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The child serves; its endpoint goes into the roster."""

    endpoint: Endpoint
    free_port: int = 0
    """TCP port that a worker holds for a server of main_fun; 0: none."""


class FlushReached(msgspec.Struct, frozen=True, tag=True):
    """All rows of this epoch of this feed are trained or dropped.

    `stats` are the feed's counts at that moment, `progress` the training loop's numbers: those of a
    heartbeat may be two seconds old.
    """

    feed: str
    epoch: int
    stats: FeedSnapshot | None = None
    progress: dict[str, float] = {}


class BatchReport(msgspec.Struct, frozen=True, tag=True):
    """How far the chief is with the micro-batches of streams; see worker.trained.feeds."""

    feed: str
    """Feed of the order that this answers; empty: none, the chief has begun."""
    number: int
    """Number of the order that this answers."""
    is_done: bool
    """True: the order was carried out. False: a batch's rows may be fed now."""
    trained: dict[str, int]
    """The last batch id that the parameters contain, by query."""
    is_noted: bool = True
    """Whether main_fun reports trained batches, so that `trained` includes them."""
    error: str = ""
    """Why it could not be saved."""
    is_lost: bool = False
    """Whether that is because the newest batch is not whole in the parameters any more."""
    epochs: dict[str, int] = {}
    """From a chief that has begun: by feed, the epochs that the interrupted run, which this one
    resumes, had trained."""


class TensorBoardUp(msgspec.Struct, frozen=True, tag=True):
    """TensorBoard answers at this URL; or it does not, for this reason."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[!-~]{1,1000})?\Z")]
    reason: str = ""

    @property
    def is_local(self) -> bool:
        """Whether only the chief's host can reach it."""
        try:
            host = urlsplit(self.url).hostname or ""
        except ValueError:  # such as of `http://[`
            return False
        return is_loopback(host)


class FitReading(msgspec.Struct, frozen=True, tag=True):
    """`fit` of a distributed model has begun, or ended, on the chief."""

    feed: ShortText
    """The feed that it reads, one of its epochs per epoch fed; empty: it reads other data."""
    is_over: bool = False
    number: int = -1
    """Which fit of the distributed model, from 0; -1: unknown."""
    epoch: int = 0
    """Its first epoch, as Keras counts."""
    fed_epoch: int = 0
    """The epoch of the feed, or of the files, that it begins with, or that comes after its end."""


class EpochTrained(msgspec.Struct, frozen=True, tag=True):
    """An epoch of `fit` has ended on the chief, with its validation and callbacks.

    For a distributed model the numbers are those of all workers.
    """

    fit: int
    """Which `fit` of main_fun, from 1."""
    epoch: int
    """Epoch of this fit, as Keras counts, from 0."""
    metrics: Annotated[dict[ShortText, float], msgspec.Meta(max_length=MAX_METRICS)] = {}
    steps: int = 0
    rows: int = 0
    """Rows of the epoch; 0: unknown."""
    seconds: float = 0.0
    """Seconds from the epoch's first batch to the end of its callbacks."""
    feed: ShortText = ""
    """Feed of the epoch; empty: it reads files, or the model is not distributed."""
    fed_epoch: int = -1
    """The newest epoch of the feed, or of the files, that this worker has trained; -1: none."""
    is_distributed: bool = False
    """Whether all workers train this model together."""


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """The evaluator has evaluated a checkpoint."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    """Step of the checkpoint: updates of the servers."""
    metrics: Annotated[dict[ShortText, float], msgspec.Meta(max_length=MAX_METRICS)] = {}
    """Metrics, named `val_…`."""
    seconds: float = 0.0
    """Seconds to read and to evaluate it."""

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"checkpoint of step {self.step}: {shown or 'no metrics'}"


class BestSaved(msgspec.Struct, frozen=True, tag=True):
    """The chief keeps this checkpoint as the best by the metric of `Checkpoints.keep_best`."""

    path: str
    step: int
    metric: ShortText
    value: float


class SavedNow(msgspec.Struct, frozen=True, tag=True):
    """The chief has carried out the order SaveNow of this number, or could not."""

    number: int
    path: ShortText = ""
    """Path of the checkpoint that holds the parameters."""
    step: int = -1
    error: ShortText = ""
    """Why nothing was saved; empty: it was."""


class NotSaved(msgspec.Struct, frozen=True, tag=True):
    """The chief's periodic saves fail repeatedly, or its last save failed."""

    directory: ShortText
    """Directory or URL of Checkpoints."""
    error: ShortText
    """Why the save failed."""
    step: int = -1
    """The newest saved step; -1: there is none."""
    is_last: bool = False
    """Whether main_fun has returned, so that no further save is tried."""


class PhaseChanged(msgspec.Struct, frozen=True, tag=True):
    """What the child does: `importing`, `importing keras`, `waiting for roster`, `main_fun`, ..."""

    phase: ShortText


class ServesShard(msgspec.Struct, frozen=True, tag=True):
    """This worker serves a shard of the parameters, which ends with it: there are no servers."""


class InCollective(msgspec.Struct, frozen=True, tag=True):
    """TensorFlow in this worker sums with other workers, in calls that wait for all of them."""

    num_workers: int
    """Workers of its strategy, this one included: perhaps not all of the cluster."""


class StrategyBuilt(msgspec.Struct, frozen=True, tag=True):
    """The chief has built ParameterServerStrategy, and can do without a worker from now on."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child failed or died."""

    failure: NodeFailure
    feeds: tuple[FeedSnapshot, ...] = ()
    """Counts of a worker at its end, newer than those of its heartbeats; empty: unknown."""


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """The server was killed, and its supervisor has restarted it."""

    failure: NodeFailure
    """How it ended."""
    count: int
    limit: int
    """Restarts so far, and their limit."""

    def __str__(self) -> str:
        number = f"{self.count} of {self.limit}"
        return f"{self.failure.message}; started again ({number})"


class UpdatesLost(msgspec.Struct, frozen=True, tag=True):
    """A restarted server now knows how much its workers got from it since the checkpoint.

    Or it goes on from an older step, as its own part of the newest one is damaged.
    """

    text: str


class CutShort(msgspec.Struct, frozen=True, tag=True):
    """After main_fun the worker's process outlived a stop's grace, or did not end with code 0."""

    grace_s: float
    how: ShortText = ""
    """How it ended on its own; empty: the grace ended."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The child ended well: main_fun returned, or the server followed an order to stop."""

    feeds: tuple[FeedSnapshot, ...] = ()
    """Final counts of its feeds: no further row will be trained."""
    result: Annotated[bytes, msgspec.Meta(max_length=MAX_RESULT_BYTES)] = b""
    """What main_fun returned, encoded by tfos.control.return_values; empty: None."""
    no_result: ShortText = ""
    """Why what main_fun returned is not here."""
    progress: dict[str, float] = {}
    """Final numbers of its training loop."""
    hands_over: bool = False
    """Whether its Spark task returns a value of main_fun; see NodeContext.hand_over."""


Event = (
    Listening
    | FlushReached
    | BatchReport
    | TensorBoardUp
    | FitReading
    | EpochTrained
    | BestSaved
    | SavedNow
    | NotSaved
    | Evaluated
    | PhaseChanged
    | ServesShard
    | InCollective
    | StrategyBuilt
    | Failed
    | Restarted
    | UpdatesLost
    | CutShort
    | Done
)


class EventReport(msgspec.Struct, frozen=True):
    """An event with its sender, which sends it again until it has the ack."""

    node: NodeId
    seq: int
    """Number of the event in this attempt, from 1: one that comes again counts once."""
    event: Event


class EventAck(msgspec.Struct, frozen=True):
    """Received."""


class Subscribe(msgspec.Struct, frozen=True):
    """Open the stream of orders for this node, from the one after `after` on.

    The newest 4096 orders of an attempt are kept, so none is lost when a stream breaks.
    """

    node: NodeId
    after: int = 0


class RosterEntry(msgspec.Struct, frozen=True):
    """One node as its peers see it; `rank` counts workers (chief is 0) or servers."""

    node: NodeId
    rank: int
    host: str
    endpoint: Endpoint
    free_port: int = 0
    """See Listening."""


FeedEpoch: TypeAlias = tuple[str, int]
"""A feed and one of its epochs."""


class Joining(msgspec.Struct, frozen=True):
    """Where a worker begins that joins others which train."""

    feeds: tuple[FeedEpoch, ...] = ()
    """The first epoch of each feed that it takes rows of; a feed that is not here begins at 0."""
    fit: FitPlace | None = None
    """The chief's fit; None: the chief has reported none."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The roster is complete: every node serves, workers may run main_fun."""

    roster: tuple[RosterEntry, ...]
    joining: Joining | None = None
    """Where a new attempt joins; None: all nodes begin together."""


class Flush(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All rows of this epoch were accepted: mark its end."""

    feed: str
    epoch: int
    validation: FeedEpoch | None = None
    """Feed and epoch of the rows that validate it, which are fed next."""
    rounds: int = 0
    """Rounds in which lost rows were fed again; an order that a newer round superseded is
    ignored."""
    num_fed: int = 0
    """Epochs that train() of this run has fed whole once this one is trained: a run that resumes
    leaves that many out. 0: this one does not count, as it is of a stream or has failed."""


class TrainBatch(msgspec.Struct, frozen=True, tag=True):
    """To the chief: the next epoch of this feed is a micro-batch of a stream."""

    feed: str
    number: int
    """Grows with each order of this kind and the next."""
    epoch: int
    query: str
    """Spark's id of the streaming query, the same after a restart."""
    batch_id: int
    holds: bool
    """Whether no save may begin before it was trained."""
    saves: bool
    """Whether to save once it was trained."""


class LeaveBatch(msgspec.Struct, frozen=True, tag=True):
    """To the chief: the micro-batch of this order is not to be noted."""

    feed: str
    number: int
    in_part: bool
    """Whether some of its rows may be trained: it failed; else it had none."""


class SaveBatches(msgspec.Struct, frozen=True, tag=True):
    """To the chief: save the micro-batches trained since the last save."""

    feed: str
    number: int


class SaveNow(msgspec.Struct, frozen=True, tag=True):
    """To the chief: save the parameters now, and report SavedNow."""

    number: int
    """Grows with each order of this kind."""


class StopTraining(msgspec.Struct, frozen=True, tag=True):
    """To the workers: stop training at the end of the epoch; main_fun returns on its own."""

    reason: str


class FeedAgain(msgspec.Struct, frozen=True, tag=True):
    """To the workers: lost rows of this epoch are fed again, and others train them first."""

    feed: str
    epoch: int


class ComeTo(msgspec.Struct, frozen=True, tag=True):
    """To the chief: the rows of all epochs before this one of the feed are trained or dropped."""

    feed: str
    epoch: int


class FinishFeed(msgspec.Struct, frozen=True, tag=True):
    """The feed ends: no more rows will arrive."""

    feed: str


class FenceWorker(msgspec.Struct, frozen=True, tag=True):
    """This worker is lost: servers fence it, and wait for it once a newer attempt trains."""

    rank: int
    generation: int
    reason: str = ""


class WorkerDone(msgspec.Struct, frozen=True, tag=True):
    """This worker's main_fun has returned: servers no longer wait for it."""

    rank: int


class ServerMoved(msgspec.Struct, frozen=True, tag=True):
    """To the workers: a lost server was started again at another place, from its checkpoint."""

    rank: int
    endpoint: Endpoint


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the child within `grace_s`, then kill it, then end."""

    reason: str
    grace_s: float = 5.0
    is_orderly: bool = False
    """The user's shutdown() gives this grace, and may give more; False: the node ends by force."""


Order = (
    Start
    | Flush
    | TrainBatch
    | LeaveBatch
    | SaveBatches
    | SaveNow
    | StopTraining
    | FeedAgain
    | ComeTo
    | FinishFeed
    | FenceWorker
    | WorkerDone
    | ServerMoved
    | Stop
)


AboutWorker = FenceWorker | WorkerDone
"""What a server that starts later has to hear as well: driver and supervisors keep it."""


class SequencedOrder(msgspec.Struct, frozen=True):
    """An order and its number, from 1, among all orders to this node."""

    seq: int
    order: Order


class Ask(msgspec.Struct, frozen=True):
    """A question or request of an operator: another process of the driver's user.

    The key that a stream's ticket holds may ask for `end_streams` alone.
    """

    what: Literal["status", "log", "save", "stop", "end_streams"]
    node: ShortText = ""
    """Node of `log`."""
    after: float = 0.0
    """Of `status`: only points of the curve later than this. Of `log`: only later lines."""


class Answer(msgspec.Struct, frozen=True):
    """The answer as JSON; see tfos.watch.job."""

    body: bytes
