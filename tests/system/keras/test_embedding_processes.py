"""Processes that are killed, frozen or held up under `fit` of a model with tables.

As in test_embedding_faults, parameters and rows count how often each batch was trained.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ps.client.client import PSClient
from ps.client.server_group import ServerGroup
from ps.errors import RequestTimeout, ServerGone
from ps.protocol import messages
from rpc.auth.handshake import Identity, Role
from tests.support.channel_proxy import Fault, FaultProxy
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import WAIT_S, run_all
from tests.support.ps_processes import CREDENTIALS, ServerProcess, server_processes
from tests.support.waiting import wait_until
from tests.system.keras.test_embedding import BATCH
from tests.system.keras.test_embedding_faults import (
    IDS,
    MOSTLY_HYBRID,
    STEPS,
    counted,
    counting,
    fit,
    ids,
    two_servers,
    values,
)
from tfos.keras.embedding.loading import load_rows
from tfos.keras.step import trainer

__all__ = ["proxied"]

pytestmark = [pytest.mark.tf, pytest.mark.socket, pytest.mark.timeout(230)]

ROOT = Path(__file__).parents[3]
DEADLINE_S = 6.0
"""Of a request: a server that compiles its kernels on a busy host answers within it."""


@contextmanager
def client_of(
    endpoints: list[Any], generation: int = 0, role: Role = Role.WORKER, **settings: Any
) -> Iterator[PSClient]:
    options: dict[str, Any] = {"num_workers": 1, "timeout_s": WAIT_S, "reconnect_s": 30.0}
    worker = Identity(role, 0, generation)
    with PSClient(endpoints, CREDENTIALS, worker, **options | settings) as client:
        yield client


def stopped(server: ServerProcess) -> None:
    server.send(signal.SIGSTOP)
    process = psutil.Process(server.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the server to stop")


def rows_by_server(client: PSClient) -> list[np.ndarray[Any, Any]]:
    """Which of the ids each server has."""
    routed = client.tables.route({"user": np.arange(IDS)})["user"]
    return [routed.unique[routed.own(server)] for server in range(2)]


@pytest.mark.fault("F11")
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_a_frozen_server_is_named_at_the_deadline_and_nothing_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """The push in doubt is applied once by each server; a newer attempt trains the rest."""
    monkeypatch.setattr(trainer, "BARRIER_TIMEOUT_S", DEADLINE_S)
    x, done = ids(), 4
    with server_processes(tmp_path, 2, num_workers=1) as servers:
        endpoints = [server.endpoint for server in servers]

        def freeze(step: int) -> None:
            if step + 1 == done:
                began.append(time.monotonic())
                stopped(servers[1])

        began: list[float] = []
        with client_of(endpoints, timeout_s=DEADLINE_S) as client:
            old = counting(client, mode)
            with pytest.raises(RequestTimeout, match=re.escape(f"ps:1 at {endpoints[1]}")):
                fit(old, x, freeze)
            assert time.monotonic() - began[0] < 5 * DEADLINE_S
        servers[1].send(signal.SIGCONT)
        with client_of(endpoints, generation=1) as newer:
            model = counting(newer, mode)
            wait_until(lambda: all(each.connections <= 2 for each in newer.stats()), "the old end")
            before, rows = values(newer)
            steps = round(before) // BATCH
            assert done <= steps <= done + 3
            for own in rows_by_server(newer):
                some = [counted(x[: n * BATCH])[own] for n in range(done, done + 4)]
                assert any(np.array_equal(rows[own], each) for each in some)
            fit(model, x[steps * BATCH :], lambda _: None)
            assert values(newer)[0] == len(x)


def replaced(directory: Path, rank: int, root: Path, *arguments: str) -> ServerProcess:
    """Start a server from the last checkpoint in the place of another."""
    place = ("--rank", str(rank), "--num-servers", "2", "--num-workers", "1")
    return ServerProcess(directory, *place, "--restore", str(root), *arguments)


@pytest.mark.long
@pytest.mark.fault("F11")
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_a_server_that_is_replaced_while_frozen_accepts_no_rows_when_it_thaws(
    tmp_path: Path, mode: str
):
    x, root = ids(), tmp_path / "saves"
    places = ("--save-dir", str(root))
    with server_processes(tmp_path, 2, num_workers=1, arguments=places) as servers:
        proxy = FaultProxy(servers[1].endpoint)
        new: list[ServerProcess] = []
        try:
            with client_of([servers[0].endpoint, proxy.endpoint]) as client:
                model = counting(client, mode)
                trainer_of_it = model._tfos_trainer

                def replace(step: int) -> None:
                    if step + 1 == 4:
                        trainer_of_it.drain()
                        client.save(root, step)
                        stopped(servers[1])
                        new.append(replaced(tmp_path, 1, root))
                        proxy.retarget(new[0].endpoint)
                    if step + 1 == 8:
                        servers[1].send(signal.SIGCONT)

                fit(model, x, replace)
                status, errors = servers[1].wait()
                assert status == 3
                assert re.search(r"ps:1 \(start 1, pid \d+\) was replaced by start 2", errors)
                total, rows = values(client)
                assert total == len(x)
                np.testing.assert_array_equal(rows, counted(x))
                assert [stats.lost_updates for stats in client.stats()] == [0, 0]
        finally:
            proxy.close()
            for server in new:
                server.close()


@pytest.mark.long
@pytest.mark.fault("F08")
@pytest.mark.fault("F10")
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_a_server_killed_while_it_saves_goes_on_from_the_commit_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """The running fit waits for it, and it lacks exactly the updates that it tells."""
    x, root = ids(), tmp_path / "saves"
    saved, died = 3, 7  # steps
    with server_processes(tmp_path, 2, num_workers=1) as servers:
        new: list[ServerProcess] = []
        brief: dict[str, Any] = {"role": Role.DRIVER, "reconnect_s": 1.0}
        try:
            endpoints = [server.endpoint for server in servers]
            with client_of(endpoints) as client, client_of(endpoints, **brief) as saver:
                model = counting(client, mode)
                saver.attach()
                ask = ServerGroup.ask

                def half_asked(group: Any, request: Any, answer: Any, **options: Any) -> Any:
                    if isinstance(request, messages.Save):  # or it could be done before the kill
                        stopped(servers[1])
                    return ask(group, request, answer, **options)

                def kill() -> None:
                    wait_until(lambda: bool(list(root.glob(".tmp-*"))), "a half save")
                    servers[1].send(signal.SIGKILL)
                    servers[1].close()

                def harm(step: int) -> None:
                    if step + 1 == saved:
                        model._tfos_trainer.drain()
                        client.save(root, saved)
                    if step + 1 == died:
                        model._tfos_trainer.drain()
                        monkeypatch.setattr(ServerGroup, "ask", half_asked)
                        failed, _ = run_all(lambda: saver.save(root, died), kill)
                        assert isinstance(failed, ServerGone), failed
                        port = str(endpoints[1].port)
                        new.append(replaced(tmp_path, 1, root, "--port", port))

                fit(model, x, harm)
                lost = [0, died - saved]
                assert [stats.lost_updates for stats in client.stats()] == lost
                _, rows = values(client)
                kept = counted(np.delete(x, range(saved * BATCH, died * BATCH), 0))
                for own, expected in zip(rows_by_server(client), (counted(x), kept), strict=True):
                    np.testing.assert_array_equal(rows[own], expected[own])
        finally:
            for server in new:
                server.close()


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    "last",
    [
        *(pytest.param(2**bits - 2, marks=pytest.mark.long) for bits in (31, 32)),
        2**63 - 2 * STEPS,
    ],
)
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_numbers_of_pushes_and_batches_near_their_limits(
    proxied: Callable[..., ProxiedCluster], mode: str, last: int
):
    """Also where a push is sent again, whose number the servers must know."""
    made = proxied()
    x = ids()
    client = made.client()
    model = counting(client, mode)
    for link in client._servers.links:
        link.sequence = last
    client.tables._batches._last = last

    def harm(step: int) -> None:
        if step % 3 == 0:
            made.proxy.arm(Fault("down" if step % 2 else "up", 60))

    fit(model, x, harm)
    total, rows = values(client)
    assert total == len(x)
    np.testing.assert_array_equal(rows, counted(x))
    assert client._servers.links[0].sequence >= last + STEPS


@pytest.mark.fault("F07")
@pytest.mark.long
def test_a_worker_that_holds_the_gil_longer_than_its_deadline_loses_no_answer(tmp_path: Path):
    """Answers to a push in flight that came meanwhile count, though read after the deadline."""
    x = ids()

    def hold(step: int) -> None:
        if step == 3:
            ctypes.PyDLL(None).usleep(int(1.25e6 * DEADLINE_S))

    with (
        server_processes(tmp_path, 2, num_workers=1) as servers,
        client_of([server.endpoint for server in servers], timeout_s=DEADLINE_S) as client,
    ):
        fit(counting(client, "pipeline"), x, hold)
        total, rows = values(client)
        assert total == len(x)
        np.testing.assert_array_equal(rows, counted(x))


@contextmanager
def worker_process(bed: Any, proxies: list[FaultProxy], mode: str, steps: int) -> Iterator[Any]:
    """Worker 1 as a process, which goes on from this step when it gets a line."""
    places = [f"{proxy.endpoint.host}:{proxy.endpoint.port}" for proxy in proxies]
    program = ["-m", "tests.support.programs.keras_worker", bed.credentials.cluster_id]
    process = subprocess.Popen(
        [sys.executable, *program, mode, str(steps), *places],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(bed.credentials.secret.hex() + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.fault("F01")
@pytest.mark.fault("F02")
@pytest.mark.parametrize("mode", MOSTLY_HYBRID)
def test_a_worker_killed_within_a_push_leaves_whole_pushes_and_its_permits(
    proxied: Callable[..., ProxiedCluster], mode: str
):
    """One server has its last push, the other a part; the other worker and a successor go on."""
    made = proxied(num_servers=2, num_workers=2, on_lost="continue")
    x, done = [ids(rank) for rank in range(2)], 4
    with worker_process(made.bed, made.proxies, mode, done) as process:
        survivor = made.bed.client(0)
        model = counting(survivor, mode, 2, 0)
        trained: list[int] = []
        running = threading.Thread(target=fit, args=(model, x[0], trained.append), daemon=True)
        running.start()
        assert process.stdout.readline() == "ready\n"
        (fault,) = made.proxies[1].arm(Fault("up", 100, "drop", lasts_s=WAIT_S))
        process.stdin.write("\n")
        process.stdin.flush()
        assert fault.fired.wait(WAIT_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        made.bed.driver().worker_lost(1)
        running.join(WAIT_S)
        assert len(trained) == STEPS
    _, rows = values(survivor)
    steps = []
    for own in rows_by_server(survivor):
        found = [
            n
            for n in range(STEPS + 1)
            if np.array_equal(rows[own], (counted(x[0]) + counted(x[1][: n * BATCH]))[own])
        ]
        steps += found
    assert len(steps) == 2, "each server has whole pushes of rows, each once"
    assert done - 1 <= steps[1] <= steps[0] <= done + 2
    made.bed.driver().fence(1, 1)
    newer = made.bed.client(1, generation=1)
    successor = counting(newer, mode, 2, 1)
    fit(successor, x[1][steps[1] * BATCH :], lambda _: None)
    np.testing.assert_array_equal(
        values(newer)[1][rows_by_server(newer)[1]],
        (counted(x[0]) + counted(x[1]))[rows_by_server(newer)[1]],
    )


@pytest.mark.fault("F08")
def test_rows_that_are_loaded_beside_a_restart_are_missing_as_told_and_can_be_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    keys = np.arange(IDS)
    with two_servers() as bed:
        client = bed.client()
        model = counting(client, "async")
        client.save(tmp_path, 0)

        def batches() -> Iterator[Any]:
            for number, part in enumerate(np.split(keys, 4)):
                if number == 2:
                    bed.restart(1, tmp_path)
                yield part, np.full((part.size, 1), 100.0, "float32")

        with caplog.at_level(logging.WARNING, "tfos"):
            assert load_rows(client, "user", batches(), is_chief=True, save=lambda: None) == IDS
        assert "ps:1 restarted while rows were loaded, and has only those after" in caplog.text
        _, rows = values(client)
        first, second = rows_by_server(client)
        assert set(rows[first]) == set(rows[second[second >= IDS // 2]]) == {100.0}
        assert set(rows[second[second < IDS // 2]]) == {0.0}
        x = ids()
        fit(model, x, lambda _: None)
        expected = counted(x) + np.where(np.isin(keys, second) & (keys < IDS // 2), 0, 100)
        np.testing.assert_array_equal(values(client)[1], expected)
