"""Reports of train() and status(): records that print as tables, in notebooks as HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ps.stats.server_stats import SHOWN_REQUESTS, ServerStats
from rpc.field_texts import with_field_texts
from rpc.histogram import duration_text
from tfos.console import html
from tfos.failure import NodeFailure
from tfos.monitor.history import History
from tfos.node_memory import overhead_mib

_EPOCH_HEAD = ("", "rows fed", "trained", "dropped", "repeated", "seconds", "rows/s")
_MESSAGE_CHARS = 200
_NODE_HEAD = (
    *("node", "status", "phase", "host", "executor", "pid", "silent", "MiB", "steps", "rows"),
    "loss",
)


@with_field_texts
@dataclass(frozen=True, slots=True)
class EpochReport:
    """Where the rows of one epoch of one feed went: fed = trained + dropped, each row once."""

    feed: str
    epoch: int
    """Counts from 0 over the life of the feed, across calls of train(), with the epochs that the
    run that this one resumes had trained."""
    fed_rows: int
    """Rows of the data."""
    trained_rows: int
    """Rows of finished batches, whose push the servers have acknowledged."""
    dropped_rows: int
    """Rows not trained: main_fun had returned, or they were lost with a worker when every other one
    had ended the epoch."""
    repeated_rows: int
    """Rows that were fed a second time: by a task that Spark repeated, or because a lost worker had
    not reported them as trained."""
    seconds: float
    per_worker: dict[str, int] = field(default_factory=dict)
    """Rows that each worker trained, repeats included; for a lost worker, its last report."""
    skipped_rows: int = 0
    """Dropped rows that were left out because they crash workers: on_poison="skip"."""
    is_validation: bool = False
    """Whether the rows validate an epoch: `trained_rows` are then those that main_fun read."""

    def __str__(self) -> str:
        return f"{self.title}: {self.summary}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        return html.table(_EPOCH_HEAD, [self._cells()])

    @property
    def title(self) -> str:
        """Which epoch it is, counted from 1."""
        return f"epoch {self.epoch + 1} of {self.feed}"

    @property
    def rows_per_s(self) -> float:
        """Rows trained per second of the whole epoch, the workers' start included."""
        return self.trained_rows / self.seconds if self.seconds > 0 else 0.0

    @property
    def summary(self) -> str:
        """The counts alone, for a line that names the epoch itself."""
        text = (
            f"{self.fed_rows} rows fed, {self.trained_rows} "
            f"{'read' if self.is_validation else 'trained'}, {self.dropped_rows} dropped "
            f"in {self.seconds:.1f} s ({self.rows_per_s:.0f} rows/s)"
        )
        return f"{text}, {self.repeated_rows} repeated" if self.repeated_rows else text

    def _cells(self) -> tuple[str, ...]:
        trained = f"{self.trained_rows} read" if self.is_validation else str(self.trained_rows)
        return (
            self.title,
            str(self.fed_rows),
            trained,
            str(self.dropped_rows),
            str(self.repeated_rows),
            f"{self.seconds:.1f}",
            f"{self.rows_per_s:.0f}",
        )


@with_field_texts
@dataclass(frozen=True, slots=True)
class TrainReport:
    """All epochs of one call of train()."""

    epochs: tuple[EpochReport, ...]
    validation: tuple[EpochReport, ...] = ()
    """Reports of the validation rows; `trained_rows` are those that main_fun read."""
    history: History = field(default_factory=History)
    """Metrics of the epochs of `fit` that ended meanwhile; empty if main_fun reads the feed by
    other means. See docs/guides/results.md."""

    @property
    def fed_rows(self) -> int:
        """Rows fed in all epochs."""
        return sum(epoch.fed_rows for epoch in self.epochs)

    @property
    def trained_rows(self) -> int:
        """Rows trained in all epochs."""
        return sum(epoch.trained_rows for epoch in self.epochs)

    @property
    def dropped_rows(self) -> int:
        """Rows not trained in all epochs."""
        return sum(epoch.dropped_rows for epoch in self.epochs)

    @property
    def repeated_rows(self) -> int:
        """Rows fed a second time in all epochs."""
        return sum(epoch.repeated_rows for epoch in self.epochs)

    def __str__(self) -> str:
        reports = [*self.epochs, *self.validation]
        return "\n".join(map(str, reports)) or "no epoch was fed"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        reports = [*self.epochs, *self.validation]
        if not reports:
            return html.paragraph(str(self))
        fed = html.table(_EPOCH_HEAD, [report._cells() for report in reports])
        return fed + self.history._repr_html_() if self.history.epochs else fed


@with_field_texts
@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """Memory of the nodes on one executor, whose processes live beside its Java."""

    executor_id: str
    host: str
    nodes: tuple[str, ...]
    rss_mib: float
    """Sum of the resident memory of their processes."""
    room_mib: float
    """What the executor's container has beside Java's heap; 0: it runs in no container."""

    @property
    def is_over(self) -> bool:
        """Whether the nodes hold more than their container has for them."""
        return 0 < self.room_mib < self.rss_mib

    def __str__(self) -> str:
        room = f" of {self.room_mib:,.0f} MiB beside Java's heap" if self.room_mib else ""
        names = ", ".join(self.nodes)
        text = f"executor {self.executor_id} on {self.host}: {self.rss_mib:,.0f} MiB{room}: {names}"
        if self.is_over:
            text += (
                ". The host or the cluster manager may end it: raise "
                f"spark.executor.memoryOverhead to {overhead_mib(len(self.nodes), self.rss_mib)}m "
                "or more"
            )
        return text


@with_field_texts
@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a worker's time went lately, in seconds over `steps` steps."""

    steps: float
    compute_s: float
    """Seconds of forward and backward passes and of taking over the servers' values."""
    feed_s: float
    """Seconds of waiting for the next batch."""
    lookup_s: float
    """Seconds of preparing ids, and of waiting for rows of tables that no earlier push brought."""
    pull_s: float
    push_s: float
    """Seconds of pushing and getting fresh values, without waits for other workers."""
    wait_s: float
    """Seconds of waiting for other workers, with sync and ssp."""

    @property
    def own_s(self) -> float:
        """Seconds of the worker's own work per step, without waits for others."""
        spent_s = self.compute_s + self.feed_s + self.lookup_s + self.pull_s + self.push_s
        return spent_s / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        parts = {
            "compute": self.compute_s,
            "feed": self.feed_s,
            "lookup": self.lookup_s,
            "pull": self.pull_s,
            "push": self.push_s,
            "waits for others": self.wait_s,
        }
        total_s = sum(parts.values()) or 1.0
        return ", ".join(f"{name} {part / total_s:.0%}" for name, part in parts.items())


@with_field_texts
@dataclass(frozen=True, slots=True)
class NodeReport:
    """One line of status()."""

    name: str
    status: str
    phase: str
    host: str
    executor_id: str
    pid: int
    """Pid of its supervisor; the process that trains or serves is a child of it."""
    attempt: int
    silent_s: float
    """Seconds since its last heartbeat; more than a few heartbeats mean trouble."""
    rss_mib: float
    steps: float
    rows: int
    loss: float | None
    times: StepTimes | None = None
    """Times of a worker that trains a distributed model."""
    server: ServerStats | None = None
    """Counters of a parameter server since it started."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that main_fun reported by `ctx.report_progress(..., metrics=...)`."""

    def __repr__(self) -> str:
        cells = zip(_NODE_HEAD[1:], _cells(self)[1:], strict=True)
        return f"<{self.name}: {', '.join(f'{name} {cell}' for name, cell in cells)}>"

    def _repr_html_(self) -> str:
        return html.table(_NODE_HEAD, [_cells(self)])


@with_field_texts
@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster at one moment; prints as a table."""

    cluster_id: str
    phase: str
    nodes: tuple[NodeReport, ...]
    tensorboard_url: str | None
    failures: tuple[NodeFailure, ...]
    notes: tuple[str, ...] = ()
    """Sentences about a straggler, a hot shard or an executor without memory left."""
    executors: tuple[ExecutorReport, ...] = ()
    """Memory by executor, as of the nodes' last heartbeats."""

    def __str__(self) -> str:
        rows = [_NODE_HEAD, *(_cells(node) for node in self.nodes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_NODE_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        board = self.tensorboard_url or "none"
        title = f"cluster {self.cluster_id}: {self.phase}, TensorBoard: {board}"
        return "\n".join([title, *lines, *self._details(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        board = html.link(self.tensorboard_url) if self.tensorboard_url else "none"
        title = f"<b>cluster {html.escaped(self.cluster_id)}</b>: {html.escaped(self.phase)}"
        failures = [
            (each.node.name, each.error_type, each.message.partition("\n")[0][:_MESSAGE_CHARS])
            for each in self.failures
        ]
        return "".join(
            [
                f'<div style="font-size:90%">{title}, TensorBoard: {board}</div>',
                html.table(_NODE_HEAD, [_cells(node) for node in self.nodes]),
                *(html.paragraph(text) for text in (*self._details(), *self.notes)),
                html.table(("failed", "error", "message"), failures) if failures else "",
            ]
        )

    def _details(self) -> Iterator[str]:
        yield from (
            str(each) for each in self.executors if len(each.nodes) > 1 and not each.is_over
        )
        for node in self.nodes:
            if node.server is not None:
                yield f"{node.name}: {_server_text(node.server)}"
            if node.times is not None:
                own = duration_text(node.times.own_s)
                yield f"{node.name}: {own} of its own per step lately; {node.times}"
            if node.metrics:
                shown = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
                yield f"{node.name}: {shown}"


def _server_text(stats: ServerStats) -> str:
    latencies = [
        f"{name} {stats.latency(name)}" for name in SHOWN_REQUESTS if stats.latency(name).count
    ]
    queue = f"{stats.in_service} requests in service, {stats.waiting} pushes waiting"
    staleness = (
        f"staleness mean {stats.mean_staleness:.1f}, p99 {stats.staleness_quantile(0.99):.1f}"
    )
    return "; ".join([*latencies, queue, staleness, *map(str, stats.open_rendezvous)])


def _cells(node: NodeReport) -> tuple[str, ...]:
    return (
        node.name,
        node.status,
        node.phase or "-",
        node.host or "-",
        node.executor_id or "-",
        str(node.pid or "-"),
        f"{node.silent_s:.1f} s" if node.pid else "-",
        f"{node.rss_mib:.0f}",
        f"{node.steps:.0f}",
        str(node.rows),
        "-" if node.loss is None else f"{node.loss:.4g}",
    )
