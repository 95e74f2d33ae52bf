"""Training from files in a real HDFS goes on when a DataNode is killed while they are read."""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feeding.filesystem.registry import filesystem_for
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from scripts.local_hdfs.cluster import LocalHdfs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
ROWS = 24_000
"""24 MB: two blocks, of which each DataNode may be asked first."""


def rows() -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(1)
    x = dice.standard_normal((ROWS, 256), np.float32)
    return x, x[:, :8].sum(axis=1, keepdims=True)


def parquet_file() -> bytes:
    x, y = rows()
    columns = {"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 256), "y": y.tolist()}
    table = pa.table(columns)
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=4000, compression="none", use_dictionary=False)
    return file.getvalue()


def tfrecord_file() -> bytes:
    file = io.BytesIO()
    records = RecordWriter(file)
    for x, y in zip(*rows(), strict=True):
        records.write(encode_example({"x": x, "y": y}))
    return file.getvalue()


def said(worker: subprocess.Popen[str]) -> str:
    """Return the worker's next word, or fail with what it wrote."""
    assert worker.stdout is not None
    word = worker.stdout.readline().strip()
    assert word, worker.communicate()[1][-4000:]
    return word


def go_on(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("go on\n")
    worker.stdin.flush()


@pytest.mark.long
@pytest.mark.fault("F40")
def test_training_goes_on_when_a_datanode_is_killed(hdfs: LocalHdfs):
    directory = f"{hdfs.url}/{secrets.token_hex(4)}"
    for file_format, data in (("parquet", parquet_file()), ("tfrecord", tfrecord_file())):
        filesystem_for(directory).write(f"{directory}/{file_format}/part-0", data)
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs.trains_from_files", directory, str(ROWS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"},
    )
    is_killed = False
    try:
        assert said(worker) == "reading"
        hdfs.kill_datanode(0)
        is_killed = True
        go_on(worker)
        assert said(worker) == "trained"
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.communicate()
        if is_killed:
            hdfs.start_datanode(0)
