"""The supervisor's event loop: descriptors, timers, calls from other threads."""

import fcntl
import os
import threading

import pytest

from tfos.node.supervisor.event_loop import EventLoop


@pytest.fixture
def loop():
    event_loop = EventLoop()
    event_loop.set_timer("test is stuck", 10.0, event_loop.stop)
    return event_loop


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            continue


def test_a_readable_descriptor_and_the_end_of_its_writer_are_seen(loop, pipe):
    read, write = pipe
    seen = []

    def react():
        data = os.read(read, 10)
        seen.append(data)
        if data:
            os.close(write)
        else:
            loop.stop()

    loop.watch(read, react)
    os.write(write, b"x")
    loop.run()
    assert seen == [b"x", b""]


def test_the_vanished_reader_of_a_pipe_is_seen_from_its_write_end(loop, pipe):
    read, write = pipe
    loop.watch(write, loop.stop)
    os.close(read)
    loop.run()


def test_timers_fire_in_order_once_and_can_be_moved_or_cancelled(loop):
    seen = []

    def last():
        seen.append("late")
        loop.stop()

    loop.set_timer("b", 0.02, lambda: seen.append("b"))
    loop.set_timer("a", 0.01, lambda: seen.append("a"))
    loop.set_timer("never", 0.01, lambda: seen.append("never"))
    loop.cancel_timer("never")
    loop.cancel_timer("unknown")
    loop.set_timer("late", 5.0, lambda: None)
    loop.advance_timer("late", 0.03, last)
    loop.advance_timer("late", 6.0, lambda: seen.append("later"))
    loop.run()
    assert seen == ["a", "b", "late"]


def test_timers_that_are_all_overdue_fire_in_their_order_and_may_cancel_each_other(loop):
    seen = []

    def first():
        seen.append("first")
        loop.cancel_timer("cancelled")

    def last():
        seen.append("last")
        loop.stop()

    loop.set_timer("last", -1.0, last)
    loop.set_timer("cancelled", -2.0, lambda: seen.append("cancelled"))
    loop.set_timer("first", -3.0, first)
    loop.run()
    assert seen == ["first", "last"]


def test_another_threads_call_runs_in_the_loops_thread(loop):
    seen = []

    def react():
        seen.append(threading.current_thread())
        loop.stop()

    thread = threading.Thread(target=loop.post, args=(react,))
    thread.start()
    loop.run()
    thread.join(5)
    assert seen == [threading.current_thread()]


def test_more_posts_than_the_wake_pipe_holds_all_run(loop):
    size = fcntl.fcntl(loop._wake_write, fcntl.F_SETPIPE_SZ, 4096)
    count = 2 * size
    seen = []
    for number in range(count):
        loop.post(lambda number=number: seen.append(number))
    loop.post(loop.stop)
    loop.run()
    assert len(seen) == count


def test_what_is_unwatched_in_the_same_round_is_not_called(loop, pipe):
    read, write = pipe
    other_read, other_write = os.pipe()
    seen = []

    def first(mine, other):
        seen.append(mine)
        loop.unwatch(other)
        loop.unwatch(mine)
        loop.unwatch(mine)
        loop.stop()

    loop.watch(read, lambda: first(read, other_read))
    loop.watch(other_read, lambda: first(other_read, read))
    os.write(write, b"x")
    os.write(other_write, b"x")
    loop.run()
    assert len(seen) == 1
    os.close(other_read)
    os.close(other_write)
