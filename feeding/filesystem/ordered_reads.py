"""Ordered reads: what a function reads for each of many files, in their order, some of them ahead.

A file of an object store takes some 50 ms, whatever its size.

Covers: threads that read, how many results and bytes wait for the consumer.
Does not: open files (the function does).
Threads: the consumer's takes results; those of a pool call the function.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

Wanted = TypeVar("Wanted")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadLimits:
    """Bounds of what is read before it is asked for."""

    num_threads: int
    num_files: int
    num_bytes: float = math.inf
    """Size of all of them, unless one alone is larger."""


def read_in_order(
    read: Callable[[Wanted], Found],
    wanted: Sequence[Wanted],
    limits: AheadLimits,
    sizes: Sequence[int] | None = None,
) -> Generator[Found]:
    """Yield what a function returns for each file, in order; close it where not all are taken.

    Args:
        read: called in threads; what it raises is raised in its turn, and ends the reads.
        wanted: what is to be read.
        limits: limits of what is read ahead.
        sizes: bytes that are held of each until it is asked for; None: few.
    """
    if not wanted:
        return
    pool = ThreadPoolExecutor(min(limits.num_threads, len(wanted)), "ordered-reads")
    left = deque(zip(wanted, sizes if sizes is not None else [0] * len(wanted), strict=True))
    ahead: deque[tuple[Future[Found], int]] = deque()
    num_bytes = 0
    try:
        while left or ahead:
            while left and len(ahead) < limits.num_files:
                each, size = left[0]
                if ahead and num_bytes + size > limits.num_bytes:
                    break
                left.popleft()
                ahead.append((pool.submit(read, each), size))
                num_bytes += size
            future, size = ahead.popleft()
            yield future.result()
            num_bytes -= size
    finally:
        # Whoever refuses the first one needs no other, nor the end of those that are being read.
        pool.shutdown(wait=False, cancel_futures=True)
