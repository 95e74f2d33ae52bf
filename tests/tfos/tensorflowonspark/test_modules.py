"""TensorFlowOnSpark's modules without a cluster: names, feeds over queues, refusals."""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import time
import types
from importlib import metadata
from typing import Any

import pytest

import tfos
from tests.support.fake_gpus import FakeGpus
from tests.support.sources import ROOT
from tfos.errors import SettingsError, UnsupportedError
from tfos.native import legacy_keras
from tfos.tensorflowonspark import (
    TFManager,
    TFNode,
    TFSparkNode,
    gpu_info,
    marker,
    pipeline,
    reservation,
    util,
)
from tfos.tensorflowonspark.namespace import Namespace

MODULES = (
    *("TFCluster", "TFManager", "TFNode", "TFParallel", "TFSparkNode", "compat", "dfutil"),
    *("gpu_info", "marker", "reservation", "util"),
)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_of_the_old_package_is_ours(forwarding, name):
    module = importlib.import_module(f"tensorflowonspark.{name}")
    home = "tfos" if name == "dfutil" else "tfos.tensorflowonspark"
    assert module is importlib.import_module(f"{home}.{name}")
    assert getattr(importlib.import_module("tensorflowonspark"), name) is module


def test_all_of_ours_are_forwarded():
    own = {"estimator_stand_in", "namespace", "params", "queue_feed"}
    ours = {path.stem for path in (ROOT / "tfos" / "tensorflowonspark").glob("*.py")} - own
    package = ROOT / "compat" / "tensorflowonspark" / "tensorflowonspark"
    assert {path.stem for path in package.glob("*.py")} == ours | {"dfutil"}


def test_the_original_beside_it_is_refused_by_name_and_version(forwarding, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "2.2.5")
    with pytest.raises(ImportError, match=r"TensorFlowOnSpark 2\.2\.5 is installed beside"):
        importlib.import_module("tensorflowonspark")


def test_an_export_directory_has_a_name_of_its_own_without_tensorflow_estimator():
    module = importlib.import_module("tensorflow_estimator.python.estimator.export.export_lib")
    names = [module.get_timestamped_export_dir("hdfs://nn/models/") for _ in range(2)]
    base, numbers = zip(*(name.rsplit("/", 1) for name in names), strict=True)
    assert set(base) == {"hdfs://nn/models"}
    assert abs(int(numbers[0]) - time.time()) < 60
    assert int(numbers[0]) < int(numbers[1])
    with pytest.raises(ImportError):
        importlib.import_module("tensorflow_estimator.python.estimator.run_config")


def test_a_tensorflow_estimator_that_is_installed_comes_first(tmp_path, monkeypatch):
    for name in [each for each in sys.modules if each.startswith("tensorflow_estimator")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "tensorflow_estimator.py").write_text("is_theirs = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("tensorflow_estimator").is_theirs
    del sys.modules["tensorflow_estimator"]


def test_the_old_package_chooses_keras_2_where_it_is_installed(forwarding, monkeypatch, tmp_path):
    (tmp_path / "tf_keras.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.delenv(legacy_keras.VARIABLE, raising=False)
    importlib.import_module("tensorflowonspark")
    assert os.environ[legacy_keras.VARIABLE] == "1"


def test_the_cluster_module_has_the_calls_of_the_class(forwarding):
    module = importlib.import_module("tensorflowonspark.TFCluster")
    assert module.run == tfos.TFCluster.run
    assert module.InputMode is tfos.InputMode
    assert module.TFCluster is tfos.TFCluster


@pytest.mark.parametrize("name", ["TFNode", "TFParallel", "dfutil", "gpu_info", "compat"])
def test_tfos_offers_the_modules_by_name(name):
    assert isinstance(getattr(tfos, name), types.ModuleType)


@pytest.mark.parametrize(
    ("path", "on_file", "on_hdfs"),
    [
        ("hdfs://nn/a", "hdfs://nn/a", "hdfs://nn/a"),
        ("s3a://b/a", "s3a://b/a", "s3a://b/a"),
        ("/a/b", "file:///a/b", "hdfs:///a/b"),
        ("a/b", "file:///work/a/b", "hdfs:///user/{user}/a/b"),
    ],
)
def test_paths_are_completed_as_ever(path, on_file, on_hdfs):
    import getpass

    for default_fs, expected in (("file://", on_file), ("hdfs://", on_hdfs)):
        ctx = types.SimpleNamespace(defaultFS=default_fs, working_dir="/work")
        assert TFNode.hdfs_path(ctx, path) == expected.format(user=getpass.getuser())


def manager(*rows):
    made = TFManager.start(b"abc", ["input", "output"], "local")
    queue: Any = made.get_queue("input")
    for row in rows:
        queue.put(row)
    return made


def test_a_feed_over_queues_ends_with_none():
    feed = TFNode.DataFeed(manager(*range(10), None))
    assert feed.next_batch(2) == [0, 1]
    assert feed.next_batch(4) == [2, 3, 4, 5]
    assert feed.next_batch(4) == [6, 7, 8, 9]
    assert not feed.should_stop()
    assert feed.next_batch(4) == []
    assert feed.should_stop()


def test_only_batches_of_inference_end_with_a_partition():
    rows = (1, 2, marker.EndPartition(), 3, None)
    assert TFNode.DataFeed(manager(*rows)).next_batch(4) == [1, 2, 3]
    feed = TFNode.DataFeed(manager(*rows), train_mode=False)
    assert (feed.next_batch(4), feed.next_batch(4)) == ([1, 2], [3])


def test_columns_are_mapped_in_the_order_of_their_names():
    feed = TFNode.DataFeed(manager((1, 2), (3, 4), None), input_mapping={"b": "y", "a": "x"})
    assert feed.next_batch(5) == {"x": [1, 3], "y": [2, 4]}
    with pytest.raises(SettingsError, match=r"has the columns \['a', 'b'\] under one name, 'x'"):
        TFNode.DataFeed(manager(), input_mapping={"b": "x", "a": "x"})


def test_columns_may_share_a_name_that_train_fn_does_not_read():
    """Its DataFeed may have no mapping, as in TensorFlowOnSpark's own mnist_pipeline.py."""
    dataset = types.SimpleNamespace(columns=["a", "b", "c"])
    assert pipeline._mapped_columns({"b": "x", "a": "x"}, dataset) == ["a", "b"]


def test_results_and_the_functions_of_the_first_release():
    made = manager(1, 2, None)
    results: Any = made.get_queue("output")
    queue: Any = made.get_queue("input")
    assert TFNode.next_batch(made, 1) == [1]
    TFNode.batch_results(made, [10])
    assert results.get() == 10
    TFNode.terminate(made)
    assert queue.empty()
    assert TFNode.next_batch(made, 1) == []


def test_a_manager_keeps_values_and_refuses_what_it_has_not():
    made = manager()
    made.set("key", 1)
    assert (made.get("key"), made.get("state"), made.get("other")) == (1, "running", None)
    assert made.get_queue("other") is None
    with pytest.raises(SettingsError, match="'other' is no queue"):
        TFNode.DataFeed(made, qname_in="other")
    with pytest.raises(SettingsError, match="mode must be one of"):
        TFManager.start(b"", [], "far")
    with pytest.raises(SettingsError, match="no queue for results"):
        TFManager.start(b"", ["input"]).data_feed().batch_results([1])
    with pytest.raises(UnsupportedError, match=r"ctx\.get_data_feed"):
        TFManager.connect(("h", 1), b"")


def test_a_context_of_ones_own_has_the_old_fields():
    with socket.socket() as held:
        ctx = TFSparkNode.TFNodeContext(
            3, "worker", 1, {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]},
            "file://", "/work", manager(7, None), held,
        )  # fmt: skip
        assert (ctx.worker_num, ctx.executor_id, ctx.job_name, ctx.task_index) == (
            3,
            3,
            "worker",
            1,
        )
        assert ctx.num_workers == 3
        assert ctx.absolute_path("a") == "file:///work/a"
        assert ctx.get_data_feed().next_batch(2) == [7]
        TFNode.release_port(ctx)
        ctx.release_port()
        assert ctx.tmp_socket is None
        assert held.fileno() == -1
    with pytest.raises(UnsupportedError, match="MultiWorkerMirroredStrategy"):
        TFNode.start_cluster_server(ctx, 1, rdma=True)
    with pytest.raises(UnsupportedError, match=r"ctx\.export\(model, '/m'\)"):
        TFNode.export_saved_model(None, "/m", ["serve"], {})
    assert TFSparkNode.TFNodeContext().num_workers == 0


def test_a_namespace_takes_what_programs_have():
    values = {"text": "a", "map": {"b": 1}}
    made = Namespace(values)
    assert (made.text, made.map, "text" in made, "other" in made) == ("a", {"b": 1}, True, False)
    assert made == Namespace(made) == Namespace(argparse.Namespace(**values))
    assert made != Namespace({"text": "b"})
    assert sorted(made) == ["map", "text"]
    for wrong in ("text", 3, None):
        with pytest.raises(SettingsError, match="arguments must be a dict"):
            Namespace(wrong)


def test_a_namespace_of_a_list_is_that_list_to_a_parser():
    argv = ["prog", "--x", "3"]
    made = Namespace(argv)
    parser = argparse.ArgumentParser()
    parser.add_argument("--x")
    assert parser.parse_args(list(made)[1:]).x == "3"
    assert made.argv == list(made) == list(Namespace(made)) == argv
    assert made == argv == made == Namespace(argv)
    assert made != ["prog"]
    assert made != Namespace({"x": "3"})
    assert repr(made) == repr(argv)


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_info, "RETRY_S", 0.0)
    return FakeGpus(tmp_path, monkeypatch)


def test_free_gpus_are_those_that_nobody_computes_on(gpus):
    assert not gpu_info.is_gpu_available()
    with pytest.raises(UnsupportedError, match="this host has no nvidia-smi"):
        gpu_info.get_gpus(1)
    gpus.have(4, (1, 1))
    assert gpu_info.is_gpu_available()
    assert gpu_info.get_gpus(2) == "0,2"
    assert gpu_info.get_gpus(1, 1, format=gpu_info.AS_LIST) == ["2"]
    with pytest.raises(UnsupportedError, match=r"4 free GPU\(s\) asked for, and 3 of 4 are free"):
        gpu_info.get_gpus(4)
    with pytest.raises(SettingsError, match="num_gpu must be >= 1"):
        gpu_info.get_gpus(0)


def test_workers_of_one_host_share_its_gpus_without_a_gap():
    free = ["0", "1", "2"]
    assert gpu_info.choose(free, 2, -1) == ["0", "1"]
    assert gpu_info.choose(free, 2, 1) == ["2", "0"]


def test_a_single_node_has_no_cluster_and_gpus_of_its_own(gpus, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    util.single_node_env()
    assert "TF_CONFIG" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    gpus.have(3)
    util.single_node_env(1, 2, ["10.0.0.1", "10.0.0.10", "10.0.0.1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    util.single_node_env(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("made", [list, Namespace])
def test_a_list_of_arguments_becomes_those_of_the_process(made, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(sys, "argv", ["other"])
    pipeline.single_node_env(Namespace({"num_gpus": 0}))
    assert sys.argv == ["other"]
    pipeline.single_node_env(made(["prog", "--x"]))
    assert sys.argv == ["prog", "--x"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_the_small_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"use ctx\.executor_id"):
        util.read_executor_id()
    util.write_executor_id(4)
    assert util.read_executor_id() == 4
    assert util.find_in_path(f"/nowhere:{tmp_path}", "executor_id") == f"{tmp_path}/executor_id"
    assert util.find_in_path("/nowhere", "x") is False
    assert socket.inet_aton(util.get_ip_address())


def test_reservations_are_counted_and_what_needs_a_cluster_is_refused():
    counted = reservation.Reservations(2)
    counted.add("a")
    assert (counted.done(), counted.remaining(), counted.get()) == (False, 1, ["a"])
    counted.add("b")
    assert counted.done()
    client = reservation.Client(("h", "1"))
    for call in (lambda: client.register({}), client.get_reservations, client.await_reservations):
        with pytest.raises(UnsupportedError, match="nodes register by themselves"):
            call()
    client.close()
    with pytest.raises(UnsupportedError, match=r"TFCluster\.run\(\) opens"):
        reservation.Server(2)
    with pytest.raises(SettingsError, match=r"must be \(host, port\)"):
        reservation.Client("nowhere")
