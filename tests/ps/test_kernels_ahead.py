"""Servers compile what a model needs before they are filled, and their chief waits for that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from numba.core import event

from ps import kernels_ahead
from ps.client import compile_wait
from ps.errors import RequestTimeout, ServerError
from ps.jit.cache import CACHE
from ps.manifest.manifest import SGD, Adam, Ftrl, Hyper, Lion, Manifest, RowWiseAdagrad
from ps.server.handlers import Service
from ps.server.server import ServerSettings
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Cluster,
    cluster,
    filled,
    make_manifest,
    run_all,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
MANIFEST = make_manifest(rule=ADD)


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster("tcp", num_servers=2) as made:
        yield made


class Compiler:
    """In the place of the compiler: it takes until `may_end`, and counts what was asked."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0

    def __call__(self, manifest: Manifest) -> None:
        self.num_begun += 1
        assert self.may_end.wait(WAIT_S)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(kernels_ahead, "compile_for", made)
    yield made
    made.may_end.set()
    wait_until(
        lambda: not any(each.name == "ps-compile" for each in threading.enumerate()), "compilers"
    )


def seeding(bed: Cluster, timeout_s: float = 0.4) -> tuple[threading.Thread, list[Exception]]:
    client = bed.client(timeout_s=timeout_s)
    failed: list[Exception] = []

    def seed() -> None:
        try:
            client.seed(MANIFEST, filled(MANIFEST))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failed.append(error)

    thread = threading.Thread(target=seed, daemon=True)
    thread.start()
    return thread, failed


def test_a_chief_waits_longer_for_a_compiler_than_for_an_answer(
    bed: Cluster,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    asked: list[float] = []
    compile_ahead = kernels_ahead.KernelsAhead.compile

    def counted(self: Any, *arguments: Any) -> float:
        took_s = compile_ahead(self, *arguments)
        asked.append(took_s)
        return took_s

    monkeypatch.setattr(kernels_ahead.KernelsAhead, "compile", counted)
    thread, failed = seeding(bed)
    # Each of two servers answers after 0.2 s that it goes on: the client's 0.4 s are long over.
    wait_until(lambda: len(asked) >= 8 or bool(failed), "answers")
    assert not failed
    assert compiler.num_begun == 2, "one compiler at each server, however often it is asked"
    compiler.may_end.set()
    thread.join(WAIT_S)
    assert not failed
    assert all(server.phase == "SERVING" for server in bed.client().describe())
    (line,) = [each.getMessage() for each in caplog.records if "kernels" in each.getMessage()]
    assert line.startswith("ps:0, ps:1: no kernels of this model's optimizer are kept there yet")
    assert "`tfos warm DIR`" in line


def test_a_compiler_that_does_not_end_is_waited_for_with_a_bound(
    bed: Cluster, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compile_wait, "READY_TIMEOUT_S", 0.5)
    thread, failed = seeding(bed)
    thread.join(WAIT_S)
    assert compiler.num_begun == 2
    (error,) = failed
    assert isinstance(error, RequestTimeout)
    assert str(error).startswith("ps:0, ps:1 still compiled kernels for this model after ")
    assert "limit 0.5" in str(error)
    assert "`tfos warm DIR`" in str(error)


def test_a_compiler_that_fails_is_told_and_tried_again(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    def fails(manifest: Manifest) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(kernels_ahead, "compile_for", fails)
        with pytest.raises(
            ServerError, match="ps:0 cannot compile its kernels: MemoryError: no room"
        ):
            bed.client().seed(MANIFEST, filled(MANIFEST))
    bed.client().seed(MANIFEST, filled(MANIFEST))


def test_all_that_wait_for_a_compiler_that_fails_are_told(monkeypatch: pytest.MonkeyPatch):
    ahead, num_begun = kernels_ahead.KernelsAhead(3), 0
    waiting = [threading.Event(), threading.Event()]

    def fails(manifest: Manifest) -> None:
        nonlocal num_begun
        num_begun += 1
        assert all(each.wait(WAIT_S) for each in waiting)
        raise MemoryError("no room")

    def ask(number: int) -> float:
        def is_gone() -> bool:  # asked while the request waits
            waiting[number].set()
            return False

        return ahead.compile(MANIFEST, time.monotonic() + WAIT_S, is_gone)

    monkeypatch.setattr(kernels_ahead, "compile_for", fails)
    ends = run_all(partial(ask, 0), partial(ask, 1))
    assert [str(end) for end in ends] == [
        "ps:3 cannot compile its kernels: MemoryError: no room"
    ] * 2
    assert num_begun == 1
    monkeypatch.setattr(kernels_ahead, "compile_for", lambda manifest: None)
    again = partial(ahead.compile, MANIFEST, time.monotonic() + WAIT_S, lambda: False)
    assert run_all(again) == [0.0]


@pytest.mark.parametrize(
    "manifest",
    [
        with_tables(table(rule=Adam()), rule=Adam(clipvalue=1.0, ema_momentum=0.9)),
        with_tables(table(rule=SGD(momentum=0.9)), rule=SGD(clipnorm=1.0), consistency="sync"),
    ],
    ids=["async", "sync"],
)
def test_nothing_is_compiled_after_a_manifest_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch, manifest: Manifest
):
    with cluster(num_servers=2) as bed:
        warm = bed.client()
        warm.seed(manifest, filled(manifest))  # the client's own kernels, too
        kernels_ahead.compile_for(manifest)
    loaded: list[str] = []
    load = CACHE.load

    def noted(dispatcher: Any, signature: Any) -> bool:
        is_new = load(dispatcher, signature)
        loaded.extend([dispatcher.py_func.__name__] * is_new)
        return is_new

    monkeypatch.setattr(CACHE, "load", noted)
    with cluster(num_servers=2) as bed, event.install_recorder("numba:compile") as compiled:
        (client,) = bed.workers(manifest, filled(manifest))
        into, ids = filled(manifest), np.arange(9)
        for _ in range(2):
            client.push_pull(filled(manifest, 1.0), into, hyper=HYPER, rows=1)
            client.tables.lookup({"user": ids})
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        assert len(list(client.tables.scan("user"))) > 0
    assert loaded == []
    assert [each for _, each in compiled.buffer] == []


@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_all_that_a_shard_loads_was_asked_for_before(
    monkeypatch: pytest.MonkeyPatch, consistency: str, compression: str
):
    asked: set[tuple[str, str]] = set()

    def noted(dispatcher: Any, signature: Any) -> bool:
        asked.add((dispatcher.py_func.__name__, str(signature)))
        return False

    monkeypatch.setattr(CACHE, "load", noted)
    for rule in (SGD(momentum=0.9, clipvalue=1.0), Adam(ema_momentum=0.9), Lion(), Ftrl()):
        own = () if isinstance(rule, Adam) else (rule,)  # tables keep no moving averages
        for of_rows in (*own, RowWiseAdagrad()):
            manifest = with_tables(table(rule=of_rows), rule=rule, consistency=consistency)
            groups = tuple(
                msgspec.structs.replace(each, compression=compression) for each in manifest.groups
            )
            manifest = msgspec.structs.replace(manifest, groups=groups)
            asked.clear()
            kernels_ahead.compile_for(manifest)
            ahead = set(asked)
            settings = ServerSettings(rank=0, num_servers=1, num_workers=1)
            service = Service(settings, open_connections=int)
            service._new_shard(service._new_dense(manifest), service._new_tables(manifest))
            assert asked == ahead
