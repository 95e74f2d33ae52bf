"""Settings of a fit, and functions by their names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import operator
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql.types import DoubleType, StructField, StructType, TimestampType

from tests.support.model_files import keras_file
from tests.support.named_models import compiled
from tfos.cluster import TFCluster
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.errors import ConfigError, NodeFailedError, NotPicklable, SettingsError, ShutdownTimeout
from tfos.estimators import training
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.functions import function_of, reference_to
from tfos.estimators.program import FitProgram, MadeData
from tfos.estimators.recipe import ModelRecipe, recipe_of
from tfos.estimators.training import FitResult, FitSettings


def test_callbacks_that_hold_a_lock_are_refused_with_the_function_that_makes_them():
    """The error was about a main_fun, which no user of an estimator has."""
    callback = SimpleNamespace(client=SimpleNamespace(lock=threading.Lock()))
    text = (
        r"^callbacks\[1\]\.client\.lock \(lock\) cannot travel .*function that makes the callbacks"
    )
    with pytest.raises(NotPicklable, match=text):
        FitSettings(callbacks=[SimpleNamespace(), callback]).check()
    FitSettings(callbacks=lambda: [threading.Lock()]).check()
    text = r"^callbacks .*lambda.* refers to 'callback' .*Create it inside callbacks, .* made of\.$"
    with pytest.raises(NotPicklable, match=text):
        FitSettings(callbacks=lambda: [callback]).check()


def test_a_fit_shares_slots_with_those_beside_it():
    for settings in (FitSettings(), FitSettings(cluster_size=2, checkpoint_dir="/c")):
        assert training._config(settings).shares_slots


def test_a_fit_and_an_evaluation_have_the_other_settings_of_a_cluster(played, monkeypatch):
    """Dynamic allocation was refused, and what accepts it was no argument of an estimator."""
    twice = Restarts(workers=2)
    given = ClusterConfig(allow_dynamic=True, save_on_interrupt="/i", verbose=False, restarts=twice)
    settings = FitSettings(cluster_size=2, checkpoint_dir="/c", config=given)
    settings.check()
    program: Any = None
    reserved: list[ClusterConfig] = []

    def reserve(*_: Any, config: ClusterConfig, **__: Any) -> Any:
        reserved.append(config)
        return played

    monkeypatch.setattr(TFCluster, "reserve", reserve)
    training._trained(None, program, settings)
    training._evaluated(None, program, settings)
    assert [each.checkpoints and each.checkpoints.directory for each in reserved] == ["/c", None]
    assert [each.restarts for each in reserved] == [twice, Restarts()]
    assert [each.save_on_interrupt for each in reserved] == ["/i", None]  # it would be warned of
    for each in reserved:
        own = dataclasses.replace(
            each, checkpoints=None, shares_slots=False, restarts=twice, save_on_interrupt="/i"
        )
        assert (own, each.shares_slots) == (given, True)
    assert not training._config(FitSettings(verbose=False, config=ClusterConfig())).verbose


def test_several_workers_have_a_server_unless_told_otherwise():
    assert [FitSettings(cluster_size=size).servers for size in (1, 2, 5)] == [0, 1, 1]
    FitSettings(cluster_size=5, num_ps=2, checkpoint_dir="/c").check()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (FitSettings(batch_size=0), "batchSize must be an int >= 1"),
        (FitSettings(epochs=0), "^epochs must be an int >= 1, got 0"),
        (FitSettings(epochs=-1), "^epochs must be an int >= 1, got -1"),
        (FitSettings(epochs=1.5), "^epochs must be an int >= 1, got 1.5"),  # type: ignore[arg-type]
        (FitSettings(epochs=True), "^epochs must be an int >= 1, got True"),
        (FitSettings(cluster_size="2"), r"^clusterSize must be an int, got '2' \(str\)"),  # type: ignore[arg-type]
        (FitSettings(cluster_size=True), r"^clusterSize must be an int, got True \(bool\)"),
        (FitSettings(cluster_size=None), "^clusterSize must be an int, got None"),  # type: ignore[arg-type]
        (FitSettings(num_ps=1.0), "^numPS must be an int, got 1.0"),  # type: ignore[arg-type]
        (FitSettings(seed=1.5), "^seed must be an int, got 1.5"),  # type: ignore[arg-type]
        (FitSettings(seed=np.int64(3)), r"^seed must be an int, got np.int64\(3\) \(int64\)"),  # type: ignore[arg-type]
        (
            FitSettings(consistency="ssp", staleness_bound=2.5),  # type: ignore[arg-type]
            "^stalenessBound must be an int, got 2.5",
        ),
        (FitSettings(exactly_once="no"), "^exactlyOnce must be True or False, got 'no'"),  # type: ignore[arg-type]
        (FitSettings(verbose=1), "^verbose must be True or False, got 1"),  # type: ignore[arg-type]
        (FitSettings(validation_split=1.0), "validationSplit=1.0; it is a share"),
        (FitSettings(cluster_size=2, num_ps=0), "clusterSize=2 with numPS=0"),
        (FitSettings(cluster_size=2, num_ps=2), "leaves no worker"),
        (FitSettings(cluster_size=0), "clusterSize=0 with numPS=0 leaves no worker"),
        (FitSettings(cluster_size=3, num_ps=-2), "numPS=-2; it must be 0 or more, or left out"),
        (
            FitSettings(consistency="ssp", staleness_bound=-3),
            "stalenessBound=-3; it must be 0 or more, or left out",
        ),
        (FitSettings(seed=2**40), "seed=1099511627776 with 1 workers: .* takes 0 to 4294967295"),
        (FitSettings(seed=-5), "seed=-5 with 1 workers: .* or -1 for rows in their own order"),
        (FitSettings(seed=2**32 - 2, cluster_size=4), "seed=4294967294 with 3 workers"),
        (FitSettings(consistency="bsp"), "consistency='bsp'; it is one of"),
        (FitSettings(consistency="ssp"), "consistency='ssp' with stalenessBound=None; ssp"),
        (FitSettings(staleness_bound=2), "consistency='async' with stalenessBound=2; ssp"),
        (FitSettings(resume=True), "resume=True without checkpointDir: there is nothing"),
        (FitSettings(checkpoint_dir="/c"), "needs parameter servers"),
        (FitSettings(callbacks=3), "callbacks=3; pass a list of Keras callbacks"),  # type: ignore[arg-type]
        (FitSettings(learning_rate=-0.1), "learningRate=-0.1; it must be a number above 0"),
        (FitSettings(learning_rate=math.nan), "learningRate=nan; it must be"),
        (FitSettings(learning_rate=math.inf), "learningRate=inf; it must be"),
        (FitSettings(class_weight=[1.0]), "class_weight must be a dict from class to weight"),  # type: ignore[arg-type]
        (FitSettings(class_weight={0: math.nan}), "weight of class 0 must be a finite number"),
        (FitSettings(config={}), r"^config must be a tfos.ClusterConfig or None, got \{\}"),  # type: ignore[arg-type]
        (
            FitSettings(config={}, words={"config": "cluster_config"}),  # type: ignore[arg-type]
            "^cluster_config must be a tfos",
        ),
        (
            FitSettings(config=ClusterConfig(checkpoints=Checkpoints(directory="/c"))),
            r"config=ClusterConfig\(checkpoints=…\): .* save in checkpointDir. Name",
        ),
        (
            FitSettings(config=ClusterConfig(restarts=Restarts(workers=1))),
            r"config=ClusterConfig\(restarts=…\) without a server: .* Set numPS=1 and cluster",
        ),
        (FitSettings(feed_timeout_s=0.0), "feedTimeout must be > 0 seconds, got 0.0"),
        (FitSettings(feed_timeout_s=math.nan), "feedTimeout must be > 0 seconds, got nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(SettingsError, match=text):
        settings.check()


def test_a_fit_of_a_function_without_a_seed_draws_one_for_all_its_workers(monkeypatch):
    """Every fit began with the same weights and shuffled alike."""
    programs: list[Any] = []
    monkeypatch.setattr(training, "_trained", lambda _, program, __: programs.append(program))
    for seed in (None, None, 5):
        settings, recipe = FitSettings(seed=seed), ModelRecipe(model_fn=object)
        training.fit_made(None, object, recipe, settings, object)
    seeds = [{each.seed, each.data.seed, each.validation.seed} for each in programs]
    assert [len(each) for each in seeds] == [1, 1, 1]
    assert seeds[0] != seeds[1]
    assert seeds[2] == {5}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_seed_that_numpy_takes_from_every_worker_is_accepted(rank):
    FitSettings(seed=2**32 - 1 - rank, cluster_size=2 + rank).check()
    FitSettings(seed=None).check()


@pytest.mark.parametrize("word", ["exactlyOnce", "exactly_once"])
@pytest.mark.parametrize("is_once", [False, True])
def test_rows_that_have_trained_twice_are_a_warning(is_once, word, recwarn):
    settings = FitSettings(exactly_once=is_once, words={"exactlyOnce": word})
    for report in (None, SimpleNamespace(repeated_rows=0, validation=())):
        training._tell_repeated(report, settings)
    assert not recwarn
    remedy = "lost worker" if is_once else f"{word}=True"
    twice = "7 rows, of 90 in all epochs, may have trained twice"
    checked = [SimpleNamespace(repeated_rows=count) for count in (2, 3)]
    for trained, validation, text in (
        (7, [], f"^{twice}: .*"),
        (0, checked, "^5 rows may count twice in the validation: .*"),
        (7, checked, f"^{twice}, 5 rows may count twice in the validation: .*"),
    ):
        report = SimpleNamespace(repeated_rows=trained, fed_rows=90, validation=validation)
        with pytest.warns(UserWarning, match=text + remedy):
            training._tell_repeated(report, settings)


def test_a_model_or_a_function_that_makes_one_is_needed():
    with pytest.raises(SettingsError, match="pass either model="):
        recipe_of(None, None)
    with pytest.raises(SettingsError, match="model_fn must be a function"):
        recipe_of(None, 3)
    with pytest.raises(SettingsError, match="there is neither"):
        ModelRecipe().build()


def test_functions_go_by_module_and_name():
    reference = reference_to("model_fn", compiled)
    assert (reference, function_of(reference)) == ("tests.support.named_models:compiled", compiled)
    assert (reference_to("callbacks", None), function_of("")) == ("", None)
    with pytest.raises(SettingsError, match=r"model_fn .*lambda.* cannot be saved"):
        reference_to("model_fn", lambda: None)


class Factory:
    """Makes models of the state that it has."""

    def make(self):
        """Return nothing: it is not called."""

    @classmethod
    def of_class(cls):
        """Return nothing: it is not called."""

    @staticmethod
    def of_none():
        """Return nothing: it is not called."""


def bound_anew():
    """Return nothing: its name belongs to another function."""


BEFORE, bound_anew = bound_anew, lambda: None


def elsewhere():
    """Return nothing: it names a module that is none."""


elsewhere.__module__ = "tests.no_such_module"


def scaled(factor):
    """Return a decorator of which only what it holds is its own."""

    def decorated(function):
        @functools.wraps(function)
        def scaling():
            return factor * function()

        return scaling

    return decorated


@scaled(2)
def three():
    """Return a number."""
    return 3


@pytest.mark.parametrize(
    "again", [scaled(3)(three), scaled(2)(three), scaled(4)(three.__wrapped__)]
)
def test_a_function_that_is_decorated_otherwise_than_its_module_has_it_is_not_saved(again):
    """Its code is that of the module's function; what it returns is not."""
    assert function_of(reference_to("custom", three)) is three
    with pytest.raises(SettingsError, match=r"custom three .* cannot be saved"):
        reference_to("custom", again)


@pytest.mark.parametrize("function", [Factory().make, BEFORE, elsewhere])
def test_what_its_name_does_not_give_back_is_not_saved(function):
    """Of a bound method, a plain function would come back, whose call fails in a worker."""
    with pytest.raises(SettingsError, match=r"custom .* cannot be saved: .*at top level"):
        reference_to("custom", function)


_SOURCE = """
class Loss:
    weight = 2

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate = rate

    @staticmethod
    def scaled(value): return value * 3

def loss(true, guess, *, scale=1): return scale * (true - guess)

def repeated(times):
    def around(function):
        def again(count=times): return again(count - 1) if count else function()
        again.__qualname__ = function.__qualname__
        return again
    return around

@repeated(3)
def decorated(): return 1
"""


@pytest.mark.parametrize("name", ["Loss", "loss", "Loss.scaled", "decorated"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("weight = 2", "weight = 4"), ("scale=1", "scale=2"), ("0.5", "0.25"), ("* 3", "* 5")],
)
def test_what_a_module_has_after_it_is_loaded_again_is_the_same_while_its_code_is(
    name, old, new, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of one second, it would be taken again
    file = tmp_path / "own_losses.py"
    file.write_text(_SOURCE)
    module = importlib.import_module("own_losses")
    try:
        function = operator.attrgetter(name)(module)
        importlib.reload(module)
        assert function != operator.attrgetter(name)(module)
        assert reference_to("custom", function) == f"own_losses:{name}"
        file.write_text(_SOURCE.replace(old, new))
        importlib.reload(module)
        changed = {"loss": ["scale=1"], "Loss.scaled": ["* 3"], "decorated": []}.get(
            name, ["weight = 2", "0.5", "* 3"]
        )
        if old not in changed:
            assert reference_to("custom", function) == f"own_losses:{name}"
            return
        with pytest.raises(SettingsError, match=r"another version of it.*from own_losses import"):
            reference_to("custom", function)
    finally:
        del sys.modules["own_losses"]


@pytest.mark.parametrize("function", [Factory, Factory.of_class, Factory.of_none, print])
def test_functions_and_classes_come_back_as_they_were(function):
    assert function_of(reference_to("custom", function)) == function


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ({"class_name": "SGD", "config": {"learning_rate": 0.1}}, ""),
        (
            {"config": {"learning_rate": {"class_name": "CosineDecay", "config": {}}}},
            "CosineDecay",
        ),
        (
            {"config": {"inner_optimizer": {"config": {"learning_rate": {"class_name": "Own"}}}}},
            "Own",
        ),
        ("adam", ""),
    ],
)
def test_a_learning_rate_over_a_schedule_is_refused_at_the_driver(optimizer, name, monkeypatch):
    """Keras refuses it in the worker, once all nodes have started."""
    recipe = ModelRecipe(content=keras_file({"optimizer": optimizer}))
    assert recipe.schedule == name
    trained = FitResult(b"trained", {})
    monkeypatch.setattr(training, "_trained", lambda *_: trained)
    assert training.fit_made(None, object, recipe, FitSettings()) == trained
    settings = FitSettings(learning_rate=0.2)
    if not name:
        assert training.fit_made(None, object, recipe, settings) == trained
        return
    with pytest.raises(SettingsError, match=rf"learningRate=0.2, .* schedule {name}\. "):
        training.fit_made(None, object, recipe, settings)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (keras_file(None), "a model that was never compiled: .*call compile"),
        (b"of h5", r"the model's 5 bytes are not a .keras file: .*save\('name.keras'\) writes one"),
    ],
)
def test_a_file_that_cannot_be_trained_is_refused_at_the_driver(content, text, monkeypatch):
    monkeypatch.setattr(training, "_trained", lambda *_: FitResult(b"trained", {}))
    with pytest.raises(SettingsError, match=text):
        training.fit_made(None, object, ModelRecipe(content=content), FitSettings())


def test_a_recipe_without_a_file_has_no_schedule_that_is_known():
    assert ModelRecipe(model_fn=object).schedule == ""


def test_a_limit_of_results_that_would_lose_the_model_is_refused_before_the_training():
    for limit_bytes in (0, 32 << 20, 1 << 30):
        training._check_results(limit_bytes)
    with pytest.raises(ConfigError, match=r"is 1048576 bytes, .* that need 33554432. Set 32m or"):
        training._check_results(1 << 20)


@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize(
    ("settings", "begins_anew"),
    [
        (FitSettings(cluster_size=2), True),
        (FitSettings(cluster_size=2, checkpoint_dir="/c", resume=True), False),
        (FitSettings(), False),
    ],
)
def test_servers_of_a_trained_model_say_that_its_optimizer_begins_anew(
    recwarn, settings, begins_anew, has_trained
):
    training._check_settings(settings, ModelRecipe(model_fn=object, has_trained=has_trained))
    told = [str(each.message) for each in recwarn]
    assert len(told) == (begins_anew and has_trained)
    assert all("fresh optimizer state" in each for each in told)
    # In the same program, a KerasEstimator refuses to go on in the directory of a fit.
    assert all("in another program" in each for each in told)


class Untold:
    """A cluster whose worker answers no request for the model; `ends` is what a shutdown raises."""

    def __init__(self, ends):
        self._ends = ends
        self.timeouts = []

    def inference(self, *_):
        """Fail as the job that fetches the model."""
        raise InterruptedError("the executor of the job was lost")

    def shutdown(self, timeout=259_200.0):
        """End at once; a real one waits that long for a worker that trains what nobody feeds."""
        self.timeouts.append(timeout)
        if self._ends is not None:
            raise self._ends


@pytest.mark.parametrize("ends", [None, ShutdownTimeout("main_fun did not return")])
def test_a_model_that_cannot_be_fetched_is_not_waited_for(ends):
    cluster: Any = Untold(ends)
    sc: Any = SimpleNamespace(parallelize=lambda *_: None)
    with pytest.raises(InterruptedError, match="the executor of the job was lost"):
        training._content(sc, cluster, 1)
    assert cluster.timeouts == [30.0]


def test_the_failure_of_a_worker_is_why_its_model_was_not_fetched():
    cluster: Any = Untold(NodeFailedError([]))
    sc: Any = SimpleNamespace(parallelize=lambda *_: None)
    with pytest.raises(NodeFailedError):
        training._content(sc, cluster, 1)


class Played:
    """A cluster of one fit that notes what is asked of it, and the report of its end."""

    def __init__(self):
        self.asked = []
        self._feed_service = SimpleNamespace(wait_unread=lambda feed: self.note("wait", feed))

    def note(self, *call):
        self.asked.append(call)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.note("end")

    def start(self, program):
        pass

    def train(self, *_, **__):
        self.note("train")

    def shutdown(self, timeout=259_200.0):
        self.note("shutdown", timeout)

    def results(self):
        return [{"loss": 0.5}]

    def history(self):
        return SimpleNamespace(metrics=())

    def status(self):
        servers = [SimpleNamespace(clock=clock) for clock in (40, 41)]
        return SimpleNamespace(nodes=[SimpleNamespace(server=each) for each in (None, *servers)])


@pytest.fixture
def played(monkeypatch):
    made = Played()
    monkeypatch.setattr(TFCluster, "reserve", lambda *_, **__: made)
    monkeypatch.setattr(training, "slots_for", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(training, "_content", lambda *_: made.note("ask") or b"trained")
    monkeypatch.setattr(training, "max_result_bytes", lambda _: 0)
    return made


@pytest.mark.parametrize(("rows", "how"), [(None, ("wait", "input")), ([1], ("train",))])
def test_the_model_is_asked_for_once_the_fits_have_ended(played, rows, how):
    """A task that waits for it has a limit, and workers that read their own data have none."""
    program: Any = None
    found = training._trained(None, program, FitSettings(cluster_size=3, num_ps=2), rows)
    assert played.asked == [how, ("ask",), ("end",)]
    assert (found.content, found.updates) == (b"trained", 41)


def test_all_settings_of_a_fit_reach_its_workers_and_its_feed(played, monkeypatch):
    started: list[Any] = []
    fed: list[Any] = []
    monkeypatch.setattr(played, "start", started.append)
    monkeypatch.setattr(played, "train", lambda *args, **options: fed.append((args, options)))
    data, held = MadeData(object), MadeData(list)
    of_workers: dict[str, Any] = {
        "epochs": 4,
        "consistency": "ssp",
        "staleness_bound": 2,
        "callbacks": [object()],
        "class_weight": {0: 2.0},
        "learning_rate": 0.5,
        "seed": 9,
    }
    settings = FitSettings(cluster_size=3, feed_timeout_s=7.0, exactly_once=True, **of_workers)
    recipe = ModelRecipe(content=b"m")
    program = training._program(recipe, settings, data, held)
    training._trained(None, program, settings, "rows", "others")
    assert started == [FitProgram(recipe=recipe, data=data, validation=held, **of_workers)]
    options = {"seed": 9, "exactly_once": True, "validation": "others"}
    assert fed == [(("rows", 4, 7.0), options)]
    alone = training._program(recipe, FitSettings(), data, None)
    assert alone.consistency is None


def test_an_evaluation_has_no_limit(played):
    program: Any = None
    assert training._evaluated(None, program, FitSettings()) == {"loss": 0.5}
    assert played.asked == [("shutdown", None), ("end",)]


@pytest.mark.parametrize("is_once", [False, True])
def test_rows_that_count_twice_in_an_evaluation_are_a_warning(
    is_once, played, monkeypatch, recwarn
):
    asked: list[Any] = []
    report = SimpleNamespace(repeated_rows=0, fed_rows=90)

    def train(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return report

    monkeypatch.setattr(played, "train", train)
    program: Any = None

    def evaluate() -> dict[str, float]:
        return training._evaluated(None, program, FitSettings(exactly_once=is_once), [1])

    assert evaluate() == {"loss": 0.5}
    assert not recwarn
    assert asked == [(([1], 1), {"exactly_once": is_once})]
    report.repeated_rows = 7
    with pytest.warns(UserWarning, match=r"^7 rows, of 90, may count twice .*evaluate\(\) again"):
        assert evaluate() == {"loss": 0.5}


def test_a_stream_is_no_data_of_a_fit():
    frame: Any = SimpleNamespace(mapInArrow=None, isStreaming=True)
    plan, recipe = ColumnPlan(features=("x",), labels=("y",)), ModelRecipe(model_fn=object)
    for ask in (
        lambda: training.fit(frame, plan, recipe, FitSettings()),
        lambda: training.evaluate(frame, plan, recipe),
    ):
        with pytest.raises(SettingsError, match=r"has no end; .*An estimator takes spark.read in"):
            ask()


def test_none_is_no_data_of_a_fit():
    """It ended in an AttributeError."""
    nothing: Any = None
    plan, recipe = ColumnPlan(features=("x",), labels=("y",)), ModelRecipe(model_fn=object)
    with pytest.raises(SettingsError, match=r"must be a Spark DataFrame, got builtins\.NoneType"):
        training.fit(nothing, plan, recipe, FitSettings())


@pytest.mark.parametrize("ask", ["fit", "evaluate"])
def test_workers_are_told_which_features_are_timestamps(ask, monkeypatch):
    begun: list[Any] = []
    for name in ("check_fed", "chosen", "_check_rows"):
        monkeypatch.setattr(training, name, lambda frame, *_: frame)
    monkeypatch.setattr(training, "_trained", lambda sc, program, *_: begun.append(program))
    monkeypatch.setattr(training, "_evaluated", lambda sc, program, *_, **__: begun.append(program))
    kinds = {"at": TimestampType(), "n": DoubleType(), "y": DoubleType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    session = SimpleNamespace(sparkContext=None)
    frame = SimpleNamespace(schema=schema, sparkSession=session, columns=[*kinds])
    plan, recipe = ColumnPlan(features=("at", "n"), labels=("y",)), recipe_of(None, compiled, None)
    if ask == "fit":
        training.fit(frame, plan, recipe, FitSettings(), validation=frame)
    else:
        training.evaluate(frame, plan, recipe)
    (program,) = begun
    held = getattr(program, "validation", program.data)
    assert [[str(each) for each in data.times] for data in (program.data, held)] == [
        ["at: timestamp"],
        ["at: timestamp"],
    ]
