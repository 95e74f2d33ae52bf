"""Training on a DataFrame: the cluster of one fit or evaluation, from checked rows to its results.

Covers: what is checked before any node starts, the cluster, the model's bytes.
Does not: choose columns (estimators.columns), split rows (estimators.split) or run in workers
(estimators.program).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feeding.columnar.batch import check_batch_size
from tfos.cluster import TFCluster
from tfos.config import Checkpoints, ClusterConfig, InputMode, Restarts, check_flag, config_of
from tfos.driver import preflight
from tfos.errors import ConfigError, SettingsError, ShutdownTimeout
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.file_pieces import NEEDED_BYTES, joined
from tfos.estimators.program import (
    MODEL_FEED,
    EvaluateProgram,
    FedData,
    FitProgram,
    MadeData,
)
from tfos.estimators.recipe import ModelRecipe
from tfos.estimators.slots import LONGEST_FIT_S, slots_for
from tfos.estimators.split import divided
from tfos.feed.dataframe import check_fed, chosen
from tfos.feed.micro_batch import TRAIN_ONCE, call_of_batch
from tfos.keras.data.class_weight_check import check_class_weight
from tfos.spark.facts import max_result_bytes
from tfos.spark.pickling import check_travels, pickle_main_fun

_BLAME_S = 30.0
"""A job that fetches no model is a symptom if a worker's failure arrives within this time."""
LAST_SEED = 2**32 - 1
"""Largest seed of numpy, and so of Keras."""
_MODES = ("async", "sync", "ssp", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How a fit trains."""

    batch_size: int = 32
    """Rows of one worker's step."""
    epochs: int = 1
    cluster_size: int = 1
    """Nodes, servers included; one task slot each."""
    num_ps: int | None = None
    """Servers among them; None: one beside several workers, none beside one node."""
    consistency: str = "async"
    """Mode of several workers; see ctx.distribute."""
    staleness_bound: int | None = None
    """Steps, for ssp."""
    seed: int | None = 0
    """Seed of the shuffle and of the workers' Keras; None: rows in their own order."""
    validation_split: float = 0.0
    """Share of the rows that validate, by a hash of their values: equal rows stay together."""
    learning_rate: float | None = None
    callbacks: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    class_weight: Mapping[int, float] | None = None
    checkpoint_dir: str | None = None
    """Where the servers save while they train; None: nowhere."""
    resume: bool = False
    """Continue from the newest checkpoint there; otherwise those of another fit are refused."""
    resume_epochs: bool = True
    """With `resume`, leave out the epochs that an interrupted fit had trained. False: train all, as
    for other data."""
    keeps_epochs: bool = False
    """Whether a fit whose servers have ended counts as interrupted until its model is written."""
    feed_timeout_s: float = 600.0
    exactly_once: bool = False
    """Whether a task that Spark repeats skips the rows that it fed before; see TFCluster.train."""
    verbose: bool = True
    config: ClusterConfig | None = None
    """Other settings of the cluster, of an evaluation's too; None: the defaults. Progress is shown
    if its own `verbose` is True as well."""
    words: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Names and values of settings that differ in the caller from those of spark.ml."""

    @property
    def servers(self) -> int:
        """Number of parameter servers."""
        return int(self.cluster_size > 1) if self.num_ps is None else self.num_ps

    def check(self) -> None:
        """Refuse values that cannot work.

        Raises:
            SettingsError: names value and remedy.
        """
        self._check_types()
        check_batch_size(self.batch_size, self._word("batchSize"))
        if type(self.epochs) is not int or self.epochs < 1:
            raise SettingsError(f"epochs must be an int >= 1, got {self.epochs!r}")
        if not 0.0 <= self.validation_split < 1.0:
            raise SettingsError(
                f"validationSplit={self.validation_split}; it is a share of the rows, from 0 to "
                "below 1"
            )
        self._check_cluster()
        self._check_config()
        if self.resume and not self.checkpoint_dir:
            raise SettingsError(
                "resume=True without checkpointDir: there is nothing to continue from. Name the "
                "directory where the servers saved"
            )
        self._check_of_keras()
        preflight.check_timeout("feedTimeout", self.feed_timeout_s)
        if self.checkpoint_dir and not self.servers:
            raise SettingsError(
                f"checkpointDir={self.checkpoint_dir!r} needs parameter servers, which write it. "
                "Set numPS=1 and clusterSize=2 or more"
            )

    def _word(self, name: str) -> str:
        return self.words.get(name, name)

    def _check_types(self) -> None:
        """Refuse numbers and flags of another type, which would end a fit that has begun."""
        optional = {
            "numPS": self.num_ps,
            "stalenessBound": self.staleness_bound,
            "seed": self.seed,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        for name, value in {"clusterSize": self.cluster_size, **given}.items():
            if type(value) is not int:
                raise SettingsError(
                    f"{self._word(name)} must be an int, got {value!r} ({type(value).__name__})"
                )
        check_flag(self._word("exactlyOnce"), self.exactly_once)
        check_flag("verbose", self.verbose)

    def _check_cluster(self) -> None:
        """Refuse nodes, modes and seeds that cannot work."""
        size, servers, bound = map(self._word, ("clusterSize", "numPS", "stalenessBound"))
        for name, value in ((servers, self.num_ps), (bound, self.staleness_bound)):
            if value is not None and value < 0:
                raise SettingsError(f"{name}={value}; it must be 0 or more, or left out")
        if self.cluster_size <= self.servers:
            raise SettingsError(
                f"{size}={self.cluster_size} with {servers}={self.servers} leaves no worker; "
                f"raise {size}"
            )
        workers = self.cluster_size - self.servers
        if workers > 1 and not self.servers:
            raise SettingsError(
                f"{size}={self.cluster_size} with {servers}=0: several workers train one model "
                f"through a parameter server; set {servers}=1, or {size}=1"
            )
        if self.consistency not in _MODES:
            raise SettingsError(f"consistency={self.consistency!r}; it is one of {_MODES}")
        if (self.consistency == "ssp") != (self.staleness_bound is not None):
            raise SettingsError(
                f"consistency={self.consistency!r} with {bound}={self.staleness_bound}; "
                "ssp, and only ssp, needs a number of steps"
            )
        if self.seed is not None and not 0 <= self.seed <= LAST_SEED - (workers - 1):
            raise SettingsError(
                f"seed={self.seed} with {workers} workers: each adds its rank, and numpy takes 0 "
                f"to {LAST_SEED}. Set another seed, or {self._word('-1')} for rows in their own "
                "order"
            )

    def _check_config(self) -> None:
        """Refuse another type, and what would save elsewhere or train a part of the epochs."""
        word = self._word("config")
        config = config_of(self.config, word)
        if config.checkpoints is not None:
            where = self._word("checkpointDir")
            raise SettingsError(
                f"{word}=ClusterConfig(checkpoints=…): the servers of a fit save in {where}. Name "
                "the directory there, and leave checkpoints out"
            )
        if config.restarts.workers and not self.servers:
            raise SettingsError(
                f"{word}=ClusterConfig(restarts=…) without a server: a worker that is started "
                "again would begin with the first weights in a later epoch. Set "
                f"{self._word('numPS')}=1 and {self._word('clusterSize')}=2 or more, or leave "
                "restarts of workers out"
            )

    def _check_of_keras(self) -> None:
        """Refuse what Keras would refuse in the workers, and what would train NaN."""
        if not callable(self.callbacks) and not isinstance(self.callbacks, list | tuple):
            raise SettingsError(
                f"callbacks={self.callbacks!r}; pass a list of Keras callbacks, or a function that "
                "makes one in each worker"
            )
        if callable(self.callbacks):
            pickle_main_fun(self.callbacks, None, called="callbacks")
        else:
            check_travels(
                "callbacks",
                self.callbacks,
                "Pass a function that makes the callbacks in each worker instead of the list",
            )
        rate = self.learning_rate
        if rate is not None and not 0.0 < rate < math.inf:
            raise SettingsError(f"learningRate={rate}; it must be a number above 0")
        if self.class_weight is not None:
            check_class_weight(self.class_weight)


@dataclass(frozen=True, slots=True)
class FitResult:
    """A trained model."""

    content: bytes = field(repr=False)
    """Bytes of its `.keras` file."""
    history: dict[str, list[float]]
    """A value per epoch by metric, as in Keras; for a distributed model, over all workers."""
    updates: int = 0
    """Updates of the servers' parameters that the servers reported; 0: there was no server."""


def fit(
    frame: Any,
    plan: ColumnPlan,
    recipe: ModelRecipe,
    settings: FitSettings,
    validation: Any = None,
) -> FitResult:
    """Train a model on a DataFrame.

    Args:
        frame: the rows.
        plan: its columns.
        recipe: the model.
        settings: how it trains.
        validation: a DataFrame that validates each epoch; None: plan and settings decide.

    Raises:
        SettingsError: invalid columns, types or settings, or an empty DataFrame; or, with a
            checkpoint_dir, a batch of a stream, which would train twice if Spark repeats it.
            Raised before any node starts.
        NodeFailedError, FeedError: see TFCluster.train.
    """
    _check_settings(settings, recipe)
    _check_frame(frame, plan, recipe)
    _check_batch(frame, settings)
    if validation is not None:
        _check_frame(validation, plan, recipe)
    size, times = settings.batch_size, plan.times(_fields(frame))
    with _divided(frame, plan, settings, validation) as (train, held):
        _check_rows(train, "has no rows to train")
        if held is not None:
            _check_rows(held, "has no rows that validate")
        held_data = None if held is None else FedData(plan, size, "validation", times)
        program = _program(recipe, settings, FedData(plan, size, times=times), held_data)
        fed = [each and chosen(each, plan.fed) for each in (train, held)]
        return _trained(frame.sparkSession.sparkContext, program, settings, *fed)


def _divided(
    frame: Any, plan: ColumnPlan, settings: FitSettings, validation: Any
) -> contextlib.AbstractContextManager[tuple[Any, Any]]:
    """Yield the rows to train and those that validate, another DataFrame or None."""
    if validation is not None:
        return contextlib.nullcontext((frame, validation))
    return divided(frame, plan, settings.validation_split, settings.seed or 0)


def fit_made(
    sc: Any,
    make: Callable[[], Any],
    recipe: ModelRecipe,
    settings: FitSettings,
    validation: Callable[[], Any] | None = None,
) -> FitResult:
    """Train a model on a tf.data.Dataset that a function makes in each worker.

    Args:
        sc: the SparkContext.
        make: returns the dataset, in batches; several workers take turns in its batches.
        recipe: the model.
        settings: how it trains; `batch_size` is up to the function. `make` runs under one
            seed in all workers, so that its shuffles agree; without one, each fit draws its own.
        validation: returns the dataset that validates each epoch; each worker validates all of it.

    Raises:
        SettingsError: invalid settings.
        NodeFailedError: a worker failed.
    """
    _check_settings(settings, recipe)
    seed = secrets.randbits(31) if settings.seed is None else settings.seed
    settings = dataclasses.replace(settings, seed=seed)  # the shuffles of all workers need one
    held = None if validation is None else MadeData(validation, seed)
    return _trained(sc, _program(recipe, settings, MadeData(make, seed), held), settings)


def _program(
    recipe: ModelRecipe,
    settings: FitSettings,
    data: FedData | MadeData,
    validation: FedData | MadeData | None,
) -> FitProgram:
    return FitProgram(
        recipe=recipe,
        data=data,
        validation=validation,
        epochs=settings.epochs,
        consistency=settings.consistency if settings.servers else None,
        staleness_bound=settings.staleness_bound,
        callbacks=settings.callbacks,
        class_weight=settings.class_weight,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        keeps_epochs=settings.keeps_epochs,
    )


def _trained(
    sc: Any, program: FitProgram, settings: FitSettings, train: Any = None, held: Any = None
) -> FitResult:
    _check_results(max_result_bytes(sc))
    with slots_for(sc, settings.cluster_size):
        cluster = TFCluster.reserve(
            sc,
            settings.cluster_size,
            settings.servers,
            input_mode=InputMode.SPARK,
            queues=("input", MODEL_FEED),
            config=_config(settings),
        )
        with cluster:
            cluster.start(program)
            if train is not None:
                report = cluster.train(
                    train,
                    settings.epochs,
                    settings.feed_timeout_s,
                    seed=settings.seed,
                    exactly_once=settings.exactly_once,
                    validation=held,
                )
                _tell_repeated(report, settings)
            else:
                cluster._feed_service.wait_unread("input")
            content = _content(sc, cluster, settings.cluster_size - settings.servers)
        history = cluster.history()
    servers = [each.server for each in cluster.status().nodes if each.server]
    updates = max((each.clock for each in servers), default=0)
    return FitResult(content, {name: history[name] for name in history.metrics}, updates)


def _tell_repeated(report: Any, settings: FitSettings) -> None:
    """Warn of rows that trained, or validated, more often than the user asked for."""
    if report is None:
        return
    told = []
    if report.repeated_rows:
        trained = f"{report.repeated_rows} rows, of {report.fed_rows} in all epochs,"
        told.append(f"{trained} may have trained twice")
    if checked := sum(each.repeated_rows for each in report.validation):
        told.append(f"{checked} rows may count twice in the validation")
    if not told:
        return
    remedy = (
        "they were fed again for a lost worker"
        if settings.exactly_once
        else "Spark ran a task again, or a worker was lost. If Spark computes a partition with "
        f"the same rows in the same order again, {settings._word('exactlyOnce')}=True skips what "
        "a repeated task fed before"
    )
    warnings.warn(f"{', '.join(told)}: {remedy}", stacklevel=4)


def evaluate(
    frame: Any, plan: ColumnPlan, recipe: ModelRecipe, settings: FitSettings | None = None
) -> dict[str, float]:
    """Return the loss and metrics of a model on a DataFrame in one worker: Keras' own numbers.

    Args:
        frame: the rows.
        plan: its columns.
        recipe: the model.
        settings: of these, batch_size, verbose, config and exactly_once count: with the last, a
            task that Spark repeats skips the rows that it fed before; without it, a warning reports
            rows that count twice. None: the defaults.

    Raises:
        SettingsError: columns, types or an empty DataFrame; before any node starts.
    """
    settings = settings or FitSettings()
    check_batch_size(settings.batch_size)
    _check_frame(frame, plan, recipe)
    _check_rows(frame, "has no rows to evaluate")
    data = FedData(plan, settings.batch_size, times=plan.times(_fields(frame)))
    program = EvaluateProgram(recipe=recipe, data=data)
    fed, sc = chosen(frame, plan.fed), frame.sparkSession.sparkContext
    return _evaluated(sc, program, settings, fed)


def evaluate_made(
    sc: Any, make: Callable[[], Any], recipe: ModelRecipe, settings: FitSettings
) -> dict[str, float]:
    """Return the loss and metrics of a model on a tf.data.Dataset in one worker.

    Args:
        sc: the SparkContext.
        make: returns the dataset, in batches.
        recipe: the model.
        settings: of these, verbose and config count.
    """
    program = EvaluateProgram(recipe=recipe, data=MadeData(make))
    return _evaluated(sc, program, settings)


def _evaluated(
    sc: Any, program: EvaluateProgram, settings: FitSettings, fed: Any = None
) -> dict[str, float]:
    report: Any = None
    with slots_for(sc, 1):
        # No server saves, and a worker that is started again would measure the rows that are left.
        config = dataclasses.replace(
            _config(settings), checkpoints=None, save_on_interrupt=None, restarts=Restarts()
        )
        cluster = TFCluster.reserve(sc, 1, 0, input_mode=InputMode.SPARK, config=config)
        with cluster:
            cluster.start(program)
            if fed is not None:
                report = cluster.train(fed, 1, exactly_once=settings.exactly_once)
            cluster.shutdown(timeout=None)
        found: dict[str, float] = cluster.results()[0]
    if report is not None and report.repeated_rows:
        warnings.warn(
            f"{report.repeated_rows} rows, of {report.fed_rows}, may count twice in these metrics: "
            "Spark ran a task again. Call evaluate() again for exact numbers",
            stacklevel=4,
        )
    return found


def _content(sc: Any, cluster: TFCluster, num_workers: int) -> bytes:
    """Fetch the trained model, in pieces, as a worker's answers to Spark tasks."""

    def answers(places: list[int]) -> list[bytes]:
        # A worker answers once its fit has ended: validation and callbacks run after the rows.
        rows = sc.parallelize(places, 1)
        found: list[bytes] = cluster.inference(rows, LONGEST_FIT_S, MODEL_FEED).collect()
        return found

    try:
        return joined(answers, num_workers)
    except Exception:
        # Raises the failure of a worker that has one. Others may train for days without answering.
        with contextlib.suppress(ShutdownTimeout):
            cluster.shutdown(timeout=_BLAME_S)
        raise


def _check_settings(settings: FitSettings, recipe: ModelRecipe) -> None:
    settings.check()
    recipe.check_compiled(trains=True)
    if settings.learning_rate is not None and (schedule := recipe.schedule):
        raise SettingsError(
            f"learningRate={settings.learning_rate}, but the model is compiled with the schedule "
            f"{schedule}. Compile it with a number, or leave out learningRate"
        )
    if recipe.has_trained and settings.servers and not settings.resume:
        warnings.warn(
            "this model has trained before: its parameter servers start with its weights and rows, "
            "but with a fresh optimizer state (momentum, step count). A fit without servers keeps "
            "that state. With servers, a fit in another program keeps it with the previous fit's "
            "checkpointDir and resume=True; Orca's estimator keeps it with model_dir",
            stacklevel=4,
        )


def _check_results(limit_bytes: int) -> None:
    """Refuse a result limit with which a trained model would be lost after its training."""
    if 0 < limit_bytes < NEEDED_BYTES:
        raise ConfigError(
            f"spark.driver.maxResultSize is {limit_bytes} bytes, but the trained model comes back "
            f"in Spark jobs that need {NEEDED_BYTES}. Set 32m or more, or 0 for no limit"
        )


def _check_frame(frame: Any, plan: ColumnPlan, recipe: ModelRecipe) -> None:
    check_fed(frame)
    fields = _fields(frame)
    plan.check(fields)
    plan.check_model(fields, recipe.inputs, recipe.outputs)


def _check_batch(frame: Any, settings: FitSettings) -> None:
    if settings.checkpoint_dir and (
        where := call_of_batch(frame.sparkSession.sparkContext.getLocalProperty)
    ):
        raise SettingsError(
            f"fit() within {where}: a batch that Spark repeats, as after a crash, would train "
            f"again on top of what the servers saved in {settings.checkpoint_dir}. Train the "
            f"stream with {TRAIN_ONCE[where]}; or leave out {settings._word('checkpointDir')}"
        )


def _fields(frame: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.dataType) for each in frame.schema.fields]


def _check_rows(frame: Any, text: str) -> None:
    if frame.isEmpty():
        raise SettingsError(f"the DataFrame with the columns {frame.columns} {text}")


def _config(settings: FitSettings) -> ClusterConfig:
    checkpoints = None
    if settings.checkpoint_dir:
        checkpoints = Checkpoints(
            directory=settings.checkpoint_dir,
            resume=settings.resume,
            resume_epochs=settings.resume_epochs,
        )
    given = config_of(settings.config)
    is_shown = settings.verbose and given.verbose
    return dataclasses.replace(given, verbose=is_shown, checkpoints=checkpoints, shares_slots=True)
