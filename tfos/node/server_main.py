"""Main function of a node's server process: its document, its link, the report of its failure.

Covers: what parameter servers and TensorFlow's servers begin and end with.
Does not: serve (tfos.node.ps_process, tfos.native.server_process).
Runs in: the server's process, on its main thread.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from rpc.auth.process_memory import forbid_reading
from tfos.node import failure
from tfos.node.child_link import ChildLink, Raised, ToServer
from tfos.node.child_log import start_log
from tfos.node.process_exit import leave
from tfos.node.spec import ChildSpec


class Serving(Protocol):
    """A server between its supervisor and its clients."""

    def run(self) -> None:
        """Serve until the supervisor stops this node."""


def run_server(body: bytes, make: Callable[[ChildSpec, ChildLink[ToServer]], Serving]) -> NoReturn:
    """Run a server to its end, and end the process.

    Args:
        body: the child's document.
        make: makes the server of the document and the link to the supervisor.
    """
    forbid_reading()  # of the cluster's secret
    spec = msgspec.msgpack.decode(body, type=ChildSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_log()
    link: ChildLink[ToServer] = ChildLink(socket.socket(fileno=spec.link_fd), ToServer)
    try:
        make(spec, link).run()
    except BaseException as error:  # whatever it is, the driver must read it
        text = failure.user_traceback(error, frozenset())
        link.send(Raised(failure.type_name(error), failure.text_of(error), text))
        raise
    leave()
