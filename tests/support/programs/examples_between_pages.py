"""Decodes damaged tf.Example messages that end, or begin, at an unmapped page.

A read beyond the message ends this process by SIGSEGV: in numpy's own memory it would go unseen.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from feeding.formats.tfrecord.example import ExampleDecoder, Feature
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.reading.bad_records import BadData

PAGE = mmap.PAGESIZE
FEATURES = {"f": Feature("float32", None), "i": Feature("int64", None), "b": Feature("bytes", None)}
SINGLE = {"f": Feature("float32", default=0.0), "i": Feature("int64", default=0)}
HOSTILE = (0, 1, 8, 10, 13, 18, 26, 127, 128, 255)


class Fence:
    """One page of memory between two that are not mapped."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (start, start + 2 * PAGE):
            if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._page = np.frombuffer(self._memory, np.uint8, PAGE, PAGE)

    def placed(self, data: bytes) -> Iterator[np.ndarray[Any, Any]]:
        """Give the data before the unmapped page, then behind the other one."""
        for place in (slice(PAGE - len(data), PAGE), slice(0, len(data))):
            self._page[place] = np.frombuffer(data, np.uint8)
            yield self._page[place]


def damaged(dice: random.Random, whole: bytes) -> bytes:
    """Cut a message somewhere, or not, and change some of its bytes."""
    record = bytearray(whole[: dice.choice((len(whole), dice.randrange(1, len(whole))))])
    for _ in range(dice.randrange(4)):
        record[dice.randrange(len(record))] = dice.choice(HOSTILE)
    return bytes(record)


def main() -> None:
    """Decode until a read leaves the page, or all is done."""
    logging.disable()
    dice, fence = random.Random(5), Fence()
    wholes = [
        encode_example({"f": [1.0, 2.0], "i": [1, -1], "b": [b"x", b"yz"]}),
        encode_example({"f": [1.0], "i": [300]}),
    ]
    decoders = [ExampleDecoder(FEATURES), ExampleDecoder(SINGLE)]
    for number in range(3_000):
        record = damaged(dice, wholes[number % 2])
        for buffer in fence.placed(record):
            block = RecordBlock(buffer, np.zeros(1, np.int64), np.array([len(record)]), 10, 1000)
            decoders[number % 2].decode(block, "part-0", BadData("skip"))
    print("every message was decoded or skipped")


if __name__ == "__main__":
    main()
