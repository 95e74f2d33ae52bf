"""Hadoop's token files: which delegation tokens are in one, for whom and until when.

Covers: both formats that Hadoop writes, as far as error messages and the choice of an address need.
Does not: use the tokens; hdfs-native reads the file itself when it connects. Keeps no secret: the
passwords of tokens are skipped.
Threads: any; pure but for reading the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HDFS_KIND = "HDFS_DELEGATION_TOKEN"
_MAGIC = b"HDTS"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DelegationToken:
    """A NameNode's promise to serve its holder as `owner`."""

    service: str
    """`ip:port` of the NameNode, or `ha-hdfs:name` for a name service."""
    owner: str
    max_date_ms: int
    """Milliseconds since 1970 after which nobody can renew it; it may end before."""


def hdfs_tokens(path: Path) -> list[DelegationToken]:
    """Return the delegation tokens for HDFS in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no token file.
    """
    with path.open("rb") as file:
        return hdfs_tokens_of(file.read(_MAX_BYTES))


def hdfs_tokens_of(data: bytes) -> list[DelegationToken]:
    """Return the delegation tokens for HDFS in a file's content.

    Raises:
        ValueError: it is no token file.
    """
    try:
        if data[:4] != _MAGIC:
            raise ValueError("it does not begin with HDTS")
        read = {0: _written, 1: _protobuf}[data[4]]
        return [
            _token(identifier, service)
            for identifier, kind, service in read(_Cursor(data, 5))
            if kind == HDFS_KIND
        ]
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut short or of another format ({error!r})") from error


class _Cursor:
    """Reads forwards in bytes; IndexError past the end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self._at = at

    @property
    def has_more(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise IndexError(f"{count} bytes wanted at {self._at} of {len(self._data)}")
        self._at += count
        return self._data[self._at - count : self._at]

    def vlong(self) -> int:
        """Read an integer of Hadoop's WritableUtils: one byte, or a length and as many."""
        first = int.from_bytes(self.take(1), "big", signed=True)
        if first >= -112:
            return first
        is_negative = first < -120
        value = int.from_bytes(self.take(-(first + (120 if is_negative else 112))), "big")
        return ~value if is_negative else value

    def varint(self) -> int:
        """Read an integer of protobuf."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def text(self) -> str:
        return self.take(self.vlong()).decode()


def _written(data: _Cursor) -> Iterator[tuple[bytes, str, str]]:
    """Yield identifier, kind and service of each token of Hadoop's own format."""
    for _ in range(data.vlong()):
        data.text()  # the name under which the program keeps it
        identifier = data.take(data.vlong())
        data.take(data.vlong())  # its password
        yield identifier, data.text(), data.text()


def _protobuf(data: _Cursor) -> Iterator[tuple[bytes, str, str]]:
    """Yield the same of CredentialsProto."""
    whole = _fields(_Cursor(data.take(data.varint())))
    for number, entry in whole:
        if number != 1:
            continue
        token = dict(_fields(_Cursor(dict(_fields(_Cursor(entry)))[2])))
        yield token[1], token[3].decode(), token[4].decode()


def _fields(data: _Cursor) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each field of a message; these have no other kind of field."""
    while data.has_more:
        yield data.varint() >> 3, data.take(data.varint())


def _token(identifier: bytes, service: str) -> DelegationToken:
    data = _Cursor(identifier, 1)  # after its version
    owner, _, _ = data.text(), data.text(), data.text()
    data.vlong()  # when it was issued
    return DelegationToken(service, owner, data.vlong())
