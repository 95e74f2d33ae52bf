"""Messages of `map_train`: between slots and the driver, and between a slot and its trainer.

Covers: the structs, and the names of the two calls.
Does not: carry items or values: items come by Spark, values go as files or as Spark's results.
"""

from __future__ import annotations

import enum

import msgspec

from tfos.control import codec

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
    """It returned what cannot travel, and would at each attempt."""
    NOT_BEGUN = "not begun"
    """No process came to the item: the executor does not start the function."""
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
    """Of the order. A report is sent again if its answer is lost; by then the item may have a later
    order on this slot."""


class Draw(msgspec.Struct, frozen=True):
    """A slot asks for an item, and reports what has ended."""

    slot: int
    attempt: int
    ended: tuple[Ended, ...] = ()
    holding: tuple[int, ...] = ()
    """Items that it has drawn and not reported as ended: others that the driver takes to be its
    own were in replies that have not arrived."""
    is_ahead: bool = False
    """It trains still, and will go on with this item without a pause."""
    host: str = ""
    """Where it runs."""


class SlotBeat(msgspec.Struct, frozen=True):
    """A slot lives; it reports what has ended."""

    slot: int
    attempt: int
    ended: tuple[Ended, ...] = ()
    is_leaving: bool = False
    """It ends now, and its task returns its values: nothing is heard of it from here on."""


class BeatReply(msgspec.Struct, frozen=True):
    """The driver lives."""

    stop: bool = False
    """End now, whatever is under way."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train this item."""

    item: int
    attempt: int
    """Number of this order among all of the item, from 1; also of orders that have not begun."""


class WaitForItem(msgspec.Struct, frozen=True, tag=True):
    """Ask again: items that other slots train may come back."""


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
    """The file that takes the value."""


class TrainerReady(msgspec.Struct, frozen=True, tag=True):
    """A trainer has imported what its function needs."""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """The function has returned; its value is in its file, from the beginning."""

    seconds: float
    metrics: dict[str, float]
    length: int
    """Of the value, in bytes."""


class TrainingRaised(msgspec.Struct, frozen=True, tag=True):
    """The function has raised, or its value cannot be pickled."""

    seconds: float
    error: str
    is_unpicklable: bool = False


FromTrainer = TrainerReady | Returned | TrainingRaised

decode_draw = codec.decoder(Draw)
decode_beat = codec.decoder(SlotBeat)
decode_beat_reply = codec.decoder(BeatReply)
decode_order = codec.decoder(OrderReply)
