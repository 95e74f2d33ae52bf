"""The driver's side of the slots' calls: an authenticated gRPC server.

Covers: the table of calls, and the callers allowed.
Does not: listen and refuse (tfos.tls_server), decide anything (tfos.many.run).
Threads: calls run on daemon threads of the server.
"""

from __future__ import annotations

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec
from tfos.many import messages
from tfos.many.run import MapRun
from tfos.tls_server import TlsServer, unary


def many_server(run: MapRun, credentials: TlsCredentials, *, num_slots: int) -> TlsServer:
    """Return the server of one run, which does not listen yet.

    Args:
        run: is called for each message.
        credentials: the driver's certificate and the run's authority.
        num_slots: number of slots of the run; each may wait in a call.
    """

    def order(draw: messages.Draw) -> bytes:
        return codec.encode(messages.OrderReply(run.on_draw(draw)))

    def reply(beat: messages.SlotBeat) -> bytes:
        return codec.encode(run.on_beat(beat))

    calls = {
        messages.DRAW: unary(messages.decode_draw, _is_slot, order),
        messages.BEAT: unary(messages.decode_beat, _is_slot, reply),
    }
    return TlsServer(
        calls, credentials, num_peers=num_slots, max_message_bytes=codec.MAX_MESSAGE_BYTES
    )


def _is_slot(peer: str, _: object) -> str:
    return "" if peer == messages.CLIENT_NAME else f"the certificate is for {peer!r}"
