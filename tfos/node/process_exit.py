"""End of a node's process without the teardown of its interpreter; the end of what it has forked.

Covers: the order in which a process ends: threads, exit handlers, buffers, the process itself;
processes that user code has forked and that come back from it.
Does not: decide when it ends, or release anything of its own.
Runs in: supervisors, parameter servers and workers, as the last call of their `main`.

Python clears every module as it ends, which nobody waits for with profit: after TensorFlow that is
1.1 s of processor time, after numba 0.15 s, and the driver's shutdown waits for it. multiprocessing
ends its processes in this way, and so did TensorFlowOnSpark's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

_BUFFERED = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})


def leave(code: int = 0) -> NoReturn:
    """Wait for threads that are not daemons, call the exit handlers, write buffers, and end.

    Objects that are alive then are not finalized.

    Args:
        code: exit status.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does
        atexit._run_exitfuncs()
        _write_buffers()
    finally:
        os._exit(code)


@contextlib.contextmanager
def forks_end() -> Iterator[None]:
    """End a process that user code in this block has forked, where it would leave the block.

    Beyond the block it would report as the process that it was forked from: one function, two ends.
    """
    own = os.getpid()
    try:
        yield
    except SystemExit as end:
        if os.getpid() == own:
            raise
        _end_fork(0 if end.code in (None, 0) else 1)
    except BaseException:
        if os.getpid() == own:
            raise
        with contextlib.suppress(Exception):  # user code may have closed or replaced it
            traceback.print_exc()
        _end_fork(1)
    if os.getpid() != own:
        _end_fork(0)


def _end_fork(code: int) -> NoReturn:
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, replaced, or nobody reads it any more
            each.flush()
    os._exit(code)


def _write_buffers() -> None:
    """Write what the interpreter would: files that user code has not closed, and C's streams."""
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) in _BUFFERED:  # not isinstance: a lazy module would be imported now
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
                each.flush()
    ctypes.CDLL(None).fflush(None)
