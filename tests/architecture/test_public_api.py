"""The names that programs written for TensorFlowOnSpark use, with their keywords and defaults."""

from __future__ import annotations

import importlib
import inspect

import pytest

import tfos
import tfos.errors

RUN = {
    "num_ps": inspect.Parameter.empty,
    "tensorboard": False,
    "input_mode": tfos.InputMode.TENSORFLOW,
    "log_dir": None,
    "driver_ps_nodes": False,
    "master_node": None,
    "reservation_timeout": 600,
    "queues": ("input", "output", "error"),
    "eval_node": False,
    "release_port": True,
}
CONTEXT = [
    *("job_name", "task_index", "executor_id", "num_workers", "is_chief", "cluster_spec"),
    *("defaultFS", "working_dir", "absolute_path", "get_data_feed", "dataset", "distribute"),
    *("export", "callbacks", "log_dir", "ps_client"),
]


def _defaults(method):
    return {name: p.default for name, p in inspect.signature(method).parameters.items()}


def test_everything_that_is_offered_exists():
    assert {"TFCluster", "InputMode"} <= set(tfos.__all__)
    assert not [name for name in tfos.__all__ if not hasattr(tfos, name)]


@pytest.mark.parametrize("room", ["ps", "rpc", "feeding"])
def test_a_room_offers_its_names_by_itself(room):
    module = importlib.import_module(room)
    assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_every_error_is_in_one_tree_that_tfos_errors_shows():
    homes = ("rpc.errors", "ps.errors", "feeding.errors", "tfos.errors")
    kinds = {
        kind
        for home in map(importlib.import_module, homes)
        for kind in vars(home).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ in homes
    }
    outside = {tfos.errors.RemoteTraceback, tfos.errors.FeedEndedWarning}
    assert not [kind for kind in kinds - outside if not issubclass(kind, tfos.errors.TFOSError)]
    assert {kind.__name__ for kind in kinds} <= set(tfos.errors.__all__)
    settings = [kind for kind in kinds if kind.__name__.endswith("SettingsError")]
    assert len(settings) == 3
    assert all(issubclass(kind, tfos.errors.SettingsError) for kind in settings)
    assert issubclass(tfos.errors.SettingsError, ValueError)


def test_run_takes_the_known_keywords_in_their_order():
    parameters = _defaults(tfos.TFCluster.run)
    assert list(parameters)[:5] == ["sc", "map_fun", "tf_args", "num_executors", "num_ps"]
    found = {name: parameters[name] for name in RUN}
    assert {**found, "queues": tuple(found["queues"])} == RUN
    assert list(parameters)[4 : 4 + len(RUN)] == list(RUN)


@pytest.mark.parametrize(
    ("method", "keywords"),
    [
        ("train", {"num_epochs": 0, "feed_timeout": 600, "qname": "input"}),
        ("inference", {"feed_timeout": 600, "qname": "input"}),
        ("shutdown", {"ssc": None, "grace_secs": 0, "timeout": 259200}),
    ],
)
def test_methods_take_the_known_keywords(method, keywords):
    parameters = _defaults(getattr(tfos.TFCluster, method))
    assert {name: parameters[name] for name in keywords} == keywords
    assert method == "shutdown" or list(parameters)[1] == "dataRDD"


@pytest.mark.parametrize("method", ["reserve", "start", "status", "tensorboard_url", "__enter__"])
def test_the_cluster_has(method):
    assert callable(getattr(tfos.TFCluster, method))


def test_input_modes_are_reachable_both_ways_and_keep_their_numbers():
    assert tfos.TFCluster.InputMode is tfos.InputMode
    assert (tfos.InputMode.TENSORFLOW, tfos.InputMode.SPARK) == (0, 1)


def test_the_context_has_the_known_members():
    from tfos.worker.context import NodeContext

    source = inspect.getsource(NodeContext.__init__)
    missing = [
        name for name in CONTEXT if not (hasattr(NodeContext, name) or f"self.{name} = " in source)
    ]
    assert not missing


def test_data_feed_has_the_known_methods():
    from feeding.receiver.data_feed import DataFeed

    for name in ("next_batch", "should_stop", "batch_results", "terminate"):
        assert callable(getattr(DataFeed, name))
    parameters = _defaults(DataFeed.__init__)
    wanted = {"train_mode": True, "qname_in": "input", "qname_out": "output", "input_mapping": None}
    assert {name: parameters[name] for name in wanted} == wanted
