"""Ticket caches: whose ticket is in a file of MIT's library, and until when.

Covers: the formats 0503 and 0504, as far as error messages need.
Does not: read caches of other kinds (KCM, KEYRING, DIR); use the tickets. Keeps no secret: keys and
tickets are skipped.
Threads: any; pure but for reading the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_VERSIONS = {b"\x05\x03": 3, b"\x05\x04": 4}
_MAX_BYTES = 1 << 20
_SETTINGS = "@X-CACHECONF:"
"""End of the realm of entries in which the library notes something for itself."""


@dataclass(frozen=True, slots=True)
class KerberosTicket:
    """What a KDC has given to a user."""

    owner: str
    end_s: int
    """Seconds since 1970."""


def newest_ticket(path: Path) -> KerberosTicket:
    """Return the owner of a cache, with the end of the ticket by which others are got.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no ticket cache, or has no ticket.
    """
    with path.open("rb") as file:
        return newest_ticket_of(file.read(_MAX_BYTES))


def newest_ticket_of(data: bytes) -> KerberosTicket:
    """Return the same of a cache's content.

    Raises:
        ValueError: it is no ticket cache, or has no ticket.
    """
    version = _VERSIONS.get(data[:2])
    if version is None:
        raise ValueError("it begins with neither 0503 nor 0504")
    cache = _Cache(data, version)
    try:
        if version == 4:
            cache.take(cache.number(">H"))
        owner = cache.principal()
        tickets = list(cache.tickets())
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut short ({error})") from error
    if not tickets:
        raise ValueError("it has no ticket")
    granting = [end_s for server, end_s in tickets if server.startswith("krbtgt/")]
    return KerberosTicket(owner, max(granting or [end_s for _, end_s in tickets]))


class _Cache:
    """Reads forwards in a cache; struct.error past the end."""

    def __init__(self, data: bytes, version: int) -> None:
        self._data = data
        self._version = version
        self._at = 2

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise struct.error(f"{count} bytes wanted at {self._at} of {len(self._data)}")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def block(self) -> bytes:
        return self.take(self.number(">I"))

    def principal(self) -> str:
        self.number(">I")  # its type
        count = self.number(">I")
        realm = self.block().decode()
        return f"{'/'.join(self.block().decode() for _ in range(count))}@{realm}"

    def tickets(self) -> Iterator[tuple[str, int]]:
        """Yield server and end of each ticket."""
        while self._at < len(self._data):
            self.principal()
            server = self.principal()
            self.take(2 if self._version == 4 else 4)
            self.block()  # the key
            self.take(8)  # times of its login and start
            end_s = self.number(">I")
            self.take(9)  # renewable until, flags
            for _ in ("addresses", "authorisation"):
                for _ in range(self.number(">I")):
                    self.number(">H")
                    self.block()
            self.block()  # the ticket
            self.block()  # another one that it is for
            if not server.endswith(_SETTINGS):
                yield server, end_s
