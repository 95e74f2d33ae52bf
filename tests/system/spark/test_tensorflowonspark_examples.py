"""The programs of examples/tensorflowonspark, each run as a script in one Spark application."""

from __future__ import annotations

import contextlib
import io
import runpy
import shutil
import sys
import threading
from pathlib import Path

import pytest

from tests.support.spark_masters import REPO
from tests.support.spark_submit import number

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
PROGRAMS = REPO / "examples" / "tensorflowonspark"


@pytest.fixture(scope="module")
def submit(spark, tmp_path_factory):
    """Run a program as __main__ on the SparkContext that is there; returns what it printed."""
    here = tmp_path_factory.mktemp("programs")
    package = REPO / "compat" / "tensorflowonspark"
    zipped = shutil.make_archive(str(here / "forwarding"), "zip", package, "tensorflowonspark")
    spark.addPyFile(zipped)  # executors have what the driver finds by sys.path

    def run(name: str, *flags: str) -> str:
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", [name, *flags])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(PROGRAMS / name), run_name="__main__")
        assert not ended.value.code, printed.getvalue()
        return printed.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.syspath_prepend(str(PROGRAMS))
        patch.syspath_prepend(str(package))
        assert "test: 1000 digits" in run("mnist_data_setup.py", "--output", "data")
        yield run
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorflowonspark"]:
        del sys.modules[name]
    del sys.modules["shared"]


@pytest.mark.long
def test_an_rdd_is_fed_and_processes_label_files(submit):
    output = submit("mnist_spark.py", "--images_labels", "data/csv/train", "--epochs", "3")
    assert number(output, r"accuracy while training: (0\.\d+)") > 0.7
    flags = ("--images_labels", "data/tfr/test", "--output", "predictions")
    output = submit("mnist_inference.py", *flags)
    assert number(output, r"predictions: (\d+)") == 1000
    assert number(output, r"right: (0\.\d+)") > 0.8
    names = sorted(path.name for path in Path("predictions").iterdir())
    assert names == ["part-00000", "part-00001"]


@pytest.mark.long
@pytest.mark.parametrize(("program", "data"), [("tf", "csv"), ("tf_ds", "tfr")])
def test_workers_read_their_own_files(submit, program, data):
    flags = ("--images_labels", f"data/{data}/train", "--cluster_size", "3")
    output = submit(f"mnist_{program}.py", *flags)
    assert number(output, r"accuracy while training: (0\.\d+)") > 0.8


@pytest.mark.long
def test_a_pipeline_trains_and_labels_a_dataframe(submit):
    flags = ("--images_labels", "data/tfr/train", "--test", "data/tfr/test", "--epochs", "1")
    output = submit("mnist_pipeline.py", *flags, "--output", "labelled")
    assert number(output, r"predictions: (\d+)") == 1000


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:DStream is deprecated:FutureWarning")
def test_files_that_arrive_are_trained_until_a_worker_has_enough(submit):
    arriving = Path("arriving").absolute()
    arriving.mkdir()
    lines = Path("data/csv/train/part-00000").read_text()
    over = threading.Event()
    writer = threading.Thread(target=_arrive, args=(arriving, lines, over))
    writer.start()
    try:
        output = submit("mnist_streaming.py", "--images_labels", "arriving", "--stop_after", "2500")
    finally:
        over.set()
        writer.join()
    assert number(output, r"rows trained: (\d+)") >= 2500


def _arrive(directory: Path, lines: str, over: threading.Event) -> None:
    count = 0
    while not over.wait(1):
        hidden = directory / f".{count}"
        hidden.write_text(lines)
        hidden.rename(directory / f"part-{count}")
        count += 1


@pytest.mark.long
def test_a_residual_network_learns_with_flags_of_its_own(submit):
    flags = ("--cluster_size", "3", "--data_dir", str(Path("data/csv").absolute()))
    output = submit("resnet.py", *flags, "--train_epochs", "10")
    assert number(output, r"test accuracy: (0\.\d+)") > 0.7


@pytest.mark.long
def test_a_unet_tells_digits_apart(submit):
    output = submit("segmentation.py", "--images_labels", "data/csv", "--epochs", "6")
    assert number(output, r"of the right digit: (0\.\d+)") > 0.6
