"""Writes that fail as on a full disk, by the limit of a file's size (`ulimit -f`)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: a longer write is EFBIG."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python would cut it
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes_none
