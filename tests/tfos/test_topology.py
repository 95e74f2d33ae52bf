from __future__ import annotations

import pytest

from tfos.errors import SettingsError, UnsupportedError
from tfos.topology import plan


def _names(nodes) -> list[tuple[str, int]]:
    return [(node.name, node.rank) for node in nodes]


def test_servers_come_first_and_worker_0_is_the_chief():
    made = plan(4, 1)
    assert _names(made.nodes) == [("ps:0", 0), ("worker:0", 0), ("worker:1", 1), ("worker:2", 2)]
    assert [node.is_chief for node in made.workers] == [True, False, False]
    assert str(made) == "1 ps + 3 workers"


@pytest.mark.parametrize("name", ["chief", "master"])
def test_a_named_chief_has_rank_0_and_workers_count_from_0(name):
    made = plan(4, 1, master_node=name)
    assert _names(made.workers) == [(f"{name}:0", 0), ("worker:0", 1), ("worker:1", 2)]
    assert made.num_workers == 3
    assert [node.is_chief for node in made.workers] == [True, False, False]


def test_one_node_is_one_worker():
    assert _names(plan(1, 0).nodes) == [("worker:0", 0)]


@pytest.mark.parametrize(
    ("cluster_size", "num_ps", "text"),
    [
        (3, 3, "num_ps=3 leaves no worker: cluster_size=3. Use num_ps <= 2."),
        (3, 5, "num_ps=5 leaves no worker: cluster_size=3. Use num_ps <= 2."),
        (1, 1, "num_ps=1 leaves no worker: cluster_size=1. Use cluster_size >= 2"),
        (0, 0, "cluster_size must be >= 1, got 0."),
        (-1, 0, "cluster_size must be >= 1, got -1."),
        (3, -1, "num_ps must be >= 0, got -1."),
        ("3", 1, "cluster_size must be an int >= 1, got '3' (str)."),
        (3, 1.5, "num_ps must be an int >= 0, got 1.5 (float)."),
        (True, 0, "cluster_size must be an int >= 1, got True (bool)."),
    ],
)
def test_impossible_sizes_say_both_values_and_the_next_step(cluster_size, num_ps, text):
    with pytest.raises(SettingsError) as caught:
        plan(cluster_size, num_ps)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_chief_role_is_refused():
    with pytest.raises(UnsupportedError, match="'boss' is not a role"):
        plan(3, 1, master_node="boss")


def test_tensorflows_servers_are_all_nodes_but_the_chief():
    made = plan(4, 1, ps="tensorflow")
    assert _names(made.nodes) == [("ps:0", 0), ("worker:0", 1), ("worker:1", 2), ("chief:0", 0)]
    assert [node.name for node in made.nodes if node.runs_main_fun] == ["chief:0"]
    assert (made.num_ps, made.num_workers, made.servers) == (0, 1, ())
    assert not any(node.is_ps for node in made.nodes)
    assert str(made) == "1 ps + 2 workers of TensorFlow + 1 chief"


def test_without_parameter_servers_tensorflow_serves_nowhere():
    made = plan(2, 0, ps="tensorflow")
    assert (made.nodes, made.is_mirrored) == (plan(2, 0).nodes, True)
    assert not plan(2, 0).is_mirrored


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ps": "tf"}, "ps must be 'tfos' or 'tensorflow', got 'tf'"),
        ({"ps": "tensorflow", "num_ps": 2}, "num_ps=2 .* no worker .*cluster_size=3. Use .* >= 4"),
        ({"ps": "tensorflow", "master_node": "master"}, "master_node='master' with ps='tensorf"),
    ],
)
def test_what_tensorflows_strategy_cannot_have_is_refused(arguments, text):
    with pytest.raises((SettingsError, UnsupportedError), match=text):
        plan(3, **{"num_ps": 1, **arguments})


def test_the_evaluator_stands_beside_the_workers():
    made = plan(4, 1, eval_node=True, master_node="chief")
    names = [("ps:0", 0), ("chief:0", 0), ("worker:0", 1), ("evaluator:0", 2)]
    assert _names(made.nodes) == names
    assert made.num_workers == 2
    assert [node.name for node in made.nodes if node.is_evaluator] == ["evaluator:0"]
    assert str(made) == "1 ps + 2 workers + 1 evaluator"


@pytest.mark.parametrize(
    ("cluster_size", "num_ps", "text"),
    [
        (
            2,
            1,
            "num_ps=1 with eval_node=True leaves no worker: cluster_size=2. Use cluster_size >= ",
        ),
        (
            1,
            0,
            "num_ps=0 with eval_node=True leaves no worker: cluster_size=1. Use cluster_size >= ",
        ),
    ],
)
def test_an_evaluator_takes_one_of_the_nodes(cluster_size, num_ps, text):
    with pytest.raises(SettingsError) as caught:
        plan(cluster_size, num_ps, eval_node=True)
    assert f"{text}{num_ps + 2}, of which one node evaluates" in str(caught.value)


def test_an_evaluator_of_tensorflows_strategies_is_refused():
    with pytest.raises(UnsupportedError, match="eval_node=True with ps='tensorflow'"):
        plan(4, 1, ps="tensorflow", eval_node=True)
    with pytest.raises(SettingsError, match="eval_node must be True or False, got 1"):
        plan(4, 1, eval_node=1)  # type: ignore[arg-type]


def test_servers_beside_the_driver_take_no_slots():
    made = plan(4, 2, driver_ps_nodes=True)
    assert (len(made.nodes), len(made.on_executors)) == (4, 2)
    assert len(plan(4, 2).on_executors) == 4
    assert str(made) == "2 ps beside the driver + 2 workers"


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"num_ps": 0, "driver_ps_nodes": True}, SettingsError, "num_ps=0 asks for none"),
        (
            {"num_ps": 1, "driver_ps_nodes": "yes"},
            SettingsError,
            "must be True or False, got 'yes'",
        ),
        (
            {"num_ps": 1, "driver_ps_nodes": True, "ps": "tensorflow"},
            UnsupportedError,
            "driver_ps_nodes=True with ps='tensorflow'",
        ),
    ],
)
def test_servers_beside_the_driver_that_make_no_sense_are_refused(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        plan(3, **settings)
