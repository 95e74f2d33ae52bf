"""A server of its own process: small before parameters, and without Spark or TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from ps.client import PSClient
from ps.params import Adam, GroupSpec, Manifest, ParamSpec
from rpc.handshake import Identity, Role
from tests.ps_processes import CREDENTIALS, server_processes

pytestmark = pytest.mark.slow

MAX_RSS_BYTES = 220 << 20


def test_a_serving_process_is_small_and_knows_neither_spark_nor_tensorflow(tmp_path: Path):
    group = GroupSpec(
        name="trainable", dtype="float32", rule=Adam(), params=(ParamSpec("w", (1000,)),)
    )
    worker = Identity(Role.WORKER, 0, 0)
    with server_processes(tmp_path, 1, num_workers=1) as (server,):
        client = PSClient([server.endpoint], CREDENTIALS, worker, num_workers=1)
        try:
            client.seed(Manifest(groups=(group,)), {"trainable": np.zeros(1000, np.float32)})
            process = psutil.Process(server.process.pid)
            assert process.memory_info().rss < MAX_RSS_BYTES
            loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
            assert "numba" in loaded or "llvmlite" in loaded
            assert "tensorflow" not in loaded
            assert "pyspark" not in loaded
        finally:
            client.close()
