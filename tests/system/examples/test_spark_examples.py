"""Every example runs as its docstring says, by spark-submit; those that are long on executors.

The gate's one runs in Spark's threads: test_wheel has the README's program on three executors.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.spark_submit import EXAMPLES, ROOT, number, separate, submit

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.timeout(600)]  # of two programs


def test_digits_fed_by_spark_are_learned_and_the_model_predicts(tmp_path):
    flags = ("--tensorboard", "--epochs", "5")
    output = submit(EXAMPLES / "mnist_spark.py", *flags, master="local[4]", cwd=tmp_path)
    assert number(output, r"test accuracy: (0\.\d+)") > 0.9
    assert re.search(r"TensorBoard: http://\S+:\d+", output), output[-4000:]
    assert (tmp_path / "mnist_export" / "model.keras").is_file()
    assert list((tmp_path / "mnist_model" / "logs").rglob("*tfevents*"))

    to = ("--cluster_size", "1", "--output", str(tmp_path / "predictions"))
    output = submit(EXAMPLES / "mnist_inference.py", *to, master="local[2]", cwd=tmp_path)
    assert number(output, r"predictions: (\d+)") == 1000
    assert number(output, r"right: ([01]\.\d+)") > 0.9
    written = [
        line
        for part in sorted((tmp_path / "predictions").glob("part-*"))
        for line in part.read_text().split()
    ]
    assert len(written) == 1000
    assert set(written) <= set("0123456789")


@pytest.mark.long
def test_digits_that_the_workers_read_are_learned(tmp_path):
    output = submit(EXAMPLES / "mnist_tf.py", "--epochs", "5", cwd=tmp_path)
    assert number(output, r"test accuracy: (0\.\d+)") > 0.9
    assert (tmp_path / "mnist_export" / "model.keras").is_file()


@pytest.mark.long
def test_digits_in_record_files_are_learned(tmp_path):
    written = tmp_path / "digits"
    (written / "part-00007.parquet").parent.mkdir()
    (written / "part-00007.parquet").write_bytes(b"of a run with more files")
    (written / "notes.txt").write_text("not ours")
    flags = ("--output", str(written), "--num_files", "3")
    output = submit(EXAMPLES / "mnist_data_setup.py", *flags, master=separate(1), cwd=tmp_path)
    assert number(output, r"written: (\d+)") == 4000
    names = sorted(path.name for path in written.iterdir())
    assert names == ["notes.txt", *(f"part-0000{n}.tfrecord" for n in range(3))]
    (written / "notes.txt").unlink()
    flags = ("--images_labels", str(written), "--epochs", "5")
    output = submit(EXAMPLES / "mnist_tf_ds.py", *flags, cwd=tmp_path)
    assert number(output, r"test accuracy: (0\.\d+)") > 0.9


@pytest.mark.long
def test_digits_in_parquet_files_are_learned(tmp_path):
    output = submit(
        EXAMPLES / "mnist_tf_ds.py", "--format", "parquet", "--epochs", "5", cwd=tmp_path
    )
    assert number(output, r"test accuracy: (0\.\d+)") > 0.9
    assert len(list((tmp_path / "mnist_model" / "digits").glob("part-*.parquet"))) == 4


@pytest.mark.long
def test_digits_in_a_dataframe_are_learned(tmp_path):
    output = submit(EXAMPLES / "mnist_dataframe.py", "--epochs", "5", cwd=tmp_path)
    assert number(output, r"epoch 5: val_accuracy (0\.\d+)") > 0.85
    assert number(output, r"test accuracy: (0\.\d+)") > 0.9
    assert (tmp_path / "mnist_export" / "model.keras").is_file()


@pytest.mark.long
def test_digits_that_arrive_as_files_are_learned_batch_by_batch(tmp_path):
    program = EXAMPLES / "mnist_streaming.py"
    write = [sys.executable, str(program), "--write", "in", "--num_files", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(write, check=True, timeout=120, cwd=tmp_path, env=environment)
    output = submit(program, "--images_labels", "in", "--batches", "5", cwd=tmp_path)
    assert number(output, r"stopped after batch \d+: (\d+) rows trained") == 4000
    assert number(output, r"test accuracy: (0\.\d+)") > 0.5  # each digit was seen once
    assert (tmp_path / "mnist_model" / "checkpoints").is_dir()


@pytest.mark.long
def test_late_flights_are_predicted_from_texts_numbers_and_holes(tmp_path):
    flags = ("--flights", "20000", "--epochs", "3", "--batch_size", "128", "--cluster_size", "2")
    program = ROOT / "examples" / "flights" / "flights_dataframe.py"
    output = submit(program, *flags, master="local[4]", cwd=tmp_path)
    left_out = number(output, r"flights: 20000, of which (\d+) never arrived")
    training = number(output, r"flights to train on: (\d+)")
    assert left_out + training + number(output, r"to test with: (\d+)") == 20_000
    assert number(output, r"rows trained: (\d+) in 3 epochs") == 3 * training
    assert number(output, r"test AUC: (0\.\d+)") > 0.6


@pytest.mark.long
def test_delays_are_forecast_by_one_forecaster_per_plane(tmp_path):
    program = ROOT / "examples" / "timeseries" / "delays.py"
    flags = ("--planes", "300", "--slots", "2")
    output = submit(program, *flags, master="local[2]", cwd=tmp_path)
    assert number(output, r"windows: \d+, of planes: (\d+)") > 200
    assert number(output, r"forecasters: (\d+)") > 200
    error = number(output, r"mean absolute error: (\d+\.\d+)")
    assert error < number(output, r"of the window's mean: (\d+\.\d+)")


@pytest.mark.long
def test_delays_are_forecast_by_one_network(tmp_path):
    program = ROOT / "examples" / "timeseries" / "delays.py"
    flags = ("--planes", "1000", "--one_for_all")
    output = submit(program, *flags, cwd=tmp_path)
    error = number(output, r"mean absolute error: (\d+\.\d+)")
    assert error < number(output, r"of the window's mean: (\d+\.\d+)")


@pytest.mark.long
def test_late_flights_are_predicted_from_parquet_that_workers_read(tmp_path):
    flags = ("--flights", "8000", "--epochs", "4", "--batch_size", "64")
    program = ROOT / "examples" / "flights" / "flights_parquet.py"
    output = submit(program, *flags, master="local[4]", cwd=tmp_path)
    assert number(output, r"test AUC: (0\.\d+)") > 0.6
