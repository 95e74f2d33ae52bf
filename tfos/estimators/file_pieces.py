"""A trained model's file in pieces: what each worker answers, and one file of these answers.

Covers: cutting, joining, and the check that all pieces are of one worker's file.
Does not: ask (tfos.estimators.training) or answer (program).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from tfos.errors import NoResultError

PIECE_BYTES = 1 << 20
_DIGEST_BYTES = 16
_SIZE_BYTES = 8
_MAX_TRIES = 5
Ask = Callable[[list[int]], Sequence[bytes]]


class FilePieces:
    """A file, cut into pieces.

    Args:
        content: of the file.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._head = _head(content)

    def piece(self, place: int) -> bytes:
        """Return one piece, behind the digest and size of the whole file.

        Args:
            place: number of the piece, from 0.
        """
        return self._head + self._content[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]


def joined(ask: Ask) -> bytes:
    """Return the file of one worker.

    Any worker may answer, and their files differ, if only by the time in them: pieces of two are
    asked for again.

    Args:
        ask: returns the pieces of these numbers, in order.

    Raises:
        NoResultError: pieces of several files came again and again.
    """
    answers = ask([0])
    for _ in range(_MAX_TRIES):
        head = answers[0][: _DIGEST_BYTES + _SIZE_BYTES]
        content = b"".join(answer[len(head) :] for answer in answers)
        if _head(content) == head:
            return content
        size = int.from_bytes(head[_DIGEST_BYTES:], "big")
        answers = ask(list(range(-(-size // PIECE_BYTES))))
    raise NoResultError(
        f"the trained model did not come back whole in {_MAX_TRIES} tries: several workers "
        "answered at a time. Train with one worker, or by TFCluster and ctx.export"
    )


def _head(content: bytes) -> bytes:
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    return digest + len(content).to_bytes(_SIZE_BYTES, "big")
