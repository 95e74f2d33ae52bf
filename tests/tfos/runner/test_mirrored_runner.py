"""MirroredStrategyRunner: what it refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.runner.mirrored_runner import MirroredStrategyRunner


class FakeContext:
    """A SparkContext whose tasks get these GPUs."""

    def __init__(self, amount: str | None) -> None:
        self.amount = amount

    def getConf(self) -> Any:
        return self

    def get(self, name: str) -> str | None:
        assert name == "spark.task.resource.fpga.amount"
        return self.amount


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_slots": 0}, "num_slots must be a whole number from 1, got 0"),
        ({"num_slots": True}, "num_slots must be a whole number from 1, got True"),
        ({"num_slots": 2, "use_gpu": 1}, "use_gpu must be True or False, got 1"),
        ({"num_slots": 2, "use_custom_strategy": 1}, "use_custom_strategy must be True or False"),
        ({"num_slots": 2, "local_mode": True}, r"got num_slots=2: use num_slots=1.*local\[N\]"),
        ({"num_slots": 1, "gpu_resource_name": ""}, "gpu_resource must be Spark's name"),
        ({"num_slots": 1, "config": {}}, r"config must be a tfos.ClusterConfig or None, got \{\}"),
        (
            {"num_slots": 1, "config": ClusterConfig(gpu_resource="v100")},
            r"gpu_resource='v100'\) with use_gpu=True and gpu_resource_name='gpu', which say 'gpu'",
        ),
        (
            {"num_slots": 1, "config": ClusterConfig(gpu_resource=None)},
            r"gpu_resource=None\) with use_gpu=True",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_next_step(arguments, text):
    with pytest.raises(SettingsError, match=text):
        MirroredStrategyRunner(**arguments)


def test_a_config_that_says_the_same_of_the_gpus_is_taken():
    for given in (
        {"gpu_resource_name": "v100", "config": ClusterConfig(gpu_resource="v100")},
        {"use_gpu": False, "config": ClusterConfig(gpu_resource=None)},
        {"use_gpu": False, "config": ClusterConfig()},
    ):
        MirroredStrategyRunner(num_slots=1, **given)  # type: ignore[arg-type]  # mypy joins them


@pytest.mark.parametrize("amount", [None, "0", "much"])
def test_gpus_that_spark_does_not_give_are_refused_before_a_node_starts(amount):
    sc: Any = FakeContext(amount)
    runner = MirroredStrategyRunner(num_slots=2, gpu_resource_name="fpga", sc=sc)
    text = rf"spark.task.resource.fpga.amount is {amount!r}.*use_gpu=False"
    with pytest.raises(SettingsError, match=text):
        runner.run(print)


@pytest.fixture
def asked(monkeypatch):
    """Numbers of tasks of runs, none of which begins."""
    counts: list[int] = []

    def run_work(_main_fun, _work, count, *_, **__):
        counts.append(count)
        return [None]

    monkeypatch.setattr("tfos.runner.mirrored_runner.run_work", run_work)
    return counts


def test_several_gpus_of_a_task_are_told_where_fit_trains_on_one(asked):
    """A train_fn may use the others by tf.device."""
    sc: Any = FakeContext("4")
    runner = MirroredStrategyRunner(num_slots=8, gpu_resource_name="fpga", sc=sc)
    text = r"spark.task.resource.fpga.amount is 4, and num_slots=8: fit trains on one GPU.* to 1;"
    with pytest.warns(UserWarning, match=text):
        runner.run(print)
    assert asked == [8]


@pytest.mark.parametrize(
    ("amount", "num_slots", "num_tasks"), [("4", 8, 2), ("1", 8, 8), ("0.5", 8, 8), ("4", 6, None)]
)
def test_slots_of_a_strategy_of_its_own_count_the_gpus_of_all_tasks(
    amount, num_slots, num_tasks, asked
):
    options: dict[str, Any] = {"gpu_resource_name": "fpga", "sc": FakeContext(amount)}
    runner = MirroredStrategyRunner(num_slots=num_slots, use_custom_strategy=True, **options)
    if num_tasks is None:
        with pytest.raises(SettingsError, match=r"is 4, and num_slots=6, .*Give a multiple, or"):
            runner.run(print)
    else:
        runner.run(print)
    assert asked == ([] if num_tasks is None else [num_tasks])


@pytest.mark.slow
def test_local_mode_runs_one_process_beside_the_driver(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for use_gpu, seen in ((True, "3"), (False, "-1")):
        runner = MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=use_gpu)
        assert runner.run(os_environ_of, name="CUDA_VISIBLE_DEVICES") == seen


def os_environ_of(name: str) -> str:
    import os

    return os.environ[name]


@pytest.mark.slow
def test_local_mode_calls_a_function_with_a_strategy_of_its_own_as_it_is():
    options: dict[str, Any] = {"local_mode": True, "use_gpu": False, "use_custom_strategy": True}
    runner = MirroredStrategyRunner(num_slots=1, **options)
    assert runner.run(os_environ_of, name="CUDA_VISIBLE_DEVICES") == "-1"
