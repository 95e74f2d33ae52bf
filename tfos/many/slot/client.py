"""A slot's side of the calls to its driver.

Covers: mutual TLS, deadlines, typed failures.
Does not: decide when to call (tfos.many.slot.process).
Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec
from tfos.control.client import channel_options
from tfos.control.identity import tls_name
from tfos.many import messages
from tfos.many.slot.specs import RunSettings
from tfos.tls_channel import ask, channel_credentials, grpc

Reply = TypeVar("Reply")
_DRAW_S = 15.0
"""The driver answers a slot without an item after messages.WaitForItem's own, shorter time."""
_BEAT_S = 5.0


class ManyClient:
    """One slot's connection.

    Calls raise ControlUnavailable when no reply arrived in time (retry) and ControlRefused when the
    driver refuses this slot (end).

    Args:
        settings: settings of the run.
        keys: keys of its slots.
    """

    def __init__(self, settings: RunSettings, keys: TlsCredentials) -> None:
        self._address = settings.driver_address
        self._channel: Any = grpc.secure_channel(
            settings.driver_address,
            channel_credentials(keys),
            options=channel_options(tls_name(settings.run_id)),
        )

    def draw(self, draw: messages.Draw) -> messages.Order:
        """Report ended attempts and ask for an item."""
        return self._call(messages.DRAW, draw, messages.decode_order, _DRAW_S).order

    def beat(self, beat: messages.SlotBeat) -> messages.BeatReply:
        """Report that the slot is alive."""
        return self._call(messages.BEAT, beat, messages.decode_beat_reply, _BEAT_S)

    def _call(
        self, path: str, message: msgspec.Struct, decode: Callable[[bytes], Reply], timeout_s: float
    ) -> Reply:
        where = f"{path} to the driver at {self._address}"
        return decode(ask(self._channel, path, codec.encode(message), timeout_s, where))
