"""A supervisor's reporter opens the control plane beside the start of the node's child."""

from __future__ import annotations

import queue
import threading

from tfos.control import messages
from tfos.failure import NodeId
from tfos.node.supervisor.reporter import HeartbeatState, Reporter, Unwanted

WAIT_S = 30.0


def reporter(connect, notices):
    register = messages.Register(
        node=NodeId("worker", 0, 0), executor_id="0", host="h", pid=1, boot_id="b"
    )
    return Reporter(connect, register, vitals=HeartbeatState, post=notices.put)


def test_the_control_plane_is_opened_on_another_thread():
    threads: queue.SimpleQueue[int] = queue.SimpleQueue()

    def connect():
        threads.put(threading.get_ident())
        raise OSError("no descriptors")

    each = reporter(connect, queue.SimpleQueue())
    assert threads.empty()
    each.start()
    assert threads.get(timeout=WAIT_S) != threading.get_ident()
    each.finish(WAIT_S)


def test_a_control_plane_that_cannot_be_opened_ends_the_node_with_the_reason():
    notices: queue.SimpleQueue[Unwanted] = queue.SimpleQueue()

    def connect():
        raise ImportError("no gRPC here")

    each = reporter(connect, notices)
    each.start()
    text = "cannot open the control plane: ImportError: no gRPC here"
    assert notices.get(timeout=WAIT_S) == Unwanted(text)
    each.finish(WAIT_S)
