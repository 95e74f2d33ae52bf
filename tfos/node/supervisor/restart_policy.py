"""Restart policy of a parameter server: the state that outlasts a dead child.

Covers: the listening sockets, orders that the next one needs, whether that one restores.
Does not: start or watch children (tfos.node.supervisor), decide how often and how soon
(tfos.control.restarts.budget), load a checkpoint (tfos.node.ps_process).
Runs in: the supervisor.      Threads: its main thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rpc.limits import DEFAULT_LIMITS
from rpc.transport.listen import bound_tcp, short_private_directory
from tfos.control import messages
from tfos.control.restarts.budget import WINDOW_S, RestartBudget
from tfos.failure import NodeFailure
from tfos.node.child_link import HasBegun, ToServer
from tfos.node.spec import NodeBundle


class ChildRestarts:
    """State that a supervisor keeps for the children of one node.

    Args:
        bundle: bundle of the node; a worker, or a server without checkpoints, is never restarted.
    """

    def __init__(self, bundle: NodeBundle) -> None:
        config = bundle.settings.config
        is_restarted = bundle.node.is_ps and config.replaces_servers
        self._budget = RestartBudget(config.restarts.ps if is_restarted else 0)
        self._is_ps = bundle.node.is_ps
        self.has_begun: bool | None = None
        """Whether the cluster has, for the next child; None until the driver has been reached."""
        self._is_released = self._has_child = False
        self._started_s = 0.0
        self._orders: list[messages.AboutWorker] = []
        self._sockets: list[socket.socket] = []

    @property
    def count(self) -> int:
        """Restarts since the node began; they number the children's generations."""
        return self._budget.count

    @property
    def limit(self) -> int:
        """Restarts that are allowed within the budget's window."""
        return self._budget.limit

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The TCP and the Unix socket; none if the child binds its own."""
        return tuple(sock.fileno() for sock in self._sockets)

    def open_sockets(self, host: str, directory: Path) -> None:
        """Bind the sockets of all children of this node, so that clients find each of them.

        Args:
            host: address to listen at.
            directory: directory of the Unix socket.

        Raises:
            OSError: the host is not an address of this machine, or the directory's path is too long
                for a Unix socket.
        """
        if not self.limit:
            return
        self._sockets.append(bound_tcp(host, 0, DEFAULT_LIMITS))
        private = short_private_directory(str(directory))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(unix)
        unix.bind(f"{private}/s")
        unix.listen()

    def note(self, order: messages.Order) -> None:
        """Keep an order if a later child must receive it as well, before it serves."""
        if isinstance(order, messages.Start):
            self._is_released = True
            # A child that ended before it could receive it has missed nothing.
            if self._has_child:
                self.has_begun = True
        if self.limit and isinstance(order, messages.AboutWorker):
            self._orders.append(order)

    def tell_begun(self, tell: Callable[[ToServer], None]) -> None:
        """Tell a server whether the cluster had begun before it."""
        if self._is_ps and self.has_begun is not None:
            tell(HasBegun(self.has_begun))

    def repeat_orders(self, tell: Callable[[ToServer], None]) -> None:
        """Tell a new child whether the cluster has begun, and repeat the kept orders to it."""
        self.tell_begun(tell)
        if self._is_released:
            self.has_begun = True  # for the child after this one
        for order in self._orders:
            tell(order)

    def note_start(self) -> None:
        """A child has started."""
        self._started_s, self._has_child = time.monotonic(), True

    def take(self) -> float | None:
        """Use one restart; returns the seconds to wait before it, None when none is left."""
        self._has_child = False
        return self._budget.take(self._started_s, time.monotonic())

    def report(self, failed: NodeFailure) -> messages.Restarted:
        """Return the report to the driver about the restart that `take` has counted."""
        return messages.Restarted(failed, self._budget.num_recent, self.limit)

    def explain(self, failed: NodeFailure) -> NodeFailure:
        """Add to a failure that the child was not the node's first one."""
        if not self.count:
            return failed
        times = (
            f"{self._budget.num_recent} of {self.limit} times within {WINDOW_S / 60:.0f} minutes"
        )
        return msgspec.structs.replace(
            failed, message=f"{failed.message} (its server was restarted {times})"
        )

    def close(self) -> None:
        """Free the port; the supervisor removes the socket's directory."""
        for sock in self._sockets:
            sock.close()
