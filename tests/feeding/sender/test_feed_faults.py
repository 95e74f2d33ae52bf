"""Workers and trainers that die, stand still or miscount while rows are on their way."""

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from feeding.errors import FeedTimeout, NoWorkerLeft, ResultCountError, TrainerFailed
from feeding.protocol.messages import Hello
from feeding.protocol.row_ranges import AcceptedRows
from feeding.receiver.data_feed import DataFeed
from feeding.sender.unreachable import UNREACHABLE
from feeding.sender.worker_link import FeedTarget, WorkerLink, greet
from rpc.client.connection import connect
from rpc.endpoint import Endpoint
from rpc.errors import Unreachable
from tests.support.feed import (
    CONFIG,
    CREDENTIALS,
    Background,
    answer_all,
    eventually,
    feed_task,
    inference_task,
    read_epochs,
    worker_rows,
    workers,
)

pytestmark = pytest.mark.socket

SMALL = dataclasses.replace(CONFIG, max_inflight_bytes=4000, chunk_rows=10)
WIDE = [[0.5] * 10] * 2000  # a chunk is 800 bytes


def run(task, partition, rows):
    return list(task(partition, iter(rows)))


def background(task, partition, rows):
    return Background(lambda: run(task, partition, rows))


@pytest.mark.fault("F36")
def test_feeders_that_wait_get_the_trainers_error_at_once():
    with workers(1, SMALL) as (worker,):
        feeding = [background(feed_task([worker], config=SMALL), p, WIDE) for p in range(3)]
        eventually(lambda: worker.channel.stats("input").unread_bytes > 4000, "all wait")
        worker.channel.fail("division by zero", error_type="ZeroDivisionError")
        for feeder in feeding:
            with pytest.raises(TrainerFailed, match="worker:0: division by zero"):
                feeder.result()


@pytest.mark.fault("F36")
def test_the_first_trainer_that_fails_ends_feeding_though_another_lives():
    with workers(2, SMALL) as (failing, healthy):
        reading = read_epochs(healthy)
        failing.channel.fail("boom")
        with pytest.raises(TrainerFailed, match="worker:0: boom"):
            run(feed_task([failing, healthy], config=SMALL), 0, WIDE)
        healthy.channel.finish("input")
        reading.result()


@pytest.mark.fault("F36")
def test_all_workers_gone_is_an_error_at_once_that_names_them():
    with workers(2, SMALL) as both:
        feeding = background(feed_task(both, config=SMALL), 7, WIDE)
        eventually(
            lambda: all(w.channel.stats("input").unread_bytes > 4000 for w in both), "both full"
        )
        for worker in both:
            worker.listener.close()
        with pytest.raises(NoWorkerLeft, match=r"partition 7 .*worker:0: .*; worker:1: ") as caught:
            feeding.result()
        assert "PeerGone" in str(caught.value)


@pytest.mark.fault("F01")
@pytest.mark.parametrize("only", [None, ((10, 200), (300, 400))], ids=["all", "some"])
def test_what_no_worker_was_left_to_take_is_reported_where_one_may_be_started_again(only):
    """Rows of the chunk in flight are unsent as well: the worker may not have accepted them."""
    with workers(1, SMALL) as (worker,):
        again = None if only is None else {7: only}
        task = feed_task([worker], config=SMALL, keeps_unsent=True, again=again)
        feeding = background(task, 7, WIDE)
        eventually(lambda: worker.channel.stats("input").unread_bytes > 4000, "full")
        worker.listener.close()
        (report,) = feeding.result()
    wanted = [row for span in only or ((0, len(WIDE)),) for row in range(*span)]
    (packed,) = report.accepted.values()
    accepted = [row for span in AcceptedRows.unpack(packed).spans() for row in range(*span)]
    unsent = [row for span in report.unsent for row in range(*span)]
    assert accepted
    assert unsent
    assert sorted(accepted + unsent) == wanted
    assert (report.rows, report.dropped_rows) == (len(wanted), len(unsent))
    assert report.partition_rows == len(WIDE)
    assert report.no_worker.startswith("partition 7 has no worker left to go to: worker:0: ")


@pytest.mark.fault("F36")
def test_a_cluster_without_workers_is_an_error_at_once():
    with pytest.raises(NoWorkerLeft, match="the cluster has none"):
        run(feed_task([]), 0, [1])


@pytest.mark.fault("F01")
@pytest.mark.parametrize("after_rows", [0, 10, 300, 900])
def test_a_worker_that_dies_while_fed_is_replaced_by_the_others(after_rows):
    with workers(3) as (dying, *others):
        readers = [read_epochs(worker) for worker in others]
        read_epochs(dying)

        def rows():
            for row in range(1000):
                if row == after_rows:
                    dying.listener.close()
                yield row

        (report,) = run(feed_task([dying, *others]), 0, rows())
        for worker in others:
            worker.channel.finish("input")
        read = [v for r in readers for b in r.result()[0] for v in b.nest().tolist()]
        (lost,) = report.lost
        assert (lost.process, lost.name) == (0, "worker:0")
        assert report.rows == 1000
        assert report.dropped_rows == 0
        assert sum(worker_rows(report).values()) == 1000
        # Nothing is fed twice: what the dead worker had accepted is the only gap.
        assert len(read) == len(set(read)) == 1000 - worker_rows(report).get(0, 0)


@pytest.mark.fault("F01")
def test_a_worker_that_dies_after_its_last_chunk_is_still_reported():
    with workers(2) as (dying, worker):
        reading = read_epochs(worker)

        def rows():
            for row in range(1000):
                if row == 100:
                    dying.channel.drain()  # it says so in its next answer and gets no more
                if row == 990:
                    dying.listener.close()
                yield row

        (report,) = run(feed_task([dying, worker]), 0, rows())
        worker.channel.finish("input")
        reading.result()
        (lost,) = report.lost
        assert lost.name == "worker:0"
        assert lost.resent_rows == 0
        assert sum(worker_rows(report).values()) == report.rows == 1000


@pytest.mark.fault("F01")
def test_a_worker_that_is_gone_before_the_first_row_is_reported():
    with workers(2) as (gone, worker):
        targets = [gone, worker]
        task = feed_task(targets)
        gone.listener.close()
        (report,) = run(task, 0, range(40))
        assert worker_rows(report) == {1: 40}
        assert report.lost[0].name == "worker:0"


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_a_trainer_that_stands_still_is_named_with_its_unread_bytes():
    config = dataclasses.replace(SMALL, feed_timeout_s=1.0)
    with workers(2, config) as both:
        began = time.monotonic()
        with pytest.raises(FeedTimeout) as caught:
            run(feed_task(both, config=config), 0, WIDE)
        assert 1.0 <= time.monotonic() - began < 10.0
        text = str(caught.value)
        assert "no worker consumed anything of feed 'input' for 1 s" in text
        for worker in both:
            unread = worker.channel.stats("input").unread_bytes
            assert f"worker:{worker.rank} has {unread} bytes unread" in text


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_a_slow_trainer_is_not_a_stuck_one():
    config = dataclasses.replace(SMALL, feed_timeout_s=2.4)
    with workers(1, config) as (worker,):
        feeding = background(feed_task([worker], config=config), 0, WIDE[:100])
        feed = DataFeed(worker.channel)
        for _ in range(10):
            assert len(feed.next_batch(10)) == 10
            threading.Event().wait(0.3)  # a step that takes its time: what is tested
        assert feeding.result()[0].rows == 100


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_a_frozen_worker_does_not_stop_rows_for_the_others():
    config = dataclasses.replace(CONFIG, connect_timeout_s=2.0)
    with workers(1, config) as (worker,):
        frozen = WorkerProcess()
        try:
            frozen.signal(signal.SIGSTOP)
            task = feed_task([worker], config=config)
            task = dataclasses.replace(task, targets=(frozen.target(1), *task.targets))
            (report,) = run(task, 0, range(100))
            assert worker_rows(report) == {0: 100}
            assert report.lost[0].name == "worker:1"
        finally:
            frozen.close()


@contextlib.contextmanager
def silent_until(worker, feeding, monkeypatch):
    """Hold up a worker's answers until the feeder has given up on one twice, and at most 20 s."""
    given_up = []
    lose = WorkerLink.lose

    def counted(link, reason, *args, **fields):
        given_up.append(link.target.name)
        lose(link, reason, *args, **fields)

    monkeypatch.setattr(WorkerLink, "lose", counted)
    with worker.channel._state.changed:
        yield
        name = f"worker:{worker.rank}"
        eventually(lambda: given_up.count(name) >= 2 or feeding[0].done, "two tries")


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_a_worker_that_answers_nobody_for_a_while_is_fed_once_it_does(monkeypatch):
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.3)
    with workers(1, config) as (worker,):
        feeding: list[Background] = []
        with silent_until(worker, feeding, monkeypatch):
            feeding.append(background(feed_task([worker], config=config), 0, range(100)))
        (report,) = feeding[0].result()
    assert (worker_rows(report), report.lost) == ({0: 100}, ())


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_a_worker_that_answers_nobody_answers_inference_once_it_does(monkeypatch):
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.3)
    with workers(1, config) as (worker,):
        feeding: list[Background] = []
        with silent_until(worker, feeding, monkeypatch):
            feeding.append(background(inference_task([worker], config), 0, range(100)))
        answering = answer_all(worker, lambda rows: rows, 10)
        assert feeding[0].result() == list(range(100))
        worker.channel.finish("input")
        answering.result()


@pytest.mark.fault("F37")
@pytest.mark.slow
def test_rows_of_a_worker_that_answers_nobody_for_a_while_are_fed_once_exactly_once(monkeypatch):
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.3)
    with workers(2, config) as both:
        first, second = both
        task = feed_task([first], config=config, exactly_once=True)
        run(task, 0, range(100))
        feeding: list[Background] = []
        with silent_until(first, feeding, monkeypatch):
            again = feed_task(both, config=config, exactly_once=True)
            feeding.append(background(again, 0, range(300)))
        (report,) = feeding[0].result()
        fed = [worker.channel.stats("input").fed_rows for worker in (first, second)]
    assert sum(fed) == report.rows == 300
    assert (report.dropped_rows, report.lost) == (0, ())


@pytest.mark.fault("F35")
@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
def test_workers_that_never_answer_end_the_feed_with_both_limits(exactly_once):
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.2, feed_timeout_s=0.5)
    with workers(1, config) as (worker,):
        task = feed_task([worker], config=config, exactly_once=exactly_once)
        feeding: list[Background] = []
        with worker.channel._state.changed:
            feeding.append(background(task, 4, range(100)))
            with pytest.raises(
                FeedTimeout, match=r"partition 4: .*0\.5 s.*0\.2 s.*worker:0: .*raise"
            ):
                feeding[0].result()


@contextlib.contextmanager
def gone_hosts(count, monkeypatch):
    """Targets that accept no connection, as an unplugged host, and the list of tries to connect."""
    with contextlib.ExitStack() as stack:
        targets = []
        for number in range(count):
            full = stack.enter_context(socket.socket())
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            stack.enter_context(socket.create_connection(address))  # its queue has no other place
            targets.append(FeedTarget(number + 5, f"worker:{number + 5}", Endpoint(*address)))
        tries = []

        def counted(endpoint, *args, **fields):
            tries.append(endpoint)
            return connect(endpoint, *args, **fields)

        monkeypatch.setattr("feeding.sender.worker_link.connect", counted)
        try:
            yield tuple(targets), tries
        finally:
            UNREACHABLE.clear()


@pytest.mark.fault("F01")
@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True])
def test_a_gone_host_is_waited_for_by_one_partition_only(inference, monkeypatch):
    config = dataclasses.replace(CONFIG, connect_timeout_s=1.0)
    with workers(1, config) as (worker,), gone_hosts(2, monkeypatch) as (gone, tries):
        make = inference_task if inference else feed_task
        task = make([worker], config=config)
        task = dataclasses.replace(task, targets=(*gone, *task.targets))
        answering = answer_all(worker, lambda rows: rows, 10) if inference else None
        for partition in range(3):
            run(task, partition, range(100))  # unread, more than its own host's worker is ahead
        worker.channel.finish("input")
        if answering is not None:
            answering.result()
    assert [tries.count(each.endpoint) for each in gone] == [1, 1]


@pytest.mark.fault("F01")
def test_gone_hosts_are_waited_for_side_by_side_a_few_at_once(monkeypatch):
    monkeypatch.setattr("feeding.sender.worker_link._AT_ONCE", 3)
    together, waits, most, met = threading.Barrier(3), list[int](), list[int](), list[int]()

    def away(endpoint, *args, **fields):
        waits.append(endpoint.port)
        most.append(len(waits))
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(together.wait(10.0))
        waits.remove(endpoint.port)
        raise Unreachable(f"no connection to {endpoint}")

    monkeypatch.setattr("feeding.sender.worker_link.connect", away)
    links = [
        WorkerLink(
            FeedTarget(number, f"worker:{number}", Endpoint("127.0.0.1", 1 + number)),
            CREDENTIALS,
            "input",
        )
        for number in range(6)
    ]
    try:
        greet(links, Hello(feed="input"), 5.0)
    finally:
        UNREACHABLE.clear()
    told = {link.lost.reason.partition(":")[0] for link in links if link.lost is not None}
    assert (told, len(met), max(most)) == ({"Unreachable"}, 6, 3)


@pytest.mark.fault("F01")
@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_gone_host_is_tried_again_where_no_other_answers_or_its_rows_count(
    exactly_once, monkeypatch
):
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.3)
    with workers(1, config) as (worker,), gone_hosts(1, monkeypatch) as (gone, tries):
        task = feed_task([worker], config=config, exactly_once=exactly_once)
        others = task.targets if exactly_once else ()
        task = dataclasses.replace(task, targets=(*gone, *others))
        for partition in range(2):
            if others:
                run(task, partition, range(40))
                continue
            with pytest.raises(NoWorkerLeft, match="worker:5: Unreachable: "):
                run(task, partition, range(40))
    assert tries.count(gone[0].endpoint) == 2


@pytest.mark.fault("F35")
@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_silent_worker_without_a_place_for_further_connections_is_not_gone(exactly_once):
    """It takes none of them: those of earlier tries fill its kernel's queue."""
    config = dataclasses.replace(CONFIG, connect_timeout_s=0.2, feed_timeout_s=0.8)
    with workers(1, config) as (worker,), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        target = FeedTarget(5, "worker:5", Endpoint(*silent.getsockname()))
        task = feed_task([worker], config=config, exactly_once=exactly_once)
        others = task.targets if exactly_once else ()
        task = dataclasses.replace(task, targets=(target, *others))
        with pytest.raises(FeedTimeout, match=r"worker:5: Unreachable.*raise feed_timeout"):
            run(task, 0, range(40))
        assert worker.channel.stats("input").fed_rows == 0
    assert not UNREACHABLE.has(target.endpoint)


@pytest.mark.fault("F01")
@pytest.mark.slow
def test_a_killed_worker_process_is_seen_at_once():
    dying = WorkerProcess()
    try:
        with workers(1) as (worker,):
            task = feed_task([worker])
            task = dataclasses.replace(task, targets=(dying.target(1), *task.targets))

            def rows():
                for row in range(2000):
                    if row == 500:
                        dying.signal(signal.SIGKILL)
                    yield row

            (report,) = run(task, 0, rows())
            assert report.lost[0].name == "worker:1"
            assert sum(worker_rows(report).values()) == 2000
    finally:
        dying.close()


WRONG = [
    (lambda rows: rows[:-1], 100, "returned 99 results for 100 rows"),
    (lambda rows: [*rows, 0], 100, "returned 101 results for 100 rows"),
    (lambda rows: [], 100, "returned 0 results for 100 rows"),
    (lambda rows: rows[:-1], 250, "returned 249 results for 250 rows"),
]


@pytest.mark.fault("F38")
@pytest.mark.parametrize(("answer", "batch_size", "text"), WRONG)
def test_a_wrong_number_of_results_is_an_error_on_both_sides(answer, batch_size, text):
    with workers(2) as (_, worker):
        loop = answer_all(worker, answer, batch_size)
        with pytest.raises(ResultCountError, match=f"worker:1 {text}"):
            run(inference_task([worker]), 0, range(250))
        with pytest.raises(ResultCountError, match=f"worker:1 {text}"):
            loop.result()


@pytest.mark.fault("F38")
def test_a_trainer_that_stops_without_answering_is_an_error_on_both_sides():
    with workers(1) as (worker,):

        def loop():
            feed = DataFeed(worker.channel, train_mode=False)
            feed.next_batch(10)
            feed.terminate()

        training = Background(loop)
        with pytest.raises(ResultCountError, match="worker:0 returned 0 results for 10 rows"):
            run(inference_task([worker]), 0, range(100))
        with pytest.raises(ResultCountError, match="returned 0 results for 10 rows"):
            training.result()


@pytest.mark.fault("F38")
def test_main_fun_that_returns_early_fails_the_rows_it_left():
    with workers(1) as (worker,):

        def loop():
            feed = DataFeed(worker.channel, train_mode=False)
            feed.batch_results(list(feed.next_batch(10)))
            worker.channel.drain()

        training = Background(loop)
        with pytest.raises(ResultCountError, match=r"stopped with \d+ results for"):
            run(inference_task([worker]), 0, range(100))
        training.result()
        with pytest.raises(NoWorkerLeft, match="no worker takes rows for inference any more"):
            run(inference_task([worker]), 0, range(100))


@pytest.mark.fault("F38")
def test_results_that_nobody_asked_for_are_an_error():
    with workers(1) as (worker,):
        feed = DataFeed(worker.channel)
        with pytest.raises(ResultCountError, match="returned 1 results for 0 rows"):
            feed.batch_results([1])


def test_a_result_that_cannot_travel_is_an_error_on_both_sides():
    with workers(1) as (worker,):
        loop = answer_all(worker, lambda rows: [object() for _ in rows])
        with pytest.raises(Exception, match=r"a result fits no column.*object"):
            run(inference_task([worker]), 0, range(10))
        with pytest.raises(Exception, match="object"):
            loop.result()


@pytest.mark.fault("F36")
def test_a_worker_that_dies_during_inference_is_an_error_with_what_was_answered():
    with workers(1) as (worker,):
        loop = answer_all(worker, lambda rows: rows)
        results = inference_task([worker])(0, iter(range(1000)))
        assert next(results) == 0
        worker.listener.close()
        told = r"rows were answered\. .*started again .* call inference\(\) again"
        with pytest.raises(NoWorkerLeft, match=told):
            list(results)
        with pytest.raises(
            NoWorkerLeft, match=r"worker left to go to: .* call inference\(\) again"
        ):
            run(inference_task([worker]), 0, range(10))
        worker.channel.close()
        with pytest.raises(Exception, match="stopping"):
            loop.result()


@pytest.mark.fault("F36")
@pytest.mark.slow
def test_inference_without_a_consumer_times_out_naming_the_worker():
    config = dataclasses.replace(CONFIG, feed_timeout_s=1.0)
    with workers(1, config) as (worker,):
        expected = r"0 of 10 rows answered, then nothing for 1 s: worker:0 has \d+ bytes unread"
        with pytest.raises(FeedTimeout, match=expected):
            run(inference_task([worker], config), 0, range(10))


@pytest.mark.fault("F35")
@pytest.mark.slow
def test_memory_stays_flat_while_much_more_than_the_limit_is_fed():
    config = dataclasses.replace(CONFIG, chunk_rows=256, max_inflight_bytes=4 << 20)
    rows = [b"x" * 4096] * 256

    def many():
        for _ in range(400):  # 400 MB in all
            yield from rows

    with workers(1, config) as (worker,):
        reading = read_epochs_dropping(worker)
        run(feed_task([worker], config=config), 0, rows * 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (report,) = run(feed_task([worker], config=config), 1, many())
        growth_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        worker.channel.finish("input")
        assert reading.result() == report.rows + 20 * 256
        assert growth_mib < 40


def read_epochs_dropping(worker):
    def read():
        feed = DataFeed(worker.channel)
        total = 0
        while not feed.should_stop():
            total += len(feed.next_batch(1000))
        return total

    return Background(read)


WORKER_PROGRAM = """
import sys
from feeding.receiver.channel import FeedChannel
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener

channel = FeedChannel(worker="worker:1")
secret = sys.stdin.buffer.readline().strip()
credentials = Credentials(sys.argv[1], bytes.fromhex(secret.decode()))
listener = Listener(channel.handler, credentials, Identity(Role.WORKER, 1))
listener.bind_tcp("127.0.0.1")
listener.start()
sys.stdout.write(f"{listener.endpoint.port}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


class WorkerProcess:
    """A worker in a process of its own, which can be frozen and killed."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER_PROGRAM, CREDENTIALS.cluster_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(CREDENTIALS.secret.hex().encode() + b"\n")
        self._process.stdin.flush()
        self._port = int(self._process.stdout.readline())

    def target(self, rank):
        return FeedTarget(rank, f"worker:{rank}", Endpoint("127.0.0.1", self._port))

    def signal(self, number):
        self._process.send_signal(number)

    def close(self):
        self._process.kill()
        self._process.communicate(timeout=10)
