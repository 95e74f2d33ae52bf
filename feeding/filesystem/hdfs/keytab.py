"""Keytabs: whose keys are in one.

Covers: the first principal of a file, which is the one that MIT's library takes, too.
Does not: read the keys.
Threads: any; pure but for reading the file.
"""

from __future__ import annotations

import struct
from pathlib import Path

_VERSION = b"\x05\x02"
_MAX_BYTES = 1 << 16


def first_principal(path: Path) -> str:
    """Return `name@REALM` of a keytab's first entry.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no keytab, or has no entry.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES)
    if data[:2] != _VERSION:
        raise ValueError("it does not begin with 0502")
    at = 2
    try:
        while (size := struct.unpack_from(">i", data, at)[0]) < 0:  # an entry that was removed
            at += 4 - size
        if at + 4 + size > len(data):
            raise ValueError(f"it has {len(data)} bytes, its first entry ends at {at + 4 + size}")
        (num_components,) = struct.unpack_from(">H", data, at + 4)
        at += 6
        words = []
        for _ in range(num_components + 1):
            (length,) = struct.unpack_from(">H", data, at)
            words.append(data[at + 2 : at + 2 + length].decode())
            at += 2 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut short or empty ({error})") from error
    realm, *components = words
    return f"{'/'.join(components)}@{realm}"
