"""Feeders and a worker's channel: what one sends the other reads, in order."""

import dataclasses
import functools
import pickle
from typing import Any, get_args

import cloudpickle
import msgspec
import numpy as np
import pytest

from feeding.columnar.batch import EpochEnd
from feeding.config import FeedConfig
from feeding.encode.pickled import PickledPacker
from feeding.errors import FeedClosed, FeedError, FeedTimeout, RowError, TrainerFailed
from feeding.protocol.messages import Fetch, Hello, Put, Recall, Request, Wait, encode
from feeding.receiver.channel import FeedChannel
from feeding.receiver.data_feed import DataFeed
from feeding.sender.task import FeedTask
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import connect
from rpc.errors import RemoteError
from tests.support.feed import (
    CONFIG,
    CREDENTIALS,
    WAIT_S,
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


def run(task, partition, rows):
    return list(task(partition, iter(rows)))


def background(task, partition, rows):
    return Background(lambda: run(task, partition, rows))


def finish(some, epochs=1):
    for worker in some:
        for epoch in range(epochs):
            worker.channel.flush("input", epoch)
        worker.channel.finish("input")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_rows_come_out_once_in_full_batches_across_partitions(transport):
    with workers(1, transport=transport) as (worker,):
        reading = read_epochs(worker, 10)
        for epoch in range(2):
            for partition in range(3):
                rows = [([r, partition], epoch) for r in range(33)]
                (report,) = run(feed_task([worker], epoch), partition, rows)
                assert (report.rows, worker_rows(report), report.lost) == (33, {0: 33}, ())
            worker.channel.flush("input", epoch)
            assert worker.channel.wait_flushed("input", epoch, 10.0)
        worker.channel.finish("input")
        epochs = reading.result()
        assert len(epochs) == 2
        for epoch, batches in enumerate(epochs):
            assert [b.num_rows for b in batches] == [10] * 9 + [9]
            x, y = (np.concatenate([b.nest()[i] for b in batches]) for i in (0, 1))
            assert x.tolist() == [[r, p] for p in range(3) for r in range(33)]
            assert set(y) == {epoch}
        stats = worker.channel.stats("input")
        assert (stats.fed_rows, stats.trained_rows, stats.dropped_rows) == (198, 198, 0)
        assert stats.unread_bytes == 0


def test_two_workers_read_what_three_tasks_feed_and_nothing_is_lost():
    with workers(2, transport="tcp") as both:
        readers = [read_epochs(worker, 8) for worker in both]
        feeders = [
            background(feed_task(both), p, [p * 1000 + r for r in range(300)]) for p in range(3)
        ]
        reports = [feeder.result()[0] for feeder in feeders]
        finish(both)
        read = [
            value
            for reader in readers
            for batches in reader.result()
            for batch in batches
            for value in batch.nest().tolist()
        ]
        assert sorted(read) == sorted(p * 1000 + r for p in range(3) for r in range(300))
        for worker in both:
            fed = sum(worker_rows(report)[worker.rank] for report in reports)
            assert fed == worker.channel.stats("input").fed_rows


@pytest.mark.parametrize("is_remote", [False, True])
def test_two_workers_that_read_nothing_yet_share_evenly(is_remote):
    with workers(2, transport="tcp") as both:
        task = feed_task(both)
        if is_remote:
            here, there = task.targets
            remote = msgspec.structs.replace(there.endpoint, boot_id="")
            there = msgspec.structs.replace(there, endpoint=remote)
            task = dataclasses.replace(task, targets=(here, there))
        feeders = [background(task, p, list(range(300))) for p in range(3)]
        reports = [feeder.result()[0] for feeder in feeders]
        shares = [sum(worker_rows(report)[worker.rank] for report in reports) for worker in both]
        assert sum(shares) == 900
        assert min(shares) > 350


def test_pickled_batches_arrive_as_their_rows():
    rows = [([r % 256, 7], r % 10) for r in range(100)]
    batches = [pickle.dumps(rows[at : at + 30], 5) for at in range(0, 100, 30)]
    stored = functools.partial(PickledPacker, loads=pickle.loads)
    with workers(1) as (worker,):
        (report,) = run(feed_task([worker], packer=stored), 0, batches)
        assert (report.rows, worker_rows(report)) == (100, {0: 100})
        worker.channel.drain()
        (report,) = run(feed_task([worker], epoch=1, packer=stored), 0, batches)
        assert (report.rows, worker_rows(report)[0] + report.dropped_rows) == (100, 100)


@pytest.mark.fault("F34")
def test_uneven_and_empty_partitions_do_not_hang():
    with workers(2) as both:
        readers = [read_epochs(worker, 10) for worker in both]
        sizes = [0, 1, 57, 0, 16]
        total = sum(
            run(feed_task(both), p, [[p, r] for r in range(n)])[0].rows for p, n in enumerate(sizes)
        )
        assert total == sum(sizes)
        finish(both)
        epochs = [reader.result() for reader in readers]
        assert sum(b.num_rows for (batches,) in epochs for b in batches) == total


@pytest.mark.fault("F34")
def test_an_epoch_without_rows_ends_at_once():
    with workers(2) as both:
        readers = [read_epochs(worker) for worker in both]
        assert run(feed_task(both), 0, [])[0].rows == 0
        finish(both)
        assert [reader.result() for reader in readers] == [[[]], [[]]]


def test_unread_bytes_stay_bounded_while_the_trainer_stands_still():
    config = dataclasses.replace(CONFIG, max_inflight_bytes=20_000, chunk_rows=10)
    rows = [np.zeros(100) for _ in range(500)]  # 400 kB; a chunk is 8 kB
    with workers(1, config) as (worker,):
        feeding = [background(feed_task([worker], config=config), p, rows) for p in (0, 1)]
        bound = config.max_inflight_bytes + 2 * 8000
        eventually(
            lambda: worker.channel.stats("input").unread_bytes > config.max_inflight_bytes, "full"
        )
        reading = read_epochs(worker, 25)
        while not all(feeder.done for feeder in feeding):
            assert worker.channel.stats("input").unread_bytes <= bound
        assert [feeder.result()[0].rows for feeder in feeding] == [500, 500]
        finish([worker])
        (batches,) = reading.result()
        assert [b.num_rows for b in batches] == [25] * 40


def test_a_slow_worker_gets_fewer_rows_and_does_not_hold_up_the_other():
    config = dataclasses.replace(CONFIG, max_inflight_bytes=20_000, chunk_rows=10)
    rows = [np.zeros(100) for _ in range(300)]
    with workers(2, config) as (slow, fast):
        reading = read_epochs(fast, 10)
        (report,) = run(feed_task([slow, fast], config=config), 0, rows)
        assert worker_rows(report)[0] * 800 <= 20_000 + 8000
        assert worker_rows(report)[1] == 300 - worker_rows(report)[0]
        finish([slow, fast])
        assert sum(b.num_rows for b in reading.result()[0]) == worker_rows(report)[1]
        assert len(read_epochs(slow).result()[0]) > 0


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_a_later_epoch_never_overtakes_the_end_of_the_one_before(size):
    with workers(1) as (worker,):
        run(feed_task([worker], epoch=1), 0, [1] * 40)
        run(feed_task([worker], epoch=0), 0, [0] * 40)
        reading = read_epochs(worker, size)
        finish([worker], epochs=2)
        epochs = [[v for b in batches for v in b.nest().tolist()] for batches in reading.result()]
        assert epochs == [[0] * 40, [1] * 40]


def test_rows_of_an_ended_epoch_are_refused():
    with workers(1) as (worker,):
        worker.channel.flush("input", 0)
        with pytest.raises(FeedError, match="epoch 1 had ended when rows 0"):
            run(feed_task([worker]), 3, [1, 2, 3])
        assert worker.channel.stats("input").fed_rows == 0


def test_several_feeds_are_apart():
    with workers(1) as (worker,):
        run(feed_task([worker], feed="train"), 0, [1, 2, 3])
        run(feed_task([worker], feed="validation"), 0, ["a"])
        for feed in ("train", "validation"):
            worker.channel.flush(feed, 0)
            worker.channel.finish(feed)
        train = read_epochs(worker, 5, feed="train").result()
        validation = read_epochs(worker, 5, feed="validation").result()
        assert train[0][0].nest().tolist() == [1, 2, 3]
        assert validation[0][0].nest().tolist() == ["a"]


def test_draining_counts_and_lets_feeders_end_without_sending():
    with workers(1) as (worker,):
        run(feed_task([worker]), 0, list(range(50)))
        worker.channel.drain()
        rows = iter(range(500))
        (report,) = run(feed_task([worker]), 1, rows)
        assert report.rows == 500
        assert next(rows, "all read") == "all read"
        stats = worker.channel.stats("input")
        assert stats.dropped_rows == stats.fed_rows == 50 + worker_rows(report)[0]
        assert report.dropped_rows + worker_rows(report)[0] == 500
        worker.channel.flush("input", 0)
        assert worker.channel.wait_flushed("input", 0, 1.0)


def validating(worker):
    """Order the end of an epoch with validation rows, and of these."""
    worker.channel.flush("input", 0, ("validation", 0))
    run(feed_task([worker], feed="validation"), 0, ["a"])
    worker.channel.flush("validation", 0)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_validation_of_an_epoch_of_which_a_terminated_feed_trained_nothing_is_dropped(is_first):
    """Nobody reads it, so the driver would wait for its end."""
    with workers(1) as (worker,):
        channel = worker.channel
        run(feed_task([worker]), 0, [1, 2, 3])
        if is_first:
            channel.drain("input")
        validating(worker)
        if not is_first:
            channel.drain("input")
        assert channel.wait_flushed("validation", 0, 1.0)
        assert channel.stats("validation").dropped_rows == 1


def test_validation_of_an_epoch_that_a_terminated_feed_has_trained_in_part_is_read():
    """A callback may terminate the feed within an epoch, and fit validates that epoch."""
    with workers(1) as (worker,):
        run(feed_task([worker]), 0, list(range(50)))
        feed = DataFeed(worker.channel)
        feed.next_batch(2)
        feed.terminate()
        validating(worker)
        worker.channel.finish("validation")
        epochs = read_epochs(worker, 5, feed="validation").result()
        assert [epoch[0].nest().tolist() for epoch in epochs] == [["a"]]


def test_a_feed_tells_whether_it_was_terminated_or_all_of_them_ended():
    with workers(1) as (worker,):
        for feed in ("input", "other"):
            run(feed_task([worker], feed=feed), 0, [1])
        worker.channel.drain("other")
        worker.channel.drain()
        found = [worker.channel.stats(feed) for feed in ("input", "other")]
        assert [(each.is_drained, each.is_terminated) for each in found] == [
            (True, False),
            (True, True),
        ]


def test_a_worker_that_finished_gets_no_rows_while_another_trains():
    with workers(2) as (done, busy):
        done.channel.drain()
        (report,) = run(feed_task([done, busy]), 0, list(range(100)))
        assert worker_rows(report) == {1: 100}


def test_terminate_drops_what_is_left_and_releases_the_feeder():
    config = dataclasses.replace(CONFIG, max_inflight_bytes=1000)
    with workers(1, config) as (worker,):
        feeding = background(feed_task([worker], config=config), 0, [[1.5] * 50] * 400)
        feed = DataFeed(worker.channel)
        assert len(feed.next_batch(20)) == 20
        feed.terminate()
        assert feed.should_stop()
        (report,) = feeding.result()
        stats = worker.channel.stats("input")
        assert report.rows == 400
        assert stats.taken_rows == 20
        assert stats.fed_rows + report.dropped_rows == 400
        assert stats.dropped_rows == stats.fed_rows - 20


def test_inference_gives_one_result_per_row_in_order():
    with workers(2) as both:
        loops = [answer_all(w, lambda rows: [(r[0] * 2, "x") for r in rows], 10) for w in both]
        given = {p: [[p * 100 + r, 0] for r in range(n)] for p, n in enumerate([57, 0, 1, 33, 16])}
        asking = {p: background(inference_task(both), p, given[p]) for p in given}
        for p, rows in given.items():
            assert asking[p].result() == [(row[0] * 2, "x") for row in rows]
        finish(both)
        sizes = [size for loop in loops for size in loop.result()]
        # A batch ends with its partition and crosses the borders of 16-row chunks.
        assert sorted(n for n in sizes if n) == sorted(
            [10] * 5 + [7] + [1] + [10] * 3 + [3] + [10, 6]
        )
        assert sum(w.channel.stats("input").taken_rows for w in both) == 107


@pytest.mark.parametrize(
    "result",
    [1, 2.5, "text", b"bytes", True, (1, "a"), [1.0, 2.0], {"p": 0.5, "q": [1, 2]}],
    ids=lambda value: type(value).__name__,
)
def test_results_of_any_kind_come_back_as_they_were(result):
    with workers(1) as (worker,):
        loop = answer_all(worker, lambda rows: [result] * len(rows))
        assert run(inference_task([worker]), 0, range(23)) == [result] * 23
        finish([worker])
        loop.result()


def test_large_results_and_arrays_come_back():
    with workers(1) as (worker,):
        loop = answer_all(worker, lambda rows: [np.full(50_000, r) for r in rows])
        results = run(inference_task([worker]), 0, range(40))
        assert [int(r[0]) for r in results] == list(range(40))
        assert {r.shape for r in results} == {(50_000,)}
        finish([worker])
        loop.result()


def test_inference_with_more_rows_than_fit_in_flight():
    config = dataclasses.replace(CONFIG, max_inflight_bytes=2000)
    with workers(1, config) as (worker,):
        loop = answer_all(worker, lambda rows: [len(r) for r in rows], 300)
        rows = [[0.5] * 40 for _ in range(1000)]
        assert run(inference_task([worker], config), 0, rows) == [40] * 1000
        finish([worker])
        assert loop.result()[:4] == [300, 300, 300, 100]


def test_a_feeder_that_leaves_frees_the_trainer_from_its_rows():
    with workers(1) as (worker,):
        loop = answer_all(worker, lambda rows: rows, 16)
        results: Any = inference_task([worker])(0, iter(range(1000)))
        assert next(results) == 0
        results.close()
        assert run(inference_task([worker]), 1, range(5)) == list(range(5))
        finish([worker])
        loop.result()
        stats = worker.channel.stats("input")
        assert stats.fed_rows == stats.taken_rows + stats.dropped_rows


def test_closing_releases_feeders_and_consumers():
    config = dataclasses.replace(CONFIG, max_inflight_bytes=100)
    with workers(2, config) as (full, idle):
        feeding = background(feed_task([full], config=config), 0, [[1.5] * 50] * 400)
        reading = read_epochs(idle)
        eventually(lambda: full.channel.stats("input").fed_rows > 0, "fed")
        full.channel.close()
        idle.channel.close()
        with pytest.raises(FeedClosed, match="worker:0: the cluster is stopping"):
            feeding.result()
        with pytest.raises(FeedClosed, match="worker:1: the cluster is stopping"):
            reading.result()


def test_a_consumer_does_not_wait_for_ever():
    channel = FeedChannel(FeedConfig(starve_timeout_s=0.05))
    with pytest.raises(FeedTimeout, match=r"brought no rows in 0\.05 s"):
        channel.take("input")


def test_a_row_that_does_not_fit_fails_the_feeder_and_nobody_else():
    with workers(1) as (worker,):
        with pytest.raises(RowError, match="partition 4, row 60, column '0': None"):
            run(feed_task([worker]), 4, [(1, 2)] * 60 + [(None, 2)])
        run(feed_task([worker]), 5, [(3, 4)] * 10)
        finish([worker])
        first = [v for b in read_epochs(worker).result()[0] for v in b.nest()[0].tolist()]
        assert first.count(3) == 10
        assert first.count(1) in (0, 16, 32, 48), "whole chunks, as far as they had come"


@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER, Role.DRIVER, Role.SUPERVISOR])
@pytest.mark.attack("A15")
def test_only_feeders_may_feed(role):
    requests: dict[type, bytes] = {
        Hello: encode(Hello(feed="input")),
        Put: b"refused before it is decoded",
        Wait: encode(Wait("input", 0.0)),
        Fetch: encode(Fetch("input", 0)),
        Recall: encode(Recall("input", 0, 0, 0)),
    }
    assert set(requests) == set(get_args(Request))
    with workers(1) as (worker,):
        connection = connect(worker.listener.endpoint, Identity(role, 0), CREDENTIALS)
        with connection:
            for meta in requests.values():
                with pytest.raises(RemoteError, match="only feeders may"):
                    connection.call(meta, timeout_s=WAIT_S)


def test_a_feeder_may_not_open_feeds_without_end():
    with workers(1) as (worker,):
        connection = connect(worker.listener.endpoint, Identity(Role.FEEDER, 0), CREDENTIALS)
        with connection:
            for i in range(64):
                connection.call(encode(Hello(feed=f"feed{i}")), timeout_s=WAIT_S)
            with pytest.raises(RemoteError, match="64 feeds"):
                connection.call(encode(Hello(feed="one more")), timeout_s=WAIT_S)


OTHER_VERSIONS = {
    "a text in the place of the version": (
        bytes.fromhex("9aa548656c6c6fa5696e707574c0040000c200c200"),
        "not a feed request: Expected `int`, got `str`",
    ),
    "of 6, like this one": (
        bytes.fromhex("98a548656c6c6f06a5696e7075740000c20000"),
        "speaks chunk version 1, this feeder 6",
    ),
    "of 7, unlike this one": (
        bytes.fromhex("95a548656c6c6f079001c0"),
        "speaks chunk version 1, this feeder 7",
    ),
}


@pytest.mark.parametrize(("hello", "told"), OTHER_VERSIONS.values(), ids=OTHER_VERSIONS)
def test_a_feeder_of_another_version_is_refused_with_the_next_step(hello, told):
    with workers(1) as (worker,):
        connection = connect(worker.listener.endpoint, Identity(Role.FEEDER, 0), CREDENTIALS)
        told += ".*; install one version of tfos on all executors$"
        with connection, pytest.raises(RemoteError, match=told):
            connection.call(hello, timeout_s=WAIT_S)


def test_the_trainers_error_reaches_feeders_with_its_traceback():
    with workers(1) as (worker,):
        text = "\n".join(f"line {number} of a traceback" for number in range(400))
        worker.channel.fail("boom", error_type="ZeroDivisionError", remote_traceback=text)
        with pytest.raises(TrainerFailed, match="worker:0: boom") as caught:
            run(feed_task([worker]), 0, [1])
        assert caught.value.error_type == "ZeroDivisionError"
        assert caught.value.remote_traceback == text
        copied = cloudpickle.loads(cloudpickle.dumps(caught.value))
        assert (copied.error_type, str(copied)) == ("ZeroDivisionError", "worker:0: boom")


def test_tasks_carry_only_what_they_need():
    with workers(1) as (worker,):
        for task in (feed_task([worker]), inference_task([worker])):
            data = cloudpickle.dumps(task)
            assert cloudpickle.loads(data) == task
            assert len(data) < 1500
            assert CREDENTIALS.secret.hex() not in repr(task)
            assert repr(CREDENTIALS.secret) not in repr(task)
            names = {field.name for field in dataclasses.fields(task)}
            assert names == {"targets", "credentials", "config", "feed"} | (
                {
                    "epoch",
                    "packer",
                    "shuffle",
                    "exactly_once",
                    "again",
                    "round_number",
                    "keeps_unsent",
                }
                if isinstance(task, FeedTask)
                else set()
            )


def test_a_worker_that_is_late_finds_its_epoch_validated():
    """Whose end may be followed by that of the next one."""
    channel = FeedChannel()
    channel.flush("input", 0)
    assert not channel.is_validated("input", 0)
    for epoch in (1, 2):
        channel.flush("input", epoch, ("validation", epoch))
    assert channel.is_validated("input", 1)
    assert channel.is_validated("input", 2)
    channel.flush("input", 3)
    assert not channel.is_validated("input", 3)


def test_others_train_lost_rows_of_the_epoch_that_was_ended_here_last():
    """Until then this worker has some of them too, and later the others have gone on as well."""
    channel, told = FeedChannel(), []
    channel.feed_again("input", 0)
    for epoch in range(3):
        told.append(channel.others_train("input"))
        channel.flush("input", epoch)
        assert channel.take("input") == EpochEnd(epoch)
        told.append(channel.others_train("input"))
        if epoch == 1:
            channel.feed_again("input", 1)
    assert told == [False, True, True, False, True, False]


def test_a_worker_that_joins_late_tells_nothing_of_the_epochs_before():
    told: list[tuple[Any, ...]] = []
    channel = FeedChannel(on_rows=lambda *rows: told.append(rows))
    channel.begin_at("input", 3)
    channel.settle("input")
    assert told == [("input", 3, 0, 0, 0)]
    assert [each.epoch for each in channel.stats("input").epochs] == [3]
