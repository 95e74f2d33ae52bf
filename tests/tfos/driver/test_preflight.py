from __future__ import annotations

import argparse
import functools
import math
import threading
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from tfos.config import Checkpoints, ClusterConfig, InputMode, Restarts, TensorBoardConfig
from tfos.driver import preflight
from tfos.errors import ConfigError, SettingsError, UnsupportedError
from tfos.spark import facts
from tfos.topology import plan


def _facts(master: str, **conf: str) -> facts.SparkFacts:
    settings = {key.replace("_", "."): value for key, value in conf.items()}
    return facts.SparkFacts(master, "app", settings, "hdfs://nn:8020")


def _settings(conf: dict[str, str], master: str = "yarn") -> facts.SparkFacts:
    return facts.SparkFacts(master, "app", conf, "hdfs://nn:8020")


@pytest.mark.fault("F22")
def test_dynamic_allocation_is_refused_unless_allowed():
    conf = {"spark.dynamicAllocation.enabled": "true"}
    with pytest.raises(ConfigError, match=r"ClusterConfig\(allow_dynamic=True\).* cluster_config="):
        preflight.check_spark(_settings(conf), ClusterConfig())
    preflight.check_spark(_settings(conf), ClusterConfig(allow_dynamic=True))


def test_executors_that_spark_may_remove_under_fed_workers_are_warned_of():
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    idle = {"spark.dynamicAllocation.executorIdleTimeout": "9s"}
    fixed = dict.fromkeys(
        ("spark.dynamicAllocation.minExecutors", "spark.dynamicAllocation.maxExecutors"), "3"
    )

    def note(conf: dict[str, str], *, holds: bool = False) -> str:
        return preflight.idle_note(_settings(conf), workers_hold_slots=holds)

    assert "executorIdleTimeout=60s" in note(dynamic)
    assert "executorIdleTimeout=9s" in note(dynamic | idle)
    assert note(dynamic, holds=True) == note(dynamic | fixed) == note({}) == ""


@pytest.mark.fault("F22")
def test_speculation_is_refused_unless_allowed():
    conf = {"spark.speculation": "true"}
    with pytest.raises(
        ConfigError, match=r"ClusterConfig\(allow_speculation=True\).* cluster_config="
    ):
        preflight.check_spark(_settings(conf), ClusterConfig())
    preflight.check_spark(_settings(conf), ClusterConfig(allow_speculation=True))


@pytest.mark.fault("F22")
@pytest.mark.parametrize("name", ["spark.dynamicAllocation.enabled", "spark.speculation"])
def test_settings_of_a_cluster_that_a_local_master_ignores_pass_there(name: str):
    """A gateway's spark-defaults.conf is that of its cluster."""
    preflight.check_spark(_settings({name: "true"}, "local[4]"), ClusterConfig())
    with pytest.raises(ConfigError, match=name):
        preflight.check_spark(_settings({name: "true"}, "local-cluster[2,1,1024]"), ClusterConfig())


def test_a_limit_on_the_address_space_is_refused_with_the_arithmetic():
    conf = {"spark.executor.pyspark.memory": "2g", "spark.executor.cores": "2"}
    with pytest.raises(ConfigError) as caught:
        preflight.check_spark(_settings(conf), ClusterConfig())
    assert "1024 MiB (2g / 2 cores)" in str(caught.value)
    assert "spark.executor.memoryOverhead=4096m" in str(caught.value)
    assert "maps up to 4096 MiB before any model" in str(caught.value)


@pytest.mark.parametrize("limit", ["0", "8g", "64g"])
def test_a_limit_above_what_tensorflow_maps_is_the_users_choice(limit):
    conf = {"spark.executor.pyspark.memory": limit, "spark.executor.cores": "2"}
    preflight.check_spark(_settings(conf), ClusterConfig())


@pytest.mark.fault("F22")
def test_an_end_of_idle_python_workers_is_refused_since_a_node_task_says_nothing():
    limit, kills = "spark.python.worker.idleTimeoutSeconds", "spark.python.worker.killOnIdleTimeout"
    with pytest.raises(ConfigError, match=rf"{kills}=true with {limit}=60s.*Set {kills}=false"):
        preflight.check_spark(_settings({limit: "60s", kills: "true"}), ClusterConfig())
    for harmless in ({limit: "60s"}, {kills: "true"}, {limit: "0", kills: "true"}):
        preflight.check_spark(_settings(harmless), ClusterConfig())


def test_ordinary_settings_pass():
    preflight.check_spark(_settings({"spark.executor.memory": "4g"}), ClusterConfig())


def test_restarts_are_warned_of_where_spark_ends_a_job_at_its_first_lost_executor():
    def note(failures: str, *, hold: bool, master: str = "yarn", **config: Any) -> str:
        facts = _facts(master, spark_task_maxFailures=failures)
        return preflight.attempts_note(facts, ClusterConfig(**config), workers_hold_slots=hold)

    workers, saves = Restarts(workers=3), Checkpoints(directory="/saves")
    told = note("1", hold=True, restarts=workers)
    assert "Restarts(workers=3) restarts no node" in told
    assert "set spark.task.maxFailures to 2 or more" in told
    assert "Restarts(workers=3, ps=1)" in note("1", hold=True, restarts=workers, checkpoints=saves)
    assert "Restarts(ps=1)" in note("1", hold=False, restarts=workers, checkpoints=saves)
    assert not note("1", hold=False, restarts=workers)
    assert not note("1", hold=True)
    assert not note("2", hold=True, restarts=workers)
    assert not note("1", hold=True, restarts=workers, master="local[4]")


def test_large_arguments_of_main_fun_are_warned_of_with_size_and_number_of_copies():
    told = preflight.size_note(50 << 20, num_nodes=200)
    assert "50 MiB" in told
    assert "200 nodes" in told
    assert "10000 MiB in all" in told
    assert "ctx.inputs" in told
    assert not preflight.size_note(50 << 20, num_nodes=2)
    assert not preflight.size_note(1 << 10, num_nodes=1000)


@pytest.mark.attack("A28")
def test_unencrypted_rpc_and_files_are_a_line_each_and_only_off_this_host():
    assert preflight.notes(_facts("local[4]")) == []
    assert preflight.notes(_facts("local-cluster[3,1,1024]")) == []
    on_the_wire, on_disk = preflight.notes(_facts("spark://h:7077"))
    assert "spark.network.crypto.enabled=true" in on_the_wire
    assert "spark.io.encryption.enabled=true" in on_disk
    assert preflight.notes(_facts("spark://h:7077", spark_io_encryption_enabled="true")) == [
        on_the_wire
    ]
    assert preflight.notes(_facts("spark://h:7077", spark_network_crypto_enabled="true")) == [
        on_disk
    ]


def test_yarn_users_learn_where_nodes_take_their_memory():
    lines = preflight.notes(
        _facts("yarn", spark_network_crypto_enabled="true", spark_io_encryption_enabled="true")
    )
    assert ["spark.executor.memoryOverhead=2048m" in line for line in lines] == [True]


@pytest.mark.parametrize(
    ("num_nodes", "slots", "needed"), [(3, 2, 4096), (2, 4, 4096), (3, 1, 2048)]
)
def test_the_overhead_told_at_the_start_is_that_of_the_nodes_on_one_executor(
    num_nodes: int, slots: int, needed: int
):
    conf = {"spark_network_crypto_enabled": "true", "spark_io_encryption_enabled": "true"}
    facts = _facts("yarn", spark_executor_cores=str(slots), **conf)
    (line,) = preflight.notes(facts, num_nodes)
    assert f"Set spark.executor.memoryOverhead={needed}m or more" in line


def test_every_output_of_a_cluster_gets_its_meaning_before_anything_starts():
    saves = ClusterConfig(checkpoints=Checkpoints(directory="/runs/7"), save_on_interrupt="/last")
    board = TensorBoardConfig(is_wanted=True, log_dir="/runs/7/logs")
    placed = preflight.placed_outputs(saves, board, _facts("yarn"))
    found = preflight.outputs(*placed, plan(2, 1))
    assert found == {
        "checkpoints": "hdfs://nn:8020/runs/7",
        "parameters of an interrupted cluster": "hdfs://nn:8020/last",
        "TensorBoard's files": "hdfs://nn:8020/runs/7/logs",
    }
    assert preflight.LAST_CHECKPOINT not in preflight.outputs(*placed, plan(2, 0))
    nothing = preflight.placed_outputs(ClusterConfig(), TensorBoardConfig(), _facts("yarn"))
    assert preflight.outputs(*nothing, plan(2, 1)) == {}


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({}, False),
        ({"spark.submit.deployMode": "client"}, False),
        ({"spark.submit.deployMode": "cluster"}, True),
        ({"spark.kubernetes.submitInDriver": "true"}, True),
    ],
)
def test_a_driver_that_the_cluster_manager_placed_is_known(conf, expected):
    assert facts.SparkFacts("yarn", "app", conf, "file:///").driver_in_container is expected


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local[4]", 1),
        ("local-cluster[3,1,1024]", 3),
        ("local-cluster[ 2 , 1 , 512 ]", 2),
        ("spark://h:7077", None),
        ("yarn", 2),
    ],
)
def test_promised_executors_come_from_the_master(master, expected):
    assert _facts(master).expected_executors == expected


@pytest.mark.parametrize(
    ("master", "conf", "allowed"),
    [
        ("spark://h:7077", {}, None),
        ("spark://h:7077", {"spark_cores_max": "4"}, 4),
        ("spark://h:7077", {"spark_cores_max": "5", "spark_task_cpus": "2"}, 2),
        ("yarn", {"spark_cores_max": "4"}, None),
    ],
)
def test_a_standalone_master_gives_slots_up_to_the_cores_of_the_application(master, conf, allowed):
    assert _facts(master, **conf).allowed_slots == allowed


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"executor_instances": "7"}, 7),
        ({"dynamicAllocation_enabled": "true"}, None),
        ({"dynamicAllocation_enabled": "true", "executor_instances": "7"}, 7),
        (
            {
                "dynamicAllocation_enabled": "true",
                "dynamicAllocation_minExecutors": "10",
                "dynamicAllocation_maxExecutors": "20",
            },
            10,
        ),
        (
            {
                "dynamicAllocation_enabled": "true",
                "dynamicAllocation_minExecutors": "1",
                "dynamicAllocation_initialExecutors": "4",
                "executor_instances": "3",
            },
            4,
        ),
        ({"dynamicAllocation_initialExecutors": "4"}, 2),
    ],
)
def test_promised_executors_of_yarn_are_those_that_spark_keeps(conf, expected):
    settings = {f"spark_{name}": value for name, value in conf.items()}
    assert _facts("yarn", **settings).expected_executors == expected


def test_local_masters_use_loopback_and_others_the_drivers_host():
    assert _facts("local-cluster[3,1,1024]").driver_host == "127.0.0.1"
    remote = _facts("spark://h:7077", spark_driver_host="10.0.0.1")
    assert (remote.driver_host, remote.bind_host, remote.is_local) == (
        "10.0.0.1",
        "10.0.0.1",
        False,
    )
    bound = _facts("yarn", spark_driver_host="10.0.0.1", spark_driver_bindAddress="0.0.0.0")
    assert (bound.driver_host, bound.bind_host) == ("10.0.0.1", "0.0.0.0")
    for bind in ("10.0.0.1", "0.0.0.0"):  # nodes on this host come to loopback, and nobody else
        local = _facts("local-cluster[3,1,1024]", spark_driver_bindAddress=bind)
        assert (local.driver_host, local.bind_host) == ("127.0.0.1", "127.0.0.1")


class _ConnectSession:
    pass


_ConnectSession.__module__ = "pyspark.sql.connect.session"


def test_a_connect_session_is_refused_with_a_way_out():
    with pytest.raises(UnsupportedError, match=r"Spark Connect.*spark\.api\.mode=classic"):
        facts.classic_context(_ConnectSession())


def test_without_a_context_a_program_of_spark_connect_gets_the_same_way_out(monkeypatch):
    """It was told to make a context by getOrCreate, which gives the Connect session again."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(SettingsError, match="no SparkContext in this process: create one first"):
        facts.active_context()
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(UnsupportedError, match=r"Spark Connect.*spark\.api\.mode=classic"):
        facts.active_context()


def test_an_active_session_of_spark_connect_is_refused(monkeypatch):
    """predict_column ended with PySpark's error of an attribute `sparkContext`."""
    monkeypatch.setattr(SparkSession, "getActiveSession", _ConnectSession)
    with pytest.raises(UnsupportedError, match=r"Spark Connect.*make the session with master"):
        facts.active_session()


@pytest.mark.parametrize("value", [None, "local[4]", 3])
def test_what_is_no_spark_is_refused(value):
    with pytest.raises(UnsupportedError, match="must be a SparkContext"):
        facts.classic_context(value)


def test_queues_of_tensorflowonspark_name_one_feed_and_validation_is_there_besides():
    assert preflight.check_queues(["input", "output", "error"]) == ("input", "validation")
    assert preflight.check_queues(["train", "val"]) == ("train", "val", "validation")
    assert preflight.check_queues(["validation", "input"]) == ("validation", "input")


@pytest.mark.parametrize(
    ("queues", "text"),
    [
        ("input", "queues must be a list of names, got 'input'"),
        (5, "queues must be a list of names, got 5"),
        (None, "queues must be a list of names, got None"),
        ([], "names no feed"),
        (["output"], "names no feed"),
        (["a", "a"], "holds a name twice"),
        ([3], "got 3"),
        (["a\n"], "printable"),
        (["a,b"], "without a comma, got 'a,b'"),
    ],
)
def test_unusable_queues_are_refused(queues, text):
    with pytest.raises(SettingsError, match=text):
        preflight.check_queues(queues)


def test_input_modes_are_those_of_tensorflowonspark():
    assert preflight.check_mode(1) is InputMode.SPARK
    assert preflight.check_mode(InputMode.TENSORFLOW) is InputMode.TENSORFLOW
    with pytest.raises(SettingsError, match="got 'spark'"):
        preflight.check_mode("spark")


def test_main_fun_must_take_args_and_ctx():
    preflight.check_main_fun(lambda args, ctx: None)
    preflight.check_main_fun(lambda *everything: None)
    with pytest.raises(SettingsError, match="does not take two positional arguments"):
        preflight.check_main_fun(lambda args: None)
    with pytest.raises(SettingsError, match="got str"):
        preflight.check_main_fun("main_fun")  # type: ignore[arg-type]


async def awaits(args, ctx):
    return args


def yields(args, ctx):
    yield args


async def awaits_and_yields(args, ctx):
    yield args


@pytest.mark.parametrize("main_fun", [awaits, yields, awaits_and_yields, functools.partial(awaits)])
def test_a_main_fun_of_which_a_call_runs_nothing_is_refused(main_fun):
    with pytest.raises(SettingsError, match="runs none of its lines"):
        preflight.check_main_fun(main_fun)


def test_zero_epochs_mean_ten():
    assert preflight.check_epochs(0) == 10
    assert preflight.check_epochs(3) == 3


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None])
def test_unusable_epochs_are_refused(value):
    with pytest.raises(SettingsError, match="num_epochs must be an int >= 0"):
        preflight.check_epochs(value)


@pytest.mark.parametrize("value", [0, -1, "5", True, math.nan, math.inf])
def test_unusable_timeouts_are_refused(value):
    with pytest.raises(SettingsError, match="feed_timeout must be"):
        preflight.check_timeout("feed_timeout", value)


def test_a_timeout_that_no_lock_takes_is_cut():
    assert preflight.check_timeout("feed_timeout", 1e30) == threading.TIMEOUT_MAX
    assert preflight.check_timeout("feed_timeout", 2) == 2.0


def test_a_limit_below_three_heartbeats_is_refused():
    with pytest.raises(SettingsError, match=r"hang_s >= 21\.0"):
        ClusterConfig(heartbeat_s=7.0)


@pytest.mark.attack("A06")
def test_what_is_on_the_network_is_authenticated_unasked_and_not_twice():
    assert (ClusterConfig().security, ClusterConfig().integrity) == ("hmac", "auto")
    with pytest.raises(SettingsError, match="authenticate every byte twice; leave integrity"):
        ClusterConfig(security="tls", integrity="payload")


@pytest.mark.parametrize("args", [{"batch_size": 0}, argparse.Namespace(batch_size=0)])
def test_a_batch_size_of_0_is_refused_before_any_node_starts(args):
    with pytest.raises(SettingsError, match=r"batch_size=0 .* at least 1 row"):
        preflight.check_batch_size(args)


@pytest.mark.parametrize("args", [None, 7, ["--batch_size", "0"], {"batch_size": 1}, {}])
def test_other_arguments_are_main_funs_own_affair(args):
    preflight.check_batch_size(args)


@pytest.mark.parametrize(
    ("seed", "shuffle_rows", "match"),
    [
        (-1, None, "seed must be an int from 0"),
        (1.5, None, "seed must be an int from 0"),
        (1, 0, "shuffle_rows must be an int >= 1, got 0"),
        (1, True, "shuffle_rows must be an int >= 1, got True"),
        (None, 5, "shuffle_rows=5 without a seed"),
    ],
)
def test_orders_that_cannot_work_are_refused(seed, shuffle_rows, match):
    with pytest.raises(SettingsError, match=match):
        preflight.check_shuffle(seed, shuffle_rows)


@pytest.mark.parametrize("order", [(None, None), (None, 1), (0, None), (7, 1), (7, 4096)])
def test_orders_that_work_are_taken(order):
    preflight.check_shuffle(*order)


@pytest.mark.parametrize("name", ["checkpoints", "save_on_interrupt"])
def test_tensorflows_servers_do_not_save(name, tmp_path):
    values: dict[str, Any] = {
        "checkpoints": Checkpoints(directory=str(tmp_path)),
        "save_on_interrupt": "/saved",
    }
    config = ClusterConfig(**{name: values[name]})
    preflight.check_servers(plan(3, 1), config)
    preflight.check_servers(plan(3, 1, ps="tensorflow"), ClusterConfig())
    with pytest.raises(SettingsError, match=rf"{name}=.*ps='tensorflow'.*CheckpointManager"):
        preflight.check_servers(plan(3, 1, ps="tensorflow"), config)


@pytest.mark.parametrize("num_ps", [0, 1])
def test_restarts_of_workers_are_refused_where_tensorflows_strategies_train(num_ps):
    config = ClusterConfig(restarts=Restarts(workers=2))
    preflight.check_servers(plan(3, num_ps), config)
    with pytest.raises(SettingsError, match=r"Restarts\(workers=2\).*take no worker back"):
        preflight.check_servers(plan(3, num_ps, ps="tensorflow"), config)
