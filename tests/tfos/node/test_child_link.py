"""The framing of the link between a supervisor and its child."""

import os
import socket
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tfos.control import messages
from tfos.errors import LinkError
from tfos.node import child_link
from tfos.node.child_link import MAX_MESSAGE_BYTES, ChildLink, FromChild, Progress, Raised


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    supervisor: ChildLink = ChildLink(left, FromChild)
    child: ChildLink = ChildLink(right, messages.Order)
    yield supervisor, child, right
    supervisor.close()
    child.close()


def test_messages_arrive_whole_and_in_order(ends):
    supervisor, child, _ = ends
    sent = [
        Progress({"steps": 3.0}, (messages.FeedSnapshot("input", fed_rows=7),)),
        Raised("ValueError", "bad", "Traceback"),
        messages.Done(),
    ]
    for message in sent:
        assert child.send(message)
    assert [supervisor.receive() for _ in sent] == sent
    assert supervisor.send(messages.Stop("over", 2.0))
    assert child.receive() == messages.Stop("over", 2.0)


def test_ready_messages_are_returned_without_waiting_and_a_half_one_is_kept(ends):
    supervisor, child, raw = ends
    assert supervisor.receive_ready() == ([], True)
    child.send(messages.PhaseChanged("one"))
    raw.send(struct.pack("<I", 40) + b"half")
    assert supervisor.receive_ready() == ([messages.PhaseChanged("one")], True)
    assert supervisor.receive_ready() == ([], True)


def test_the_last_words_of_a_closed_peer_are_read(ends):
    supervisor, child, _ = ends
    child.send(messages.Done())
    child.close()
    assert supervisor.receive_ready() == ([messages.Done()], False)
    assert supervisor.receive() is None
    assert supervisor.send(messages.Stop("x")) is False


@pytest.mark.parametrize(
    "raw_bytes",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 3) + b"\x80ab",
        struct.pack("<I", 9) + b"\x81\xa4type\xa2\xff\xfe",
        struct.pack("<I", 5013) + b"\x82\xa4type\xa4Done\xa1x" + b"\x91" * 5000,
    ],
    ids=["too long", "no message", "not UTF-8", "nested"],
)
def test_garbage_is_a_typed_error(ends, raw_bytes):
    supervisor, _, raw = ends
    raw.send(raw_bytes)
    with pytest.raises(LinkError):
        supervisor.receive_ready()


def test_a_peer_that_does_not_read_is_given_up_after_the_deadline(ends):
    child = ends[1]
    big = Raised("E", "x" * 1_000_000, "")
    assert child.send(big, timeout_s=0.05) is False


def test_threads_do_not_mix_their_messages(ends):
    supervisor, child, _ = ends
    num_threads, per_thread = 4, 50

    def send(number: int) -> None:
        for step in range(per_thread):
            child.send(Progress({"thread": float(number), "step": float(step)}))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    seen = [supervisor.receive() for _ in range(num_threads * per_thread)]
    for thread in threads:
        thread.join(5)
    for number in range(num_threads):
        steps = [m.values["step"] for m in seen if m.values["thread"] == number]
        assert steps == [float(step) for step in range(per_thread)]


def test_a_wait_of_weeks_is_one_of_many_polls(ends, monkeypatch):
    supervisor, child, _ = ends
    child.send(messages.Done())
    assert supervisor.receive(3e6) == messages.Done()
    monkeypatch.setattr(child_link, "_POLL_S", 0.01)
    with pytest.raises(TimeoutError):
        supervisor.receive(0.05)
    later = threading.Timer(0.05, lambda: child.send(messages.Done()))
    later.start()
    assert supervisor.receive(3e6) == messages.Done()
    later.join()


def test_a_wait_for_a_message_has_its_bound(ends):
    supervisor, _, _ = ends
    with pytest.raises(TimeoutError):
        supervisor.receive(0.01)


def test_what_the_peer_sent_before_its_end_arrives(ends):
    supervisor, child, _ = ends
    sent = [Raised("ValueError", "bad", "Traceback"), messages.Done()]
    for each in sent:
        child.send(each)
    child.close()
    assert [supervisor.receive(), supervisor.receive(), supervisor.receive()] == [*sent, None]


def test_a_process_that_cannot_carry_out_an_order_ends_and_takes_no_later_one(ends, monkeypatch):
    supervisor, child, _ = ends
    codes: list[int] = []
    monkeypatch.setattr(child_link, "os", SimpleNamespace(_exit=codes.append))
    orders = []

    def on_order(order):
        orders.append(order)
        raise RuntimeError("can't start new thread")

    for order in (messages.WorkerDone(0), messages.Stop("over")):
        supervisor.send(order)
    child_link.start_order_thread(child, on_order).join(10)
    assert (codes, orders) == ([1], [messages.WorkerDone(0)])


def test_a_child_may_report_every_event_that_its_supervisor_does_not_make():
    own = {messages.CutShort, messages.Failed, messages.Restarted, messages.TensorBoardUp}
    assert set(FromChild.__args__) == set(messages.Event.__args__) - own | {Progress, Raised}


def test_the_end_of_the_peers_process_is_the_links_although_its_fork_holds_it_open(ends):
    supervisor, child, _ = ends
    child.send(messages.Done())
    process = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = os.pidfd_open(process.pid)
    try:
        process.wait(60)
        assert supervisor.receive(60, peer_pidfd=pidfd) == messages.Done()
        assert received_or_silence(supervisor, pidfd) is None
    finally:
        os.close(pidfd)


def received_or_silence(link, pidfd):
    try:
        return link.receive(1, peer_pidfd=pidfd)
    except TimeoutError:
        return "silence"
