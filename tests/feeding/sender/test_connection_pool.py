"""Connections that feed tasks leave to the next partition of their process: when they are used,
when they are not, and that nothing depends on them."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feeding.errors import NoWorkerLeft, RowError
from feeding.protocol.messages import FeedStatus
from feeding.receiver.channel import FeedChannel
from feeding.sender import connection_pool, worker_link
from feeding.sender.connection_pool import POOL, ConnectionPool, IdleConnection, Purpose
from feeding.sender.task import FeedTarget, FeedTask
from feeding.sender.unreachable import UNREACHABLE
from feeding.sender.worker_link import WorkerLink
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import connect
from rpc.endpoint import Endpoint
from rpc.errors import Unreachable
from rpc.server.listener import Listener
from rpc.transport import tls_stream
from tests.support.feed import (
    CONFIG,
    CREDENTIALS,
    Background,
    Worker,
    answer_all,
    eventually,
    feed_task,
    given_tls,
    inference_task,
    read_epochs,
    worker_rows,
    workers,
)

pytestmark = pytest.mark.socket

SMALL = dataclasses.replace(CONFIG, max_inflight_bytes=4000, chunk_rows=10)
WIDE = [[0.5] * 10] * 200  # a chunk is 800 bytes


@pytest.fixture(autouse=True)
def _no_connections_of_other_tests():
    POOL.clear()
    yield
    POOL.clear()
    UNREACHABLE.clear()


def run(task, partition, rows):
    (report,) = task(partition, iter(rows))
    return report


def accepted(some):
    return [worker.listener.stats().accepted for worker in some]


def open_connections(worker):
    return worker.listener.stats().open_connections


def rows_of(reading):
    return sorted(v for batches in reading.result() for b in batches for v in b.nest().tolist())


def test_the_partitions_of_a_process_share_a_connection_per_worker():
    with workers(3) as some:
        reading = [read_epochs(worker) for worker in some]
        for epoch in range(2):
            for partition in range(20):
                run(feed_task(some, epoch), partition, [partition * 40 + r for r in range(40)])
            for worker in some:
                worker.channel.flush("input", epoch)
        assert accepted(some) == [1, 1, 1]
        for worker in some:
            worker.channel.finish("input")
        read = [rows_of(each) for each in reading]
        assert sorted(v for values in read for v in values) == sorted(2 * list(range(800)))
        assert min(map(len, read)) > 0, "each gets a share"


def answer_doubled(worker):
    return answer_all(worker, lambda rows: [2 * row for row in rows])


def sessions(some):
    return [len(worker.channel._state.answers_of("input")._sessions) for worker in some]


def test_partitions_of_inference_share_a_connection_per_worker():
    with workers(3) as some:
        answering = [answer_doubled(worker) for worker in some]
        for partition in range(20):
            rows = list(range(partition, partition + 40))
            assert list(inference_task(some)(partition, iter(rows))) == [2 * r for r in rows]
            assert sessions(some) == [0, 0, 0], "a session ends with its last result"
        assert accepted(some) == [1, 1, 1]
        assert len(POOL) == 3
        for worker in some:
            worker.channel.finish("input")
        for each in answering:
            each.result()


@pytest.mark.fault("F28")
def test_no_worker_is_lost_when_a_partition_has_used_up_a_connections_keys(monkeypatch):
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 64)
    with workers(1, SMALL, "tls") as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], config=SMALL, credentials=given_tls, keeps_unsent=True)
        reports = [run(task, p, range(p * 1000, (p + 1) * 1000)) for p in range(3)]
        assert [report.lost for report in reports] == [()] * 3
        worker.channel.flush("input", 0)
        worker.channel.finish("input")
        assert rows_of(reading) == list(range(3000))
        assert accepted([worker])[0] >= 4
        eventually(lambda: open_connections(worker) <= 1, "used connections are closed")


@pytest.mark.fault("F28")
@pytest.mark.parametrize("away", ["noted by another partition", "accepts none"])
def test_a_used_connection_that_cannot_be_replaced_feeds_while_it_is_good(monkeypatch, away):
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 2**12)
    with workers(1, SMALL, "tls") as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], config=SMALL, credentials=given_tls, keeps_unsent=True)
        run(task, 0, range(1000))
        ((idle,),) = POOL._idle.values()
        stream: Any = idle.connection.stream
        stream._records_left = 2**10 - 1
        assert idle.connection.is_nearly_used

        def refuse(endpoint: Any, *_: Any, **__: Any) -> Any:
            raise Unreachable(f"{endpoint}: connection refused")

        with monkeypatch.context() as patched:
            if away == "accepts none":
                patched.setattr(worker_link, "connect", refuse)
            else:
                UNREACHABLE.note(worker.listener.endpoint)
            report = run(task, 1, range(1000, 2000))
            assert report.lost == ()
        assert UNREACHABLE.has(worker.listener.endpoint) == (away != "accepts none")
        UNREACHABLE.clear()
        assert run(task, 2, range(2000, 3000)).lost == ()
        worker.channel.flush("input", 0)
        worker.channel.finish("input")
        assert rows_of(reading) == list(range(3000))
        assert accepted([worker]) == [2]
        eventually(lambda: open_connections(worker) <= 1, "the used connection is closed")


@pytest.mark.fault("F28")
def test_inference_goes_on_when_its_partitions_have_used_up_a_connections_keys(monkeypatch):
    monkeypatch.setattr(tls_stream, "MAX_RECORDS", 64)
    with workers(1, CONFIG, "tls") as (worker,):
        answering = answer_doubled(worker)
        task = inference_task([worker], credentials=given_tls)
        for partition in range(40):
            rows = list(range(partition, partition + 40))
            assert list(task(partition, iter(rows))) == [2 * r for r in rows]
        assert accepted([worker])[0] >= 4
        worker.channel.finish("input")
        answering.result()


def test_a_session_that_its_feeder_leaves_ends_with_the_kept_connection():
    with workers(1) as (worker,):
        answering = answer_doubled(worker)
        for _ in range(3):
            results: Any = inference_task([worker])(0, iter(range(10_000)))
            assert next(results) == 0
            results.close()
            eventually(lambda: sessions([worker]) == [0], "the session has ended")
            assert list(inference_task([worker])(1, iter(range(40)))) == list(range(0, 80, 2))
        assert accepted([worker]) == [4], "the one that is left is closed, the other one is kept"
        worker.channel.finish("input")
        answering.result()


def test_inference_uses_the_connections_that_feeding_has_left():
    with workers(2) as both:
        for partition in range(2):
            run(feed_task(both), partition, range(16))
        before = accepted(both)
        for worker in both:
            worker.channel.drain()
        with pytest.raises(NoWorkerLeft, match="no worker takes rows for inference"):
            list(inference_task(both)(0, iter(range(4))))
        assert accepted(both) == before


def test_a_worker_is_connected_to_when_a_chunk_first_goes_there():
    with workers(4) as some:
        before = accepted(some)
        for partition, expected in [(2, [0, 0, 1, 0]), (2, [0, 0, 1, 0]), (3, [0, 0, 1, 1])]:
            assert worker_rows(run(feed_task(some), partition, [1, 2, 3])) == {partition: 3}
            assert [now - old for now, old in zip(accepted(some), before, strict=True)] == expected


def test_a_full_worker_keeps_its_connection_and_is_asked_for_room_on_it():
    with workers(1, SMALL) as (worker,):
        run(feed_task([worker], config=SMALL), 0, WIDE[:60])  # more than it takes at once
        feeding = Background(lambda: run(feed_task([worker], config=SMALL), 1, WIDE))
        eventually(lambda: worker.channel.stats("input").unread_bytes > 4000, "full")
        reading = read_epochs(worker)
        assert worker_rows(feeding.result()) == {0: 200}
        worker.channel.finish("input")
        assert sum(b.num_rows for b in reading.result()[0]) == 260
        assert accepted([worker]) == [1]


def test_tasks_at_the_same_time_have_connections_of_their_own():
    with workers(2) as both:

        def nested():
            yield from range(40)
            run(feed_task(both), 1, range(40))
            yield from range(40, 80)

        assert sum(worker_rows(run(feed_task(both), 0, nested())).values()) == 80
        assert accepted(both) == [2, 2]
        assert len(POOL) == 4
        assert sum(w.channel.stats("input").fed_rows for w in both) == 120


@pytest.mark.fault("F01")
def test_a_worker_that_dies_while_its_connection_is_idle_is_left_out():
    with workers(2) as (dying, worker):
        task = feed_task([dying, worker])
        assert worker_rows(run(task, 0, range(16))) == {0: 16}
        dying.listener.close()
        report = run(task, 2, range(16))
        assert worker_rows(report) == {1: 16}
        (lost,) = report.lost
        assert (lost.name, lost.resent_rows) == ("worker:0", 0)


@pytest.mark.fault("F01")
@pytest.mark.parametrize("is_seen", [True, False], ids=["said", "silent"])
@pytest.mark.parametrize("exactly_once", [False, True], ids=["", "exactly once"])
def test_a_connection_that_broke_while_it_was_idle_is_made_anew(monkeypatch, is_seen, exactly_once):
    """As a firewall does it, which forgets what is idle; the worker is as it was."""
    with workers(1) as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], exactly_once=exactly_once)
        run(task, 0, range(100))
        for served in list(worker.listener._served):
            served.shutdown()
        eventually(lambda: not open_connections(worker), "ended")
        if not is_seen:
            monkeypatch.setattr("rpc.transport.stream.SocketStream.peer_closed", lambda _: False)
            monkeypatch.setattr("feeding.sender.feeder.FRESH_S", 0.0)
        report = run(task, 1, range(100, 200))
        assert (worker_rows(report), report.lost) == ({0: 100}, ())
        worker.channel.finish("input")
        assert rows_of(reading) == list(range(200))


@pytest.mark.fault("F01")
def test_a_chunk_is_never_sent_twice_on_a_connection_that_breaks_under_it(monkeypatch):
    """What became of it is not known: the worker counts as lost, as on a connection of its own."""
    monkeypatch.setattr("rpc.transport.stream.SocketStream.peer_closed", lambda _: False)
    with workers(2) as (breaking, worker):
        task = feed_task([breaking, worker])
        run(task, 0, range(16))
        offered = []

        def take_and_break(chunk, *rest):
            offered.append(chunk.num_rows)
            position = offer(chunk, *rest)
            for served in list(breaking.listener._served):
                served.shutdown()
            return position

        queue = breaking.channel._state.queue("input")
        offer = queue.offer
        monkeypatch.setattr(queue, "offer", take_and_break)
        report = run(task, 0, range(16))
        assert offered == [16]
        assert report.lost[0].resent_rows == 16
        assert worker_rows(report) == {1: 16}


def test_a_worker_that_replaces_another_gets_its_rows_though_the_old_one_still_listens():
    with workers(1) as (old,):
        run(feed_task([old]), 0, range(16))
        with workers(1) as (new,):
            report = run(feed_task([new]), 1, range(16))
            assert worker_rows(report) == {0: 16}
            assert [w.channel.stats("input").fed_rows for w in (old, new)] == [16, 16]


def serve(credentials, port=0):
    """A worker of another cluster."""
    channel = FeedChannel(CONFIG, worker="worker:0")
    listener = Listener(channel.handler, credentials, Identity(Role.WORKER, 0))
    listener.bind_tcp("127.0.0.1", port)
    listener.start()
    return channel, listener


def test_clusters_side_by_side_and_one_after_the_other_on_a_port_share_no_connection():
    clusters = [Credentials.generate(), Credentials.generate()]
    served = [serve(credentials) for credentials in clusters]
    try:
        tasks = [
            FeedTask(
                targets=(FeedTarget(0, "worker:0", listener.endpoint),),
                credentials=partial(dataclasses.replace, credentials),
                epoch=0,
                config=CONFIG,
            )
            for credentials, (_, listener) in zip(clusters, served, strict=True)
        ]
        for partition in range(4):
            for task in tasks:
                run(task, partition, range(10))
        assert [channel.stats("input").fed_rows for channel, _ in served] == [40, 40]
        assert [listener.stats().accepted for _, listener in served] == [1, 1]

        port = served[0][1].endpoint.port
        served[0][1].close()
        later = Credentials.generate()
        served[0] = serve(later, port)
        run(dataclasses.replace(tasks[0], credentials=lambda: later), 0, range(10))
        assert served[0][0].stats("input").fed_rows == 10
    finally:
        for channel, listener in served:
            channel.close("the test is over")
            listener.close()


def test_a_connection_is_handed_only_to_who_has_all_of_its_purpose():
    pool = ConnectionPool()
    purpose = Purpose(CREDENTIALS, Endpoint("127.0.0.1", 1), "input")
    with workers(1) as (worker,):
        connection = connect(worker.listener.endpoint, Identity(Role.FEEDER, 0), CREDENTIALS)
        pool.give(
            purpose, IdleConnection(connection, FeedStatus(0, 0, room=True, draining=False), 0.0)
        )
        same_name = dataclasses.replace(CREDENTIALS, secret=b"x" * 32)
        assert pool.take(purpose._replace(credentials=same_name)) is None
        assert pool.take(purpose._replace(endpoint=Endpoint("127.0.0.1", 2))) is None
        assert pool.take(purpose._replace(feed="validation")) is None
        found = pool.take(Purpose(*purpose))
        assert found is not None
        assert found.connection is connection
        assert pool.take(purpose) is None
        connection.close()
    pool.clear()


def test_a_task_that_fails_leaves_no_connection():
    with workers(2) as both:
        with pytest.raises(RowError):
            run(feed_task(both), 0, [*range(100), None])
        assert len(POOL) == 0
        eventually(lambda: not any(map(open_connections, both)), "closed")


def test_idle_connections_are_closed_after_a_while(monkeypatch):
    monkeypatch.setattr(connection_pool, "_LOOK_S", 0.01)
    with workers(2) as both:
        run(feed_task(both), 0, range(100))
        assert len(POOL) == 2
        monkeypatch.setattr(connection_pool, "IDLE_S", 0.0)
        eventually(lambda: len(POOL) == 0, "too old")
        eventually(lambda: not any(map(open_connections, both)), "closed")


def test_idle_connections_are_closed_with_their_cluster(monkeypatch):
    monkeypatch.setattr(connection_pool, "_LOOK_S", 0.01)
    with workers(2) as both:
        run(feed_task(both), 0, range(100))
        for worker in both:
            worker.close()
        eventually(lambda: len(POOL) == 0, "the workers have closed")


def test_a_process_keeps_so_many_idle_connections_and_no_more(monkeypatch):
    monkeypatch.setattr(connection_pool, "MAX_IDLE", 3)
    with workers(5) as some:
        for worker in some:
            run(feed_task([worker]), 0, range(10))
        assert len(POOL) == 3
        eventually(lambda: [*map(open_connections, some)] == [0, 0, 1, 1, 1], "the oldest closed")


FORKING = """
import os, sys
from pathlib import Path
import msgspec
from feeding.sender.connection_pool import POOL
from feeding.sender.task import FeedTarget, FeedTask
from feeding.sender.unreachable import UNREACHABLE
from feeding.sender.worker_link import WorkerLink
from feeding.config import FeedConfig
from rpc.auth.handshake import Credentials

targets = msgspec.json.decode(sys.argv[1], type=tuple[FeedTarget, ...])
credentials = Credentials(sys.argv[2], bytes.fromhex(sys.stdin.readline()))
task = FeedTask(targets=targets, credentials=lambda: credentials, epoch=0, config=FeedConfig())

def feed(partition):
    (report,) = task(partition, iter(range(10)))
    assert report.rows == 10 and not report.dropped_rows and not report.lost, report

feed(0)
descriptors = len(os.listdir("/proc/self/fd"))
child = os.fork()
if not child:
    assert len(POOL) == 0
    assert len(os.listdir("/proc/self/fd")) < descriptors
    feed(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(POOL) == 1
feed(2)
"""


def test_a_forked_process_has_connections_of_its_own_and_leaves_its_parents_alone():
    with workers(1) as (worker,):
        import msgspec

        program = [sys.executable, "-c", FORKING]
        arguments = [msgspec.json.encode([worker.target]).decode(), CREDENTIALS.cluster_id]
        subprocess.run(
            [*program, *arguments],
            input=CREDENTIALS.secret.hex(),
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert worker.channel.stats("input").fed_rows == 30
        assert accepted([worker]) == [2]


def test_workers_end_without_waiting_for_idle_connections():
    worker = Worker(0)
    run(feed_task([worker]), 0, range(10))
    worker.channel.flush("input", 0)
    reading = read_epochs(worker)
    assert worker.channel.wait_flushed("input", 0, 10.0)
    worker.channel.finish("input")
    reading.result()
    eventually(lambda: worker.listener.finish_calls(0.0), "no call is under way")
    worker.close()


@pytest.mark.attack("A15")
def test_a_feeder_sends_nothing_to_a_worker_of_another_rank():
    """An endpoint that another worker has taken over, or that a roster has wrong."""
    with workers(1) as (worker,):
        target = FeedTarget(worker.rank + 1, "worker:1", worker.listener.endpoint)
        link = WorkerLink(target, CREDENTIALS, "input")
        link.open(5.0)
        assert link.connection is None
        assert link.lost is not None
        assert "expected worker:1 generation 0" in link.lost.reason
        assert f"found worker:{worker.rank}" in link.lost.reason
