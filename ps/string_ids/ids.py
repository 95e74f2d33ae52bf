"""Ids of strings and bytes: the hash that TensorFlow computes, also in an exported graph.

Covers: what counts as strings, the number of ids, the hash of many strings.
Does not: check integers (ps.tables.ids), hash tensors (tfos.keras.embedding.keys).
Pure; threads: any.

A string's id is `tf.strings.to_hash_bucket_fast(text, 2**63 - 1)`: FarmHash Fingerprint64 of its
bytes modulo 2^63 - 1. It is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ps.errors import IdError
from ps.string_ids.fingerprint import fingerprints

Array = np.ndarray[Any, Any]

STRING_KEYS = 2**63 - 1
"""Number of ids that strings are hashed to."""


def with_hashed_strings(ids: Any) -> Any:
    """Return ids with strings and bytes replaced by their hashes; integers as they are.

    Args:
        ids: integers, strings or bytes of any shape; strings are taken as UTF-8. Arrays of bytes
            with a fixed length (`S8`) lose zero bytes at their end in numpy itself.

    Returns:
        int64 of the same shape for strings, and where there are none at all.
    """
    try:
        # As objects: else numpy cuts zero bytes off, makes 1 a "1", and all as long as the longest.
        array = ids if isinstance(ids, np.ndarray) else np.array(ids, object)
    except ValueError:  # of no one shape: refused with the integers
        return ids
    if array.dtype.kind not in "SUO":
        return ids
    flat = array.reshape(-1).tolist()
    if not all(isinstance(value, str | bytes) for value in flat):
        return ids
    return hashed(flat).reshape(array.shape)


class IdSource(Protocol):
    """A table that may say what its ids are made of: a TableSpec, or an exported table's record."""

    @property
    def name(self) -> str:
        """The table's name, for messages."""

    @property
    def id_source(self) -> str:
        """any, integers or strings."""


def ids_of(table: IdSource, given: Any) -> Any:
    """Return the ids of a table from integers or strings, as `with_hashed_strings`.

    Integers are ids of a table of strings, too: a scan gives the hashes.

    Args:
        table: the table whose ids they are.
        given: integers, strings or bytes of any shape.

    Raises:
        IdError: strings for a table whose ids are integers; the text names the first one.
    """
    ids = with_hashed_strings(given)
    if ids is not given and ids.size and table.id_source == "integers":
        first = str(np.asarray(given, object).reshape(-1).tolist()[0])
        raise IdError(
            f"table {table.name!r} was trained with integers as ids, got the text {first!r}, whose "
            "hash no row has as its id; convert the ids: np.asarray(ids).astype('int64'), or in a "
            "DataFrame df.selectExpr('cast(id as bigint) as id', …)",
            {"table": table.name, "id": first},
        )
    return ids


def hashed(texts: Sequence[str | bytes]) -> Array:
    """Return the ids of strings.

    Args:
        texts: [n]; those that are no bytes are taken as UTF-8.

    Returns:
        [n] int64, from 0 to STRING_KEYS - 1.
    """
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    starts = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=starts[1:])
    found = fingerprints(np.frombuffer(b"".join(encoded), np.uint8), starts)
    found %= np.uint64(STRING_KEYS)
    return found.view(np.int64)
