"""A server of its own process: small before parameters, and it says what it does to who may ask."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps.client.client import PSClient
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from rpc.auth.handshake import Identity, Role
from tests.support.ps_processes import CLUSTER_ID, CREDENTIALS, ServerProcess, server_processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

MAX_RSS_BYTES = 220 << 20
GROUP = GroupSpec(name="trainable", dtype="float32", rule=Adam(), params=(ParamSpec("w", (1000,)),))
TOKEN = "reader-0123456789"


def scrape(server: ServerProcess, token: str) -> dict[tuple[str, ...], float]:
    """What the page has, by name and values of the labels."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.announced['metrics_port']}/metrics",
        headers={"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=15.0) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def told_by_command(tmp_path: Path, server: ServerProcess) -> list[dict[str, Any]]:
    endpoint = server.endpoint
    command = [sys.executable, "-m", "ps", "stats", f"{endpoint.host}:{endpoint.port}", "--json"]
    secret = ("--secret-file", str(tmp_path / "secret"), "--cluster-id", CLUSTER_ID)
    done = subprocess.run([*command, *secret], capture_output=True, timeout=60, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_serving_process_is_small_and_tells_who_may_ask_what_it_does(tmp_path: Path):
    worker = Identity(Role.WORKER, 0, 0)
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    options = ("--metrics-port", "0", "--metrics-token-file", str(token_file))
    values = {"trainable": np.zeros(1000, np.float32)}
    with (
        server_processes(tmp_path, 1, num_workers=1, arguments=options, by_command=True) as (
            server,
        ),
        PSClient([server.endpoint], CREDENTIALS, worker, num_workers=1) as client,
    ):
        client.seed(Manifest(groups=(GROUP,)), values)
        for _ in range(7):
            client.push(values, hyper=Hyper(0.1), rows=32)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            scrape(server, "wrong")
        counted = ("tfos_ps_request_seconds_count", "push", "0")
        # The time of a request is counted after its answer has left.
        wait_until(lambda: scrape(server, TOKEN).get(counted) == 7, "the last push in the page")
        found = scrape(server, TOKEN)
        assert found["tfos_ps_worker_pushes_total", "0", "0"] == 7
        assert found["tfos_ps_worker_rows_total", "0", "0"] == 7 * 32
        assert found["tfos_ps_received_bytes_total", "0"] == 8 * 4000
        assert found["tfos_ps_apply_seconds_sum", "0"] > 0

        (stats,) = told_by_command(tmp_path, server)
        assert stats["clock"] == 7
        assert stats["workers"][0]["pushes"] == 7

        process = psutil.Process(server.process.pid)
        assert process.memory_info().rss < MAX_RSS_BYTES
        assert TOKEN not in " ".join(process.cmdline())
        loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "numba" in loaded or "llvmlite" in loaded
        assert "tensorflow" not in loaded
        assert "pyspark" not in loaded


def test_metrics_for_other_hosts_need_a_token(tmp_path: Path):
    options = ("--num-workers", "1", "--metrics-port", "0", "--metrics-host", "0.0.0.0")
    server = ServerProcess(tmp_path, *options, wait=False, by_command=True)
    status, errors = server.wait(60.0)
    assert status == 2
    assert "give a token, or listen on 127.0.0.1" in errors
