"""A function whose process stands still before its first call, as native code makes it."""

from __future__ import annotations

import ctypes
from typing import Any


def holding_gil_before(function: Any, held_s: float) -> Any:
    """Return the function; before its first call the GIL is held for `held_s` seconds."""
    waits = [held_s]

    def call(*args: Any, **kwargs: Any) -> Any:
        if waits:
            ctypes.PyDLL(None).usleep(int(waits.pop() * 1e6))
        return function(*args, **kwargs)

    return call
