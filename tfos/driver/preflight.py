"""Preflight checks: Spark's settings, feeds and the function to run, before anything starts.

Covers: every refusal that needs no executor, each with both values and the next step.
Does not: count slots (tfos.slots.wait), pickle (tfos.spark.pickling). Pure.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfos.config import ClusterConfig, InputMode, TensorBoardConfig
from tfos.errors import ConfigError, SettingsError
from tfos.files import paths
from tfos.node_memory import ADDRESS_SPACE_MIB, overhead_mib
from tfos.spark import executor_memory, task_secrets
from tfos.spark.facts import SparkFacts, is_true
from tfos.topology import Plan

OPEN_SERVERS = (
    "ps='tensorflow': TensorFlow's servers have no login and no encryption, on every address of "
    "their hosts. Anyone who can reach their ports can run TensorFlow programs there: keep them "
    "behind a firewall"
)
"""Warning of every cluster with TensorFlow's servers."""
SERVERS_AT_DRIVER = (
    "driver_ps_nodes=True: all parameters are on the driver's host, in processes beside it. They "
    "need its memory, every worker's tensors cross its network, and they end with the driver. "
    "Without it they run on executors"
)
"""Warning of every cluster whose servers are beside the driver."""
NO_LAST_SAVE = (
    "save_on_interrupt={!r} saves nothing with num_ps=0: the parameters end with their workers. "
    "Use ClusterConfig(checkpoints=Checkpoints(..., every_s=...)), which saves while they train"
)
"""Warning of a cluster without servers that is to save at its end; takes the directory."""
_MIB = 1 << 20
_LARGE_COPIES_BYTES = 256 * _MIB
"""Size of all copies of main_fun together: a quarter of the default of spark.driver.memory."""
RESERVED_QUEUES = ("output", "error")
"""Queue names of TensorFlowOnSpark that carry no fed rows."""
VALIDATION_FEED = "validation"
"""The feed of `train(validation=...)`; every cluster that is fed has it."""
TENSORBOARD_FILES = "TensorBoard's files"
LAST_CHECKPOINT = "parameters of an interrupted cluster"
OUTPUTS = "the workers' outputs"


def check_spark(facts: SparkFacts, config: ClusterConfig) -> None:
    """Refuse Spark settings under which nodes would be removed, doubled or starved.

    Args:
        facts: the SparkContext's facts.
        config: the cluster's.

    Raises:
        ConfigError: names the setting, its value and what to do.
    """
    if facts.may_have_more and not config.allow_dynamic:
        raise ConfigError(
            "spark.dynamicAllocation.enabled=true: dynamic allocation can remove a worker's "
            "executor while nothing feeds it. Set it to false, or "
            "spark.dynamicAllocation.minExecutors and maxExecutors to the same number, with which "
            "it removes none, or pass ClusterConfig(allow_dynamic=True) as config= to run(), "
            "reserve() or KerasEstimator(), or as cluster_config= to Orca's from_keras()."
        )
    if facts.is_speculative and not config.allow_speculation:
        raise ConfigError(
            "spark.speculation=true: speculation starts a slow node a second time, and rows "
            "of a feed task that runs twice train twice. Set it to false, or pass "
            "ClusterConfig(allow_speculation=True) as config= to run(), reserve() or "
            "KerasEstimator(), or as cluster_config= to Orca's from_keras(), and exactly_once=True "
            "to train()."
        )
    check_python_workers(facts.conf)


def check_python_workers(conf: Mapping[str, str]) -> None:
    """Refuse limits of Spark's Python workers under which nodes are ended or cannot train.

    Args:
        conf: Spark's settings.

    Raises:
        ConfigError: has the limit and what to set instead.
    """
    kills, idle = "spark.python.worker.killOnIdleTimeout", "spark.python.worker.idleTimeoutSeconds"
    if is_true(conf, kills) and (idle_s := conf.get(idle, "0")) not in ("0", "0s"):
        raise ConfigError(
            f"{kills}=true with {idle}={idle_s}: Spark ends a task that sends it nothing for that "
            "long, and the task of a node sends nothing while its node trains, that of a feed "
            f"nothing while it waits for workers. Set {kills}=false."
        )
    limit = conf.get("spark.executor.pyspark.memory")
    if not limit or not executor_memory.mib(limit):
        return
    cores = int(conf.get("spark.executor.cores", "1"))
    each = executor_memory.mib(limit) // cores
    if each < ADDRESS_SPACE_MIB:
        raise ConfigError(
            f"spark.executor.pyspark.memory={limit} limits the address space (RLIMIT_AS) of every "
            f"Python worker and its children to {each:.0f} MiB ({limit} / {cores} cores). A "
            f"process with TensorFlow maps up to {ADDRESS_SPACE_MIB} MiB before any model, more "
            "with a GPU. Unset it and set "
            f"spark.executor.memoryOverhead={overhead_mib(cores)}m instead."
        )


def notes(facts: SparkFacts, num_nodes: int = 1) -> list[str]:
    """Return what the user should know about this Spark, one line each.

    Args:
        facts: the SparkContext's facts.
        num_nodes: nodes that Spark starts; an executor has as many of them as it has slots.
    """
    lines = []
    if not facts.is_local and not facts.rpc_is_encrypted:
        lines.append(
            "Spark's RPC is not encrypted and carries this cluster's keys: set "
            "spark.authenticate=true and spark.network.crypto.enabled=true on a shared network"
        )
    if not facts.is_local and not facts.files_are_encrypted:
        lines.append(
            "Spark's files are not encrypted: this cluster's keys pass through a temporary file of "
            "mode 0600 at the driver, and shuffled rows lie in executors' files. Set "
            "spark.io.encryption.enabled=true on shared hosts"
        )
    if note := task_secrets.redaction_note(facts.conf):
        lines.append(note)
    memory = executor_memory.of_settings(facts.conf, facts.master)
    if short := memory.shortage(max(1, min(num_nodes, memory.slots))):
        lines.append(short)
    return lines


def attempts_note(facts: SparkFacts, config: ClusterConfig, *, workers_hold_slots: bool) -> str:
    """Return that Spark ends a job at its first lost executor, before a restart counts; or "".

    Args:
        facts: the SparkContext's facts.
        config: the cluster's.
        workers_hold_slots: whether a worker's task stays as long as its node.
    """
    if facts.is_in_driver or facts.task_attempts > 1:
        return ""
    restarts = config.restarts
    wanted = [f"workers={restarts.workers}"] if restarts.workers and workers_hold_slots else []
    wanted += [f"ps={restarts.ps}"] if config.replaces_servers else []
    if not wanted:
        return ""
    return (
        f"Restarts({', '.join(wanted)}) restarts no node whose executor is lost, since Spark "
        "then fails the job of all nodes at once (spark.task.maxFailures=1): set "
        "spark.task.maxFailures to 2 or more, such as Spark's 4"
    )


def idle_note(facts: SparkFacts, *, workers_hold_slots: bool) -> str:
    """Return that Spark may remove the executors of fed workers as idle ones; or "".

    Args:
        facts: the SparkContext's facts.
        workers_hold_slots: whether a worker's task stays as long as its node.
    """
    if workers_hold_slots or not facts.may_have_more:
        return ""
    limit = "spark.dynamicAllocation.executorIdleTimeout"
    return (
        "dynamic allocation may remove a worker's executor, on which no task has run for "
        f"{limit}={facts.conf.get(limit, '60s')}: these workers' tasks end at their start, because "
        "tasks that feed them need the slots. Give each executor two slots or more, one free for "
        f"each worker; or set {limit} above the longest time without a feed; or set "
        "spark.dynamicAllocation.minExecutors and maxExecutors to the same number"
    )


def size_note(size_bytes: int, num_nodes: int) -> str:
    """Return that main_fun's copies may be too large for Spark's driver; "": they are not.

    Args:
        size_bytes: size of main_fun and its arguments, pickled.
        num_nodes: nodes that get a copy each.
    """
    if size_bytes * num_nodes < _LARGE_COPIES_BYTES:
        return ""
    size_mib = size_bytes / _MIB
    return (
        f"main_fun with its arguments is {size_mib:.0f} MiB, and the driver's Java gets a copy for "
        f"each of {num_nodes} nodes, {size_mib * num_nodes:.0f} MiB in all. Pass the path of a "
        "file that main_fun reads (ClusterConfig(inputs=...) and ctx.inputs bring it to every "
        "worker). Or raise spark.driver.memory and, above 128 MiB, spark.rpc.message.maxSize"
    )


def check_servers(plan: Plan, config: ClusterConfig) -> None:
    """Refuse settings that have no effect where TensorFlow's servers or strategies train.

    Args:
        plan: the nodes.
        config: the cluster's.

    Raises:
        SettingsError: names the setting and what to do.
    """
    if config.restarts.workers and (plan.tensorflow_servers or plan.is_mirrored):
        raise SettingsError(
            f"Restarts(workers={config.restarts.workers}) with ps='tensorflow': TensorFlow's "
            "strategies take no worker back in. Leave workers out of Restarts, and save and "
            "restore in main_fun."
        )
    if not plan.tensorflow_servers:
        return
    for name in ("checkpoints", "save_on_interrupt"):
        if getattr(config, name) is not None:
            raise SettingsError(
                f"{name}={getattr(config, name)!r} with ps='tensorflow': TensorFlow's servers do "
                "not save. Save in main_fun, with tf.train.CheckpointManager, and leave "
                f"{name} out of ClusterConfig."
            )


def placed_outputs(
    config: ClusterConfig, tensorboard: TensorBoardConfig, facts: SparkFacts
) -> tuple[ClusterConfig, TensorBoardConfig]:
    """Return both with each directory as every process of the cluster understands it.

    Args:
        config: the cluster's, as the user gave it.
        tensorboard: the user's, too.
        facts: the driver's facts.

    Raises:
        SettingsError: a directory is refused, or its files would be lost.
    """
    place = facts.output_place
    if config.checkpoints is not None:
        directory = paths.output_directory(config.checkpoints.directory, "checkpoints", place)
        config = replace(config, checkpoints=replace(config.checkpoints, directory=directory))
    if config.save_on_interrupt is not None:
        directory = paths.output_directory(config.save_on_interrupt, LAST_CHECKPOINT, place)
        config = replace(config, save_on_interrupt=directory)
    if config.output is not None:
        directory = paths.output_directory(config.output, OUTPUTS, place)
        config = replace(config, output=directory)
    if tensorboard.log_dir:
        log_dir = paths.output_directory(tensorboard.log_dir, TENSORBOARD_FILES, place)
        tensorboard = replace(tensorboard, log_dir=log_dir)
    return config, tensorboard


def outputs(config: ClusterConfig, tensorboard: TensorBoardConfig, plan: Plan) -> dict[str, str]:
    """Return the directories that a cluster writes to, by what it writes there.

    Args:
        config: the cluster's, with placed directories.
        tensorboard: the user's, with a placed directory.
        plan: the nodes.
    """
    saves = config.checkpoints
    found = {
        "checkpoints": saves.directory if saves is not None else "",
        LAST_CHECKPOINT: (config.save_on_interrupt or "") if plan.servers else "",
        OUTPUTS: config.output or "",
        TENSORBOARD_FILES: tensorboard.log_dir,
    }
    return {what: path for what, path in found.items() if path}


def check_queues(queues: Iterable[object]) -> tuple[str, ...]:
    """Return the names of feeds among TensorFlowOnSpark's `queues`, and that of validation.

    Raises:
        SettingsError: no name is left, or one is not a usable name.
    """
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise SettingsError(
            f"queues must be a list of names, got {queues!r} ({type(queues).__name__})."
        )
    names: list[str] = []
    for name in queues:
        # Spark's tags of jobs, which have the name, take no comma.
        if not isinstance(name, str) or not name or not name.isprintable() or "," in name:
            raise SettingsError(
                f"a queue's name must be a printable str without a comma, got {name!r}."
            )
        names.append(name)
    if len(set(names)) != len(names):
        raise SettingsError(f"queues holds a name twice: {names}.")
    feeds = tuple(name for name in names if name not in RESERVED_QUEUES)
    if not feeds:
        raise SettingsError(f"queues={names} names no feed; the usual one is 'input'.")
    return feeds if VALIDATION_FEED in feeds else (*feeds, VALIDATION_FEED)


def check_mode(mode: object) -> InputMode:
    """Return the input mode. Raises SettingsError for anything else."""
    try:
        return InputMode(mode)  # type: ignore[arg-type]  # that is what is tried
    except ValueError:
        raise SettingsError(
            f"input_mode must be InputMode.SPARK or InputMode.TENSORFLOW, got {mode!r}."
        ) from None


def check_main_fun(main_fun: Callable[..., Any]) -> None:
    """Refuse what cannot be called as `main_fun(args, ctx)`."""
    if not callable(main_fun):
        raise SettingsError(
            f"main_fun must be a function (args, ctx), got {type(main_fun).__qualname__}."
        )
    name = getattr(main_fun, "__qualname__", repr(main_fun))
    if (
        inspect.iscoroutinefunction(main_fun)
        or inspect.isgeneratorfunction(main_fun)
        or inspect.isasyncgenfunction(main_fun)
    ):
        raise SettingsError(
            f"main_fun is called as main_fun(args, ctx), and a call of {name}, an `async def` or a "
            "function with `yield`, runs none of its lines. Use a plain function; one that calls "
            "asyncio.run() may await."
        )
    try:
        signature = inspect.signature(main_fun)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise SettingsError(
            f"main_fun is called as main_fun(args, ctx), but {name}{signature} does not take two "
            "positional arguments."
        ) from None


def check_batch_size(args: object) -> None:
    """Refuse `batch_size` 0 in main_fun's arguments, before any node starts.

    Args:
        args: main_fun's arguments; looked into if it is a mapping or has attributes, as argparse's.

    Raises:
        SettingsError: no batch can be made.
    """
    found = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
    size = found.get("batch_size", 1)
    if isinstance(size, int) and not isinstance(size, bool) and size == 0:
        raise SettingsError("batch_size=0 in main_fun's args: a batch needs at least 1 row.")


def check_epochs(num_epochs: object) -> int:
    """Return the epochs to feed; 0 means 10, as in TensorFlowOnSpark."""
    if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
        raise SettingsError(
            f"num_epochs must be an int >= 0 (0 means 10), got {num_epochs!r} "
            f"({type(num_epochs).__name__})."
        )
    return num_epochs or 10


def check_shuffle(seed: object, shuffle_rows: object) -> None:
    """Refuse an invalid seed, and windows without a seed.

    Args:
        seed: an int, or None.
        shuffle_rows: rows of a window; 1: none. None: the default.
    """
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
        raise SettingsError(f"seed must be an int from 0 to 2**64 - 1, or None, got {seed!r}.")
    if shuffle_rows is None:
        return
    if type(shuffle_rows) is not int or shuffle_rows < 1:
        raise SettingsError(f"shuffle_rows must be an int >= 1, got {shuffle_rows!r}.")
    if shuffle_rows > 1 and seed is None:
        raise SettingsError(f"shuffle_rows={shuffle_rows} without a seed; pass seed=.")


def check_no_feed(feed_timeout: object, qname: object) -> None:
    """Refuse arguments that a saved model, which needs no feed, would not obey.

    Args:
        feed_timeout: argument of `inference`.
        qname: argument of `inference`.

    Raises:
        SettingsError: one of them is not the default.
    """
    if (feed_timeout, qname) != (600, "input"):
        raise SettingsError(
            f"feed_timeout={feed_timeout!r}, qname={qname!r} with model=: Spark's own tasks "
            "compute the results, without a feed and its limit; leave both out"
        )


def check_timeout(name: str, value: object, *, or_zero: bool = False) -> float:
    """Return a positive number of seconds, at most as many as a lock takes.

    Args:
        name: the argument's name, for messages.
        value: the user's value.
        or_zero: whether 0 is allowed, too.
    """
    if or_zero and value == 0 and not isinstance(value, bool):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise SettingsError(f"{name} must be {'>=' if or_zero else '>'} 0 seconds, got {value!r}.")
    if math.isinf(value):
        raise SettingsError(f"{name} must be finite: every wait has a deadline.")
    return min(float(value), threading.TIMEOUT_MAX)
