"""Policy for bad records: the reader fails, or skips and counts them.

Covers: the policy, its limit, the count.
Does not: detect damage (formats).
Threads: one object per reader.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from feeding.config import check_count
from feeding.errors import DataError, FeedSettingsError

_logger = logging.getLogger(__name__)
_NUM_LOGGED = 10
"""Skipped records that get a log line each; their number gets one at each power of ten."""


@dataclass(slots=True)
class BadData:
    """Policy for damaged records and files, and their count.

    Args:
        action: "fail": the first damaged record or file raises. "skip": it is logged and counted.
        max_skipped: with "skip": one more than this raises. A record counts once, in however many
            epochs it is read.
    """

    action: Literal["fail", "skip"] = "fail"
    max_skipped: int = 100
    _places: set[tuple[str, int]] = field(default_factory=set, init=False, repr=False)
    """(file, byte) of the damaged records."""

    def __post_init__(self) -> None:
        if self.action not in ("fail", "skip"):
            raise FeedSettingsError(f"on_bad_data must be 'fail' or 'skip', got {self.action!r}")
        check_count("max_skipped", self.max_skipped, 0)

    @property
    def num_skipped(self) -> int:
        """Damaged records and files that were skipped so far."""
        return len(self._places)

    def skip(self, file: str, byte: int, error: DataError) -> None:
        """Count a damaged record, or raise its error.

        Args:
            file: path.
            byte: offset of the record; identifies it.
            error: names file, record and byte.

        Raises:
            DataError: the policy is to fail, or too many were skipped.
        """
        if self.action == "fail":
            raise error
        if (file, byte) in self._places:
            return
        if self.num_skipped == self.max_skipped:
            raise self.too_many(error)
        self._places.add((file, byte))
        if self.num_skipped <= _NUM_LOGGED:
            _logger.warning("skipped: %s", error)
        if self.num_skipped >= _NUM_LOGGED and str(self.num_skipped).strip("0") == "1":
            _logger.warning(
                "skipped %d damaged records or files so far, of at most %d; only the first %d are "
                "named",
                self.num_skipped,
                self.max_skipped,
                _NUM_LOGGED,
            )

    def too_many(self, error: DataError) -> DataError:
        """Return the error for one damaged record or file more than are skipped.

        Args:
            error: error of one of them.
        """
        return DataError(
            f"{error}; {self.max_skipped + 1} damaged records or files, max_skipped is "
            f"{self.max_skipped}"
        )
