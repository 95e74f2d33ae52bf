"""Settings of a cluster and of its checkpoints, checked once at the driver.

Covers: ClusterConfig (how rows reach the workers, timeouts of the control plane, what is shown),
Checkpoints (when a cluster saves, where a run resumes), Restarts (how often lost nodes are
replaced), InputMode, TensorBoardConfig.
Does not: hold settings of the data plane (rpc), of servers (ps.config) or of chunks
(feeding.config); save (tfos.worker.saver), restart servers (tfos.node.supervisor).
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from feeding.filesystem.location import LOCAL, shown
from ps.checkpoint.score import METRIC_NAME, is_metric_name
from rpc.auth.handshake import Integrity
from rpc.field_texts import with_field_texts
from tfos.errors import SettingsError
from tfos.files import paths
from tfos.files.inputs import InputFiles, check_names
from tfos.metric_direction import higher_is_better

_CUT_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)/(?!/)")
"""What pathlib makes of a URL: `hdfs:/host/runs`."""
_LEAST_RESTORE_S = 600.0
"""Least seconds for a server to restore: it compiles kernels first."""
_SERVER_AWAY_S = 300.0
"""Seconds from the loss of a server until another process of it listens."""


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`ClusterConfig(checkpoints=Checkpoints(directory="hdfs:///runs/7", every_s=60, keep=3))`.

    The chief saves while training goes on: once the servers hold parameters, then periodically, and
    when its main_fun has returned, each time if anything has changed. A failed save is a warning in
    the log, at the driver too after four in a row or if it is the last one; it never ends the
    training.
    """

    directory: str
    """A URL (`hdfs://…`), or an absolute path, which is on Spark's default file system and which
    every node must see (docs/guides/files.md). One cluster at a time saves there."""
    every_s: float = 60.0
    """Seconds between saves. A dead server loses at most this time plus that of two saves. Smaller:
    less is lost, more is written. A failed save is retried after 1 s, then 2 s, 4 s."""
    every_steps: int = 0
    """Also save after this many updates of the dense parameters; 0: by time alone."""
    every_batches: int = 1
    """For a stream: save after this many micro-batches; `every_s` and `every_steps` save between
    batches only. 1: each row is in the saved parameters once, wherever the program stops. Larger:
    fewer saves, and after a crash of the whole program the batches since the last save are missing.
    0: by time and steps alone; a batch in progress at a save may also be trained twice."""
    keep: int = 3
    """Newest complete checkpoints to keep."""
    keep_best: str | None = None
    """A metric of `fit`, such as "val_loss". After each epoch with a new best value, also compared
    with the run that this one resumes, the chief saves, and that checkpoint stays beside the newest
    until there is a better one. The workers wait for the save. None: none is kept. See
    `cluster.best_checkpoint()`."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller ("min") or larger ("max") values of `keep_best` are better. "auto": by the
    metric's name, for those of Keras."""
    full_every: int = 10
    """One save in this many is complete; the others hold changes since the one before."""
    timeout_s: float = 600.0
    """Seconds for one save, and for the restore of a run that resumes. Workers wait this long, at
    least 600 s, for a server that is started again. A save that takes longer fails. Raise it if the
    servers' tables take longer to write. The driver waits for the chief accordingly,
    whatever `feed_timeout` is, and for workers that wait for the chief: at saves of `keep_best`,
    and at a restore with num_ps=0."""
    resume: bool = False
    """Resume from the newest complete checkpoint in the directory, if there is one. False: a
    directory with checkpoints of another run is refused."""
    resume_epochs: bool = True
    """With `resume`, epochs of `train()` that an interrupted run had trained are not fed again.
    False: all are, as for other data."""

    def __post_init__(self) -> None:
        if not isinstance(_take_path(self, "directory"), str):
            raise SettingsError(f"checkpoints need a directory as a str, got {self.directory!r}")
        _check_directory(self.directory, "checkpoints")
        for name in ("every_s", "timeout_s"):
            _check_time(self, name)
        check_flag("resume", self.resume)
        check_flag("resume_epochs", self.resume_epochs)
        self._check_best()
        least = {"every_steps": 0, "every_batches": 0, "keep": 1, "full_every": 1}
        _check_counts(self, least)

    @property
    def limit_s(self) -> float:
        """Seconds after which the driver takes a chief that restores or saves for a silent one.

        The limit covers a save that takes its whole time, the save after it, and 300 s for a server
        that is away. Later answers still count: a batch that they report is not trained again.
        """
        return 2 * self.timeout_s + 330.0

    @property
    def restart_s(self) -> float:
        """Seconds for which workers wait for a server that is started again and restores.

        A part that takes long to be written takes long to be read.
        """
        return max(_LEAST_RESTORE_S, self.timeout_s)

    @property
    def resumes_epochs(self) -> bool:
        """Whether fed epochs go on where an interrupted run was."""
        return self.resume and self.resume_epochs

    @property
    def best_is_highest(self) -> bool:
        """Whether larger values of `keep_best` are better."""
        known = higher_is_better(self.keep_best or "")
        return bool(known) if self.best_mode == "auto" else self.best_mode == "max"

    def _check_best(self) -> None:
        if self.best_mode not in ("auto", "min", "max"):
            raise SettingsError(f"best_mode must be 'auto', 'min' or 'max', got {self.best_mode!r}")
        metric = self.keep_best
        if metric is None:
            return
        if not is_metric_name(metric):
            raise SettingsError(f"keep_best must be {METRIC_NAME}, got {metric!r}")
        if self.best_mode == "auto" and higher_is_better(metric) is None:
            raise SettingsError(
                f"keep_best={metric!r} is not a metric of Keras: pass best_mode='max' if larger "
                "values are better, best_mode='min' if smaller ones are"
            )


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """`ClusterConfig(restarts=Restarts(workers=2, ps=1))`: how often a lost node is replaced.

    A node is lost if it was killed (its process by a signal, its executor, its host) or is silent.
    A node that raises an error is not started again. The limits are per node and 10 minutes.
    """

    workers: int = 0
    """Restarts of each worker, the chief included. A new attempt runs main_fun in a free slot, and
    `fit` of a distributed model continues in the epoch that the others train. 0: the others go on
    without a lost worker (`tolerate_lost_workers`), and the chief's end fails the cluster."""
    ps: int = 1
    """Restarts of each parameter server, from the last checkpoint of this run; they need
    `ClusterConfig(checkpoints=...)`. A killed process starts again beside its supervisor: at once,
    then after 0.5 s, 1 s, 2 s up to 8 s if it served for less than 10 s. A server whose executor is
    lost starts on another one. 0: its end fails the cluster."""
    on_poison: Literal["error", "skip"] = "error"
    """Fed rows that workers had at three crashes. `error`: `train` raises `PoisonRows`.
    `skip`: they are fed to no other worker, with a warning, and count as dropped."""

    def __post_init__(self) -> None:
        _check_counts(self, {"workers": 0, "ps": 0})
        if self.on_poison not in ("error", "skip"):
            raise SettingsError(f"on_poison must be 'error' or 'skip', got {self.on_poison!r}.")


@dataclass(frozen=True, slots=True)
class TensorBoardConfig:
    """What `reserve(tensorboard=…, tensorboard_host=…, log_dir=…)` asks for."""

    is_wanted: bool = False
    """Whether TensorBoard runs beside the chief."""
    host: str = ""
    """Address it binds; empty: loopback on the driver's host, else the advertised one."""
    log_dir: str = ""
    """Directory or URL of the event files as the user gave it; empty: each node's own."""
    names: tuple[str, ...] = ()
    """Further names by which browsers ask for it, those of proxies (`page_hosts`)."""

    def __post_init__(self) -> None:
        if not isinstance(_take_path(self, "log_dir"), str):
            raise SettingsError(f"log_dir must be a directory or a URL, got {self.log_dir!r}")
        host: object = self.host
        if not isinstance(host, str):
            raise SettingsError(f"tensorboard_host must be a str such as '', got {host!r}")


class InputMode(enum.IntEnum):
    """Where a worker's rows come from. The numbers are TensorFlowOnSpark's."""

    TENSORFLOW = 0
    """main_fun reads its own data."""
    SPARK = 1
    """`cluster.train(rdd)` feeds rows."""


SHARED_SLOTS_S = 259_200.0
"""Three days: fits that share slots may wait this long for each other."""


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Timeouts and limits; the defaults suit clusters from a laptop to some hundred nodes."""

    reservation_timeout_s: float = 600.0
    """All nodes must serve within this time after start(); before that, reserve() waits as long for
    configured executors that have not registered, and for the first one of a standalone master
    without dynamic allocation. Default: TensorFlowOnSpark's."""
    slot_wait_s: float = 60.0
    """reserve() waits this long for slots that other clusters' starting nodes or the tasks of ended
    jobs hold, for the first executor where dynamic allocation promises none, and on a standalone
    master that has given one for cores that spark.cores.max still allows or, if that is not set,
    for executors."""
    slot_settle_s: float = 4.0
    """Too few slots and no new executor for this long: reserve() fails."""
    heartbeat_s: float = 2.0
    """Seconds between heartbeats of a node. Smaller: fresher progress, more driver load."""
    hang_s: float = 20.0
    """Seconds of silence after which a node has failed: frozen or disconnected. At least 3
    heartbeats. A suspended (SIGSTOP) worker or server process is also ended within this time."""
    reconnect_s: float = 3.0
    """Seconds for a node to reconnect to the driver after a broken connection before it counts as
    dead. A worker tries to reach a server for longer: 10 s, or 50 s where servers are restarted."""
    lease_s: float = 20.0
    """Seconds without contact to the driver after which a node ends itself. At least 3
    heartbeats."""
    evaluation_s: float = 300.0
    """Seconds that an evaluator (eval_node) has for its last checkpoint once the workers' main_fun
    has returned."""
    abort_s: float = 10.0
    """Seconds from the decision to stop until every process has ended. A stop in order is longer
    by what the grace of exit handlers (5 s, or `grace_secs`) needs beyond six tenths of it."""
    max_inflight_bytes: int = 64 << 20
    """Unread bytes per worker at which feeding waits. Larger: steadier, more worker memory."""
    tolerate_lost_workers: bool = True
    """A worker killed from outside is a warning while others remain; the chief never is."""
    save_on_interrupt: str | None = None
    """Directory or URL in which the servers save the parameters when a running cluster is aborted:
    Ctrl-C, an exception in the `with` block, abort(), cancelled Spark jobs, a shutdown() that is
    late. A path means what it does in Checkpoints. The save takes at most half of abort_s or so; a
    model that needs longer needs a larger abort_s."""
    node_limit_bytes: int = 0
    """Memory of a node at which its supervisor ends it and names it, before the host kills one: the
    resident sets of its process and of those that it starts, checked every 2 s. Spark and YARN do
    not count nodes, as these are not children of the executor. 0: no limit."""
    threads_per_node: int = 0
    """Compute threads (OMP, TensorFlow, numba) per node; 0: the cores of its Spark task."""
    gpu_resource: str | None = "gpu"
    """Spark's name of the GPUs (spark.task.resource.NAME.amount). A worker sees those that Spark
    gave to its task, by CUDA_VISIBLE_DEVICES; where Spark schedules none, those that the executor's
    environment says. A parameter server sees none. None: no worker sees one either."""
    busy_gpus: Literal["error", "warn"] = "error"
    """Where nvidia-smi shows another process on a GPU that Spark gave to a worker as a whole, or no
    such GPU. `error`: the start fails and names it. `warn`: a line in the output, and the process
    and the worker share the GPU."""
    shares_slots: bool = False
    """Other clusters of this program run beside this one, as the fits of a tuner do. reserve() and
    train() then wait for slots that the program's tasks hold, up to three days, and an epoch is fed
    in waves, between which the others get slots. False: reserve() fails after `slot_settle_s`,
    train() after its feed_timeout."""
    allow_dynamic: bool = False
    """Accept dynamic allocation although it may remove the executor of a worker that Spark feeds,
    whose task has ended: reserve() warns where it may."""
    allow_speculation: bool = False
    """Accept speculative execution although it starts nodes twice, and although the rows of a feed
    task that Spark runs a second time train twice, unless `train(exactly_once=True)` feeds them."""
    checkpoints: Checkpoints | None = None
    """Where and when parameters are saved; None: never, and a dead server fails the cluster."""
    restarts: Restarts = field(default_factory=Restarts)
    """How often lost nodes are replaced. The default: no worker, and each parameter server once if
    there are checkpoints."""
    inputs: tuple[InputFiles, ...] = ()
    """Data files of the job, for `ctx.inputs`; those of a job file if there are none here."""
    output: str | None = None
    """Directory or URL to which each worker's `ctx.output_dir` is copied, as worker-RANK, when its
    main_fun has returned; None: the job file's. A path means what it does in Checkpoints."""
    integrity: Integrity = "auto"
    """Authenticated bytes on TCP between workers, servers and feed tasks. `header`: frames' headers
    and metas; a changed tensor or row is not detected. `payload`: every byte. `auto`: every byte
    between two hosts. It costs about 0.25 s of processor time per GB at each end; `header` is for
    networks that are faster than about 10 Gbit/s per connection and trusted."""
    security: Literal["hmac", "tls"] = "hmac"
    """Security of TCP between the same processes. `hmac`: they prove their identity by the
    cluster's secret; rows and tensors are readable on the network. `tls`: the same inside TLS 1.3
    with a certificate on both sides, so every byte is encrypted and authenticated; it costs more
    speed. Processes of one host use shared memory or the Unix socket, which no network carries."""
    verbose: bool = True
    """Show progress and the nodes' output on the driver's standard error."""
    show_details: bool = False
    """Show there what tfos says of itself too: its INFO lines in the nodes' logs, which files have
    them anyway, and the transports of rows."""

    @property
    def replaces_nodes(self) -> bool:
        """Whether a lost node may come back as a new attempt, for which Spark needs a slot."""
        return self.restarts.workers > 0 or self.replaces_servers

    @property
    def replaces_servers(self) -> bool:
        """Whether a lost parameter server is started again: only from a checkpoint."""
        return self.restarts.ps > 0 and self.checkpoints is not None

    def __post_init__(self) -> None:
        self._check_times_and_flags()
        if not isinstance(self.checkpoints, Checkpoints | None):
            raise SettingsError(f"checkpoints must be a tfos.Checkpoints, got {self.checkpoints!r}")
        if not isinstance(self.restarts, Restarts):
            raise SettingsError(f"restarts must be a tfos.Restarts, got {self.restarts!r}")
        for name in ("hang_s", "lease_s"):
            if getattr(self, name) < 3 * self.heartbeat_s:
                raise SettingsError(
                    f"{name}={getattr(self, name)} is less than 3 heartbeats of "
                    f"{self.heartbeat_s} s: one lost message would end a node. "
                    f"Use {name} >= {3 * self.heartbeat_s}."
                )
        self._check_data_plane()
        _check_counts(self, {"max_inflight_bytes": 1, "node_limit_bytes": 0, "threads_per_node": 0})
        gpus: object = self.gpu_resource
        if gpus is not None and not (isinstance(gpus, str) and gpus.isidentifier()):
            raise SettingsError(
                f"gpu_resource must be Spark's name of a resource, such as 'gpu', or None, got "
                f"{gpus!r}."
            )
        if self.busy_gpus not in ("error", "warn"):
            raise SettingsError(f"busy_gpus must be 'error' or 'warn', got {self.busy_gpus!r}.")
        self._check_files()

    def _check_files(self) -> None:
        """Refuse directories and inputs that not every node finds."""
        for name in ("save_on_interrupt", "output"):
            if (place := _take_path(self, name)) is None:
                continue
            if not isinstance(place, str):
                raise SettingsError(f"{name} must be a directory or a URL as a str, got {place!r}.")
            _check_directory(place, name)
        inputs: object = self.inputs
        if not isinstance(inputs, tuple) or not all(
            isinstance(each, InputFiles) for each in inputs
        ):
            raise SettingsError(f"inputs must be a tuple of tfos.InputFiles, got {inputs!r}.")
        check_names(self.inputs)

    def _check_times_and_flags(self) -> None:
        for each in fields(self):
            if each.name.endswith("_s"):
                _check_time(self, each.name)
            if each.type == "bool":
                check_flag(each.name, getattr(self, each.name))

    def _check_data_plane(self) -> None:
        if self.integrity not in get_args(Integrity):
            raise SettingsError(
                f"integrity must be 'auto', 'header' or 'payload', got {self.integrity!r}."
            )
        if self.security not in ("hmac", "tls"):
            raise SettingsError(f"security must be 'hmac' or 'tls', got {self.security!r}.")
        if self.security == "tls" and self.integrity == "payload":
            raise SettingsError(
                "integrity='payload' and security='tls' authenticate every byte twice; "
                "leave integrity at 'auto' with security='tls'."
            )


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: a node would refuse it later, or take it for True.

    Args:
        name: the argument's name, for messages.
        value: the user's value.
    """
    if not isinstance(value, bool):
        raise SettingsError(f"{name} must be True or False, got {value!r}.")


def config_of(given: object, name: str = "config") -> ClusterConfig:
    """Return the `config` of a call; None: the defaults. Raises SettingsError for anything else.

    Args:
        given: the user's value.
        name: the argument's name, for the error.
    """
    if given is None:
        return ClusterConfig()
    if not isinstance(given, ClusterConfig):
        raise SettingsError(f"{name} must be a tfos.ClusterConfig or None, got {given!r}")
    return given


def chief_limit_s(plan: Checkpoints | None, least_s: float) -> float:
    """Return the seconds for which the driver waits for a chief that may restore or save.

    Args:
        plan: the cluster's checkpoint plan; None: it saves nothing.
        least_s: seconds for what else the chief does.
    """
    return least_s if plan is None else max(least_s, plan.limit_s)


def worker_limit_s(
    config: ClusterConfig, feed_timeout_s: float, *, has_servers: bool, has_stepped: bool
) -> float:
    """Return the seconds for which workers that are fed may take no row.

    They take none while the chief saves the best checkpoint, at the end of an epoch, and before the
    first step while it restores their own shards. Where `Checkpoints(timeout_s=...)` was raised,
    they may also take none while a server that is started again restores its part, and before the
    first step while the chief saves rows that it has loaded.

    Args:
        config: the cluster's config.
        feed_timeout_s: feed timeout of the call that feeds.
        has_servers: whether servers hold the parameters.
        has_stepped: whether a worker has made a step.
    """
    plan, limit_s = config.checkpoints, feed_timeout_s
    if plan is None:
        return limit_s
    is_raised = plan.timeout_s > _LEAST_RESTORE_S
    if is_raised and has_servers and config.replaces_servers:
        limit_s = max(limit_s, plan.restart_s + _SERVER_AWAY_S)
    restores_within = plan.resume and not has_servers
    if plan.keep_best is not None or (not has_stepped and (restores_within or is_raised)):
        limit_s = chief_limit_s(plan, limit_s)
    return limit_s


def _check_counts(record: object, least: Mapping[str, int]) -> None:
    """Refuse fields that are not whole numbers, or are below their least."""
    for name, at_least in least.items():
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise SettingsError(f"{name} must be an int >= {at_least}, got {value!r}.")


def _check_time(record: object, name: str) -> None:
    """Refuse a field that is no timeout of a wait; a float of another type becomes Python's."""
    value = getattr(record, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise SettingsError(f"{name} must be > 0 seconds and finite, got {value!r}.")
    if type(value) not in (int, float):  # numpy's: the record travels to every node
        object.__setattr__(record, name, float(value))


def _take_path(owner: object, name: str) -> Any:
    """Return a field that is a directory or URL, as a str where it is a path object."""
    place = getattr(owner, name)
    if isinstance(place, os.PathLike):
        place = os.fspath(place)
        if isinstance(place, str) and (url := _CUT_URL.match(place)):
            raise SettingsError(
                f"{name}={place!r}: a path object drops a slash of a URL; pass a str, such as "
                f"{url[1] + '//…'!r}"
            )
        object.__setattr__(owner, name, place)
    return place


def _check_directory(path: str, what: str) -> None:
    location = paths.user_location(path, what)
    if location.scheme == LOCAL and not os.path.isabs(location.path):
        raise SettingsError(
            f"{what}: an absolute directory that every node sees is needed, or a URL such as "
            f"hdfs:///runs/7, got {shown(path)}"
        )
