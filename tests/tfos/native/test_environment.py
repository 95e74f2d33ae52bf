"""What TensorFlow's strategies find in the environment."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace

import pytest

from tfos.native import environment as native
from tfos.native.environment import announce_to_tensorflow, is_connected_to_servers, tf_config

CLUSTER = {"chief": ["a:1"], "ps": ["b:2"], "worker": ["c:3"]}


@pytest.mark.parametrize("has_servers", [True, False])
def test_servers_of_tfos_are_left_out_of_tf_config(has_servers):
    found = json.loads(tf_config(CLUSTER, "chief", 0, has_tensorflow_servers=has_servers))
    assert found["task"] == {"type": "chief", "index": 0}
    assert found["cluster"] == {
        name: nodes for name, nodes in CLUSTER.items() if name != "ps" or has_servers
    }


def test_switches_of_grpc_that_are_set_stay():
    mine = {"GRPC_FAIL_FAST": "true", "grpc_proxy": "http://proxy:3128"}
    announce_to_tensorflow(mine, {}, has_tensorflow_servers=True)
    assert mine == {
        "GRPC_FAIL_FAST": "true",
        "TF_GRPC_REUSE_PORT": "true",
        "grpc_proxy": "http://proxy:3128",
    }
    plain: dict[str, str] = {}
    announce_to_tensorflow(plain, {}, has_tensorflow_servers=False)
    assert plain == {"TF_GRPC_REUSE_PORT": "true", "grpc_proxy": ""}


@pytest.mark.parametrize(
    ("mine", "before"),
    [
        ({}, ""),
        ({"no_proxy": ".example"}, ".example,"),
        ({"no_proxy": ".example", "no_grpc_proxy": "d"}, "d,"),
    ],
)
def test_nodes_are_reached_without_a_proxy_and_other_hosts_as_before(mine, before):
    cluster = {"chief": ["a:1"], "worker": ["c:3", "[fd00::2]:4", "a:5"]}
    environment = {**mine, "https_proxy": "http://proxy:3128"}
    announce_to_tensorflow(environment, cluster, has_tensorflow_servers=False)
    assert environment.pop("no_grpc_proxy") == f"{before}a,c,fd00::2"
    assert "grpc_proxy" not in environment
    assert environment.get("no_proxy") == mine.get("no_proxy")


@pytest.mark.parametrize("job", ["ps", "localhost", None])
def test_a_strategy_shows_in_tensorflows_devices(monkeypatch, job):
    device = SimpleNamespace(name=f"/job:{job}/replica:0/task:0/device:CPU:0")
    config = SimpleNamespace(list_logical_devices=lambda: [device])
    module = SimpleNamespace(config=config) if job else None
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    assert is_connected_to_servers() == (job == "ps")


@pytest.fixture
def strategies(tmp_path, monkeypatch):
    """Makes a module of TensorFlow's shape out of a source, and lists the notices of it."""
    name = "tfos_fake_strategies"
    monkeypatch.setattr(native, "_STRATEGY", name)
    monkeypatch.syspath_prepend(str(tmp_path))
    told: list[bool] = []

    def imported(source):
        (tmp_path / f"{name}.py").write_text(source)
        native.after_strategy(lambda: told.append(True))
        return importlib.import_module(name), told

    yield imported
    del sys.modules[name]


def test_a_strategy_that_is_built_is_told_and_one_that_raises_is_not(strategies):
    module, told = strategies(
        "class ParameterServerStrategyV2:\n"
        "    def __init__(self, resolver, variable_partitioner=None):\n"
        "        self.made = resolver.cluster, variable_partitioner\n"
    )
    with pytest.raises(AttributeError):
        module.ParameterServerStrategyV2(None)
    assert told == []
    resolver = SimpleNamespace(cluster="c")
    assert module.ParameterServerStrategyV2(resolver, variable_partitioner=2).made == ("c", 2)
    assert told == [True]


def test_a_tensorflow_without_that_strategy_is_not_waited_for(strategies):
    _, told = strategies("")
    assert told == [True]
