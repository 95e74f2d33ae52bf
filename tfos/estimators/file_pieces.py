"""A trained model's file in pieces: the answers of each worker, and the file made from them.

Covers: cutting, joining, and the check that all pieces are of one worker's file.
Does not: ask (tfos.estimators.training) or answer (program).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from tfos.errors import NoResultError

PIECE_BYTES = 1 << 20
_DIGEST_BYTES = 16
_SIZE_BYTES = 8
_AT_ONCE = 16
"""Pieces per request, which is one Spark job: spark.driver.maxResultSize bounds its bytes."""
NEEDED_BYTES = 2 * _AT_ONCE * PIECE_BYTES
"""Least spark.driver.maxResultSize: the pieces of one job, and as much again for Spark's own."""
_MAX_IDLE = 10
"""Requests per worker without a new piece before the file is given up."""
Ask = Callable[[list[int]], Sequence[bytes]]


class FilePieces:
    """A file, cut into pieces.

    Args:
        content: the file's bytes.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._head = _head(content)

    def piece(self, place: int) -> bytes:
        """Return one piece, after the digest and size of the whole file.

        Args:
            place: number of the piece, from 0.
        """
        return self._head + self._content[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]


def joined(ask: Ask, num_workers: int) -> bytes:
    """Return the file of one worker.

    Any worker may answer, and their files differ, at least in the timestamps. So the pieces of
    each file are kept until one file is complete.

    Args:
        ask: returns the pieces of these numbers, in order.
        num_workers: number of workers that may answer.

    Raises:
        NoResultError: no further piece of a file came in many requests.
    """
    files: dict[bytes, dict[int, bytes]] = {}
    asked, num_idle = [0], 0
    while num_idle <= _MAX_IDLE * num_workers:
        num_known = sum(map(len, files.values()))
        for place, answer in zip(asked, ask(asked), strict=True):
            head = answer[: _DIGEST_BYTES + _SIZE_BYTES]
            files.setdefault(head, {})[place] = answer[len(head) :]
        num_idle = num_idle + 1 if sum(map(len, files.values())) == num_known else 0
        head = min(files, key=lambda each: len(_missing(each, files[each])))
        asked = _missing(head, files[head])[:_AT_ONCE]
        if not asked:
            content = b"".join(files[head][place] for place in sorted(files[head]))
            if _head(content) != head:
                raise NoResultError("the trained model did not come back as its worker saved it")
            return content
    raise NoResultError(
        f"the trained model did not come back whole: the last {num_idle} requests, answered by any "
        f"of {num_workers} workers, brought no new piece. Train with one worker, or use "
        "TFCluster and ctx.export"
    )


def _missing(head: bytes, pieces: Collection[int]) -> list[int]:
    """Return the places of a file's pieces that have not come; an empty file has one too."""
    size = int.from_bytes(head[_DIGEST_BYTES:], "big")
    return [place for place in range(max(1, -(-size // PIECE_BYTES))) if place not in pieces]


def _head(content: bytes) -> bytes:
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    return digest + len(content).to_bytes(_SIZE_BYTES, "big")
