"""Hosts whose nodes have no child: what a driver hears of a thousand nodes, on one machine.

A node registers, listens to its orders, sends a heartbeat every two seconds and reports what its
child would have reached: the messages, the mutual TLS and the settings of a real supervisor. It is
a coroutine of `grpc.aio` and not a supervisor's reporter: gRPC's threads of a synchronous channel
wake 15 times a second, and a thousand of them leave a small machine no time for the driver.

Covers: the processes, 50 nodes in each; the node's side of every call.
Does not: know what is measured (control_nodes).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import Endpoint
from tfos.control import codec, messages
from tfos.control.client import channel_options
from tfos.control.identity import tls_name
from tfos.failure import NodeId
from tfos.tls_channel import REFUSALS, channel_credentials, grpc

HOST = "127.0.0.1"
BEGIN_TIMEOUT_S = 300.0
_RETRY_S = 0.5
Node = tuple[str, int, TlsCredentials]
Reply = TypeVar("Reply")


class SimulatedNode:
    """One node.

    Args:
        address: address of the control server.
        cluster_id: which the server's certificate must name.
        node: role and index.
        credentials: certificate and key of the node.
        until_return: ends when main_fun returns.
    """

    def __init__(
        self,
        address: str,
        cluster_id: str,
        node: NodeId,
        credentials: TlsCredentials,
        until_return: Callable[[], Any],
    ) -> None:
        self._node = node
        self._num_events = 0
        self._until_return = until_return
        self._channel = grpc.aio.secure_channel(
            address,
            channel_credentials(credentials),
            options=channel_options(tls_name(cluster_id)),
        )

    async def run(self) -> None:
        """Be a node until the driver's order to stop."""
        index = self._node.index
        register = messages.Register(self._node, str(index), HOST, 1000 + index)
        reply = await self._call(
            codec.REGISTER, register, codec.decode_register_reply, messages.REGISTER_TIMEOUT_S
        )
        if not reply.accepted:
            raise RuntimeError(f"the driver refused {self._node.name}: {reply.reason}")
        await self._report(messages.Listening(Endpoint(HOST, 4242)))
        others = [
            asyncio.create_task(self._beat(reply.heartbeat_s)),
            asyncio.create_task(self._be_main_fun()),
        ]
        await self._follow_orders()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._channel.close()

    async def _follow_orders(self) -> None:
        subscribe = self._channel.unary_stream(codec.path(codec.ORDERS))
        seen = 0
        while True:
            request = codec.encode(messages.Subscribe(self._node, seen))
            try:
                async for body in subscribe(request, wait_for_ready=True):
                    item = codec.decode_order(body)
                    seen = item.seq
                    match item.order:
                        case messages.Start():
                            await self._report(messages.PhaseChanged("main_fun"))
                        case messages.Stop():
                            return
            except grpc.aio.AioRpcError as error:
                await self._wait_for_retry(error)

    async def _be_main_fun(self) -> None:
        await self._until_return()
        if self._node.role == "worker":
            await self._report(messages.Done(progress={"steps": 100.0, "loss": 0.25}))

    async def _beat(self, every_s: float) -> None:
        seq = 0
        while True:
            seq += 1
            steps = time.monotonic() * 20
            heartbeat = messages.Heartbeat(
                self._node,
                seq,
                "main_fun",
                progress={"steps": steps, "rows": 128 * steps, "loss": 0.25, "steps_per_s": 20.0},
            )
            await self._call(
                codec.HEARTBEAT, heartbeat, codec.decode_heartbeat_reply, messages.CALL_TIMEOUT_S
            )
            await asyncio.sleep(every_s)

    async def _report(self, event: messages.Event) -> None:
        self._num_events += 1
        report = messages.EventReport(self._node, self._num_events, event)
        await self._call(codec.REPORT, report, codec.decode_ack, messages.CALL_TIMEOUT_S)

    async def _call(
        self,
        method: str,
        message: msgspec.Struct,
        decode: Callable[[bytes], Reply],
        timeout_s: float,
    ) -> Reply:
        call = self._channel.unary_unary(codec.path(method))
        while True:  # as a reporter does; the driver's lease ends a node that stays silent
            try:
                body = await call(codec.encode(message), timeout=timeout_s, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                await self._wait_for_retry(error)
            else:
                return decode(body)

    async def _wait_for_retry(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() in REFUSALS:
            raise error
        await asyncio.sleep(_RETRY_S)


def be_host(address: str, cluster_id: str, nodes: Sequence[Node], orders: Any) -> None:
    """Be one host, in a process of its own; begins when the measuring process says so.

    Args:
        address: address of the control server.
        cluster_id: which the server's certificate must name.
        nodes: this host's nodes, with their certificates.
        orders: pipe to the measuring process; the next thing from there ends main_fun.
    """

    async def run() -> None:
        returned = asyncio.Event()
        make = functools.partial(SimulatedNode, address, cluster_id, until_return=returned.wait)
        all_nodes = [make(NodeId(role, index), keys) for role, index, keys in nodes]
        asyncio.get_running_loop().add_reader(orders.fileno(), returned.set)
        await asyncio.gather(*(node.run() for node in all_nodes))

    orders.send("ready")
    orders.recv()
    asyncio.run(run())


@dataclass
class Hosts:
    """The processes that are hosts, and the pipes to them."""

    processes: list[Any] = field(default_factory=list)
    pipes: list[Any] = field(default_factory=list)

    def tell_all(self) -> None:
        """Begin, or end main_fun, on every host that is left."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send("go on")

    def lose_last(self) -> None:
        """Kill the last host and all of its nodes at once."""
        self.processes[-1].kill()


@contextlib.contextmanager
def hosts_of(
    address: str, cluster_id: str, nodes: Sequence[Node], per_host: int
) -> Iterator[Hosts]:
    """Start the hosts' processes; they wait for `tell_all`.

    Args:
        address: address of the control server.
        cluster_id: which the server's certificate must name.
        nodes: all of them, with their certificates.
        per_host: nodes of one process.
    """
    spawn = multiprocessing.get_context("spawn")
    hosts = Hosts()
    try:
        for first in range(0, len(nodes), per_host):
            ours, theirs = spawn.Pipe()
            arguments = (address, cluster_id, nodes[first : first + per_host], theirs)
            process = spawn.Process(target=be_host, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that its end is seen here
            hosts.processes.append(process)
            hosts.pipes.append(ours)
        for pipe in hosts.pipes:
            if not pipe.poll(BEGIN_TIMEOUT_S):
                raise RuntimeError(f"a simulated host did not begin within {BEGIN_TIMEOUT_S:.0f} s")
            pipe.recv()
        yield hosts
    finally:
        for process in hosts.processes:
            process.kill()
            process.join()
