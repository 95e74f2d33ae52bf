"""Messages of `map_train`: between slots and the driver, and between a slot and its trainer.

Covers: the structs, and the names of the two calls.
Does not: carry items or values: items come by Spark, values go as files or as Spark's results.
"""

from __future__ import annotations

import enum

import msgspec

from tfos.control import codec
from tfos.control.messages import ShortText

SERVICE = "tfos.Many"
DRAW = f"/{SERVICE}/Draw"
BEAT = f"/{SERVICE}/Beat"
CLIENT_NAME = "slot"
"""Common name of the certificate of a run's slots."""


class Ending(enum.StrEnum):
    """How an attempt ended."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    TIMED_OUT = "timed out"
    NOT_PICKLABLE = "not picklable"
    """Its return value cannot be pickled, in any attempt."""
    NOT_BEGUN = "not begun"
    """No process reached the item: the executor cannot start the function."""
    NOT_KEPT = "not kept"
    """Its value could not be stored."""


class Ended(msgspec.Struct, frozen=True):
    """The end of an attempt."""

    item: int
    how: Ending
    seconds: float
    metrics: dict[str, float] = {}
    error: str = ""
    attempt: int = 0
    """Number of its order. A report is repeated if its reply is lost; by then this slot may have a
    later order of the item."""


class Draw(msgspec.Struct, frozen=True):
    """A slot asks for an item, and reports attempts that have ended."""

    slot: int
    attempt: int
    ended: tuple[Ended, ...] = ()
    holding: tuple[int, ...] = ()
    """Items that it has drawn and not reported as ended. If the driver counts others as the slot's,
    their replies were lost."""
    is_ahead: bool = False
    """Whether it is still training, and will continue with this item without a pause."""
    host: ShortText = ""
    """Host of the slot."""


class SlotBeat(msgspec.Struct, frozen=True):
    """A slot is alive; it reports attempts that have ended."""

    slot: int
    attempt: int
    ended: tuple[Ended, ...] = ()
    is_leaving: bool = False
    """Whether it is ending while its task returns its values; it sends no more calls."""


class BeatReply(msgspec.Struct, frozen=True):
    """The driver is alive."""

    stop: bool = False
    """Whether to end now, whatever is in progress."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train this item."""

    item: int
    attempt: int
    """Number of this order among all orders of the item, from 1, including ones that did not
    begin."""


class WaitForItem(msgspec.Struct, frozen=True, tag=True):
    """Ask again: other slots' items may come back."""


class EndSlot(msgspec.Struct, frozen=True, tag=True):
    """There is nothing more to train."""


Order = Train | WaitForItem | EndSlot


class OrderReply(msgspec.Struct, frozen=True):
    """Answer to Draw."""

    order: Order


class TrainItem(msgspec.Struct, frozen=True, tag=True):
    """A slot's order to its trainer: bytes of the file of items."""

    offset: int
    length: int
    values_fd: int
    """File that takes the value."""


class TrainerReady(msgspec.Struct, frozen=True, tag=True):
    """A trainer has imported everything that its function needs."""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The function has returned; its value is in its file, from the start."""

    seconds: float
    metrics: dict[str, float]
    length: int
    """Length of the value, in bytes."""


class TrainingRaised(msgspec.Struct, frozen=True, tag=True):
    """The function has raised, or its value could not be pickled."""

    seconds: float
    error: str
    is_unpicklable: bool = False


FromTrainer = TrainerReady | Returned | TrainingRaised

decode_draw = codec.decoder(Draw)
decode_beat = codec.decoder(SlotBeat)
decode_beat_reply = codec.decoder(BeatReply)
decode_order = codec.decoder(OrderReply)
