"""Fill the tables of messages in docs/architecture/protocol.md from the structs themselves.

Run it after changing a message of tfos/control, feeding or ps: its name on the wire, its fields or
the first sentence of its text. `tests/architecture/test_docs.py` fails while the page and the
structs differ.
"""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Sequence
from pathlib import Path

import msgspec

from feeding.protocol import messages as feeding
from ps.protocol import messages as ps
from tfos.control import messages as control

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture" / "protocol.md"
TABLE = re.compile(r"(<!-- messages: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Message = type[msgspec.Struct]


def _members(union: object) -> tuple[Message, ...]:
    return typing.get_args(union)


TABLES: dict[str, tuple[Message, ...]] = {
    "control calls": (
        control.Register,
        control.RegisterReply,
        control.Heartbeat,
        control.HeartbeatReply,
        control.EventReport,
        control.EventAck,
        control.LogBatch,
        control.Subscribe,
        control.SequencedOrder,
        control.Ask,
        control.Answer,
    ),
    "control events": _members(control.Event),
    "control orders": _members(control.Order),
    "feeding requests": _members(feeding.Request),
    "feeding replies": (feeding.FeedStatus, feeding.Results, feeding.Recalled),
    "ps requests": _members(ps.Request),
}
"""Name of a table on the page -> its messages."""


def name_of(message: Message) -> str:
    """Return what names the message on the wire, or its class if nothing does."""
    return str(message.__struct_config__.tag or message.__name__)


def fields_of(message: Message) -> list[str]:
    """Return the fields as they are called on the wire, in order; the last may be left out."""
    return [field.encode_name for field in msgspec.structs.fields(message)]


def table(messages: Sequence[Message]) -> str:
    """Return the rows of these messages, in the order of their names."""
    rows = ["| message | fields | meaning |", "|---|---|---|"]
    for message in messages:
        fields = ", ".join(f"`{name}`" for name in fields_of(message))
        meaning = " ".join((inspect.getdoc(message) or "").partition("\n\n")[0].split())
        rows.append(f"| `{name_of(message)}` | {fields} | {meaning} |".replace("|  |", "| |"))
    return "\n".join(rows)


def filled(text: str) -> str:
    """Return the page with its tables as the structs say."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(TABLES[match[2]])}\n\n{match[3]}", text)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
