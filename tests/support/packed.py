"""Rows as one chunk, for tests of what comes behind a packer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feeding.columnar.chunk import Chunk
from feeding.encode.packer import Packer


def packed(packer: Packer, rows: Sequence[Any]) -> Chunk:
    """Return these rows as one chunk, the next of the packer's partition."""
    (chunk,) = packer._split(list(rows))
    return chunk
