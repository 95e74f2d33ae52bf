"""TensorFlow server of a node: `tf.distribute.Server`, for a ParameterServerStrategy of main_fun.

Covers: the port, the server, reporting its address, stopping.
Does not: run user code, hold anything of tfos. TensorFlow's server has no login.
Runs in: a child of the supervisor.
Threads: `tfos-orders` carries out orders; the main thread waits for the end.

The server serves before the node counts as ready, so the chief's main_fun finds all servers. It
knows only its own address: a coordinator sends the whole cluster when it connects.
"""

from __future__ import annotations

import os
import threading

from rpc import endpoint
from rpc.endpoint import Endpoint
from tfos.control import messages
from tfos.native.environment import announce_to_tensorflow
from tfos.native.reserved_port import ReservedPort, wanted_port
from tfos.node.child_link import ChildLink, ToServer, start_order_thread
from tfos.node.server_main import run_server
from tfos.node.spec import ChildSpec


class TensorFlowServerProcess:
    """One of TensorFlow's servers between its supervisor and the coordinator.

    Args:
        spec: the child's document.
        link: link to the supervisor.
    """

    def __init__(self, spec: ChildSpec, link: ChildLink[ToServer]) -> None:
        self._spec = spec
        self._link = link
        self._stopped = threading.Event()

    def run(self) -> None:
        """Serve until the supervisor stops this node."""
        start_order_thread(self._link, self._carry_out)
        self._link.send(messages.PhaseChanged("importing tensorflow"))
        node, host = self._spec.bundle.node, self._spec.executor.host
        announce_to_tensorflow(os.environ, {}, has_tensorflow_servers=True)
        import tensorflow as tf

        port = ReservedPort(wanted_port(os.environ))
        address = f"{endpoint.bracketed(host)}:{port.port}"
        cluster = tf.train.ClusterSpec({node.role: {node.index: address}})
        server = tf.distribute.Server(cluster, job_name=node.role, task_index=node.index)
        place = Endpoint(host, port.port, boot_id=endpoint.boot_id())
        self._link.send(messages.Listening(place, port.port))
        self._link.send(messages.PhaseChanged("serving"))
        self._stopped.wait()
        del server
        self._link.send(messages.Done())

    def _carry_out(self, order: ToServer) -> None:
        if isinstance(order, messages.Stop):
            self._stopped.set()


def main(body: bytes) -> None:
    """Run the server that this document describes."""
    run_server(body, TensorFlowServerProcess)
