"""Kept answers: which answers of rendezvous stay in bounded memory; ps:0 and workers have one rule.

Covers: what is forgotten first, and that a key is known to be over when its answer is gone.
Does not: know what an answer is (ps.protocol.passed, ps.server.rendezvous).
Pure; no threads.

A newer attempt of a worker comes to what was agreed on once (the batch to build from, how many rows
there are, how a fit begins) and to the last decisions, not to the metrics of old epochs. So keys
that differ only in their numbers are a series, and the largest series gives up its oldest answer.
A series of one answer, which was agreed on once, gives it up where all have but one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")

_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Series:
    """Keys that differ only in their numbers."""

    nbytes_of: dict[str, int] = field(default_factory=dict)
    """Size of each kept answer, the oldest first."""
    nbytes: int = 0


class KeptAnswers(Generic[Answer]):
    """The answers of rendezvous that are over, by key.

    Args:
        max_answers: how many are kept.
        max_bytes: bytes of all of them; the newest stays whatever its size.
        max_keys: how many are known to be over, most of them without their answers; at least
            `max_answers`.
    """

    def __init__(self, *, max_answers: int, max_bytes: int, max_keys: int) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._max_keys = max_keys
        self._known: dict[str, Answer | None] = {}
        """Answers in the order of arrival; None: the answer is forgotten."""
        self._series: dict[str, _Series] = {}
        self._num_answers = self._nbytes = 0

    def __contains__(self, key: str) -> bool:
        """Whether this rendezvous is known to be over."""
        return key in self._known

    def __iter__(self) -> Iterator[tuple[str, Answer | None]]:
        """Yield each key that is over and its answer, the oldest first; None: it is forgotten."""
        return iter(self._known.items())

    def get(self, key: str) -> Answer | None:
        """Return an answer; None: it is forgotten, or the rendezvous is not over."""
        return self._known.get(key)

    def keep(self, key: str, answer: Answer, nbytes: int) -> None:
        """Keep the answer of a rendezvous that is over now; others may be forgotten for it.

        Args:
            key: name of the rendezvous, which was not over.
            answer: any object.
            nbytes: what it takes.
        """
        self._known[key] = answer
        series = self._series.setdefault(_NUMBER.sub("0", key), _Series())
        series.nbytes_of[key] = nbytes
        series.nbytes += nbytes
        self._num_answers += 1
        self._nbytes += nbytes
        while self._num_answers > 1 and self._is_full():
            self._forget_one(newest=key)
        self._bound_keys()

    def forget(self, key: str) -> None:
        """Note that a rendezvous is over whose answer is not known."""
        self._known[key] = None
        self._bound_keys()

    def _is_full(self) -> bool:
        return self._num_answers > self._max_answers or self._nbytes > self._max_bytes

    def _forget_one(self, newest: str) -> None:
        """Forget the oldest answer of the series that takes most; never the newest of all."""
        is_too_large = self._nbytes > self._max_bytes

        def size(name: str) -> tuple[bool, int]:
            series = self._series[name]
            num_answers = len(series.nbytes_of)
            return num_answers > 1, series.nbytes if is_too_large else num_answers

        others = (
            name
            for name, series in self._series.items()
            if len(series.nbytes_of) > 1 or newest not in series.nbytes_of
        )
        name = max(others, key=size)
        series = self._series[name]
        key = next(iter(series.nbytes_of))
        nbytes = series.nbytes_of.pop(key)
        series.nbytes -= nbytes
        self._nbytes -= nbytes
        self._num_answers -= 1
        self._known[key] = None
        if not series.nbytes_of:
            del self._series[name]

    def _bound_keys(self) -> None:
        if len(self._known) > self._max_keys:
            del self._known[next(key for key, answer in self._known.items() if answer is None)]
