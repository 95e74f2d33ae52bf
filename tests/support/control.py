"""A control server with a recording handler, over real mutual TLS on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpc.auth.certificates import TlsCredentials
from tfos.control import messages
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.control.server import ControlServer
from tfos.control.state.actions import Action
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import NodeId
from tfos.phases import ClusterPhase

WAIT_S = 30.0


class RecordingHandler:
    """Notes what it is told; `wait_for` blocks until a note arrives."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, object]] = []
        self.changed = threading.Condition()
        self.refuse_orders = ""

    def _note(self, kind: str, value: object) -> None:
        with self.changed:
            self.notes.append((kind, value))
            self.changed.notify_all()

    def wait_for(self, kind: str, count: int = 1) -> list[object]:
        def found() -> list[object]:
            return [value for name, value in self.notes if name == kind]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count, WAIT_S), self.notes
            return found()

    def on_register(self, register: messages.Register) -> messages.RegisterReply:
        self._note("register", register)
        return messages.RegisterReply(accepted=True)

    def on_heartbeat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        self._note("heartbeat", heartbeat)
        return messages.HeartbeatReply()

    def on_report(self, report: messages.EventReport) -> None:
        self._note("event", (report.node, report.event))

    def on_log(self, batch: messages.LogBatch) -> None:
        self._note("log", batch)

    def on_ask(self, ask: messages.Ask) -> bytes:
        self._note("ask", ask)
        return b"{}"

    def on_stream_opened(self, node: NodeId, number: int) -> str:
        del number
        if not self.refuse_orders:
            self._note("opened", node)
        return self.refuse_orders

    def on_stream_closed(self, node: NodeId, number: int) -> None:
        del number
        self._note("closed", node)


class ControlBed:
    """One cluster's authority, server and handler, and clients on demand."""

    def __init__(
        self,
        cluster_id: str = "test",
        handler: RecordingHandler | None = None,
        *,
        port: int = 0,
        authority: ClusterAuthority | None = None,
        num_nodes: int = 4,
    ) -> None:
        self.cluster_id = cluster_id
        self.authority = authority or ClusterAuthority(cluster_id)
        self.handler = handler or RecordingHandler()
        self.server = ControlServer(self.handler, self.authority.driver(), num_nodes=num_nodes)
        self.port = self.server.start("127.0.0.1", [port])
        self.clients: list[ControlClient] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, role: str = "worker", index: int = 0, attempt: int = 0) -> ControlClient:
        node = NodeId(role, index, attempt)
        return self.client_with(node, self.authority.node(node.name))

    def client_with(self, node: NodeId, credentials: TlsCredentials) -> ControlClient:
        client = ControlClient(self.address, self.cluster_id, node, credentials)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


def moving(phase: ClusterPhase) -> Callable[[ClusterState], list[Action]]:
    """Return what makes a coordinator's cluster enter a phase."""

    def move(state: ClusterState) -> list[Action]:
        state.move(phase)
        return []

    return move
