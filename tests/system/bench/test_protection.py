"""Benchmarks and their servers agree on what they authenticate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.benchmarks import deepfm_worker
from tfos.bench.harness import Bench
from tfos.bench.servers import served_for, server_group
from tfos.cli import main

pytestmark = [pytest.mark.socket, pytest.mark.process]


@pytest.mark.parametrize("unix", [True, False])
def test_a_worker_of_deepfm_reaches_the_servers_that_its_task_names(unix):
    with server_group(unix=unix) as servers:
        more = deepfm_worker.settings_of(servers, 0, 1)
        with deepfm_worker.connect(more) as client:
            (stats,) = client.stats()
    assert stats.clock == 0


def test_given_servers_may_authenticate_less_than_all(monkeypatch, tmp_path: Path):
    reached = []

    def run(bench: Bench) -> None:
        with served_for(bench) as client:
            reached.extend(client.stats())

    module = type(sys)("tfos.bench.dense")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "tfos.bench.dense", module)
    with server_group() as servers:
        (at,), credentials = servers.endpoints, servers.credentials
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(credentials.secret)
        given = ["--servers", f"{at.host}:{at.port}", "--secret-file", str(secret)]
        given += ["--cluster-id", credentials.cluster_id, "--integrity", "header"]
        result = CliRunner().invoke(main.app, ["bench", "dense", *given])
    assert (result.exit_code, len(reached)) == (0, 1), result.output
