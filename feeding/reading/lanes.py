"""Lanes: several splits read side by side, each for a turn of some rows.

    splits of a part:  a b c d e f …            with two lanes and turns of 2 rows:
    lane 0   a0 a1 .. .. a2 a3 .. .. c0 c1      a0 a1 b0 b1 a2 a3 b2 b3 c0 c1 …
    lane 1   .. .. b0 b1 .. .. b2 b3 .. ..

The order is a function of the splits' rows alone, not of the blocks in which they come, and
`Front` is all that is needed to go on. A lane whose split has ended takes the next split.

Covers: Lanes: the order, opening splits ahead, skipping rows that were read before.
Does not: shuffle rows (runs), decide what is read (positions).
Threads: one consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from feeding.columnar.ops import Columns, num_rows, rows_between
from feeding.errors import FileChanged
from feeding.reading.positions import Front, WorkerPart
from feeding.reading.splits import Split

_LEAST_TURN_ROWS, _MOST_TURN_ROWS = 16, 512
_TURNS = 128
"""Turns in a window: a few of each lane. Shorter turns cost more slices."""


class SplitReader(Protocol):
    """The part of runs.Source that reads."""

    def read(self, split: Split) -> Iterator[Columns]:
        """Yield the rows of a split as columns, in blocks."""


def turn_rows(window: int) -> int:
    """Return the rows of a turn: a few in small windows, so that a window has rows of many lanes.

    Args:
        window: rows of a shuffled window.
    """
    return max(_LEAST_TURN_ROWS, min(window // _TURNS, _MOST_TURN_ROWS))


class Lanes:
    """The rest of a part's rows in the order of turns.

    Args:
        source: source of the rows.
        part: its splits, and how much of them was read.
        width: splits read side by side; one more is opened ahead.
        turn: rows of a turn; a lane that is alone reads without turns.
    """

    def __init__(self, source: SplitReader, part: WorkerPart, width: int, turn: int) -> None:
        self._source = source
        self._part = part
        self._width = width
        self._turn = turn
        self._lanes = deque(_Lane(source, part, *lane) for lane in part.place.front.lanes)
        self._begun = part.place.front.begun
        self._ahead: _Lane | None = None
        self._fill()

    @property
    def front(self) -> Front:
        """Where the lanes are."""
        return Front(tuple((lane.split, lane.row) for lane in self._lanes), self._begun)

    def widen(self, width: int) -> None:
        """Read another number of splits side by side from here on."""
        self._width = width
        self._fill()

    def is_ready(self) -> bool:
        """Load rows of the lane whose turn it is; False: all lanes have ended."""
        while self._lanes:
            if self._lanes[0].load():
                return True
            self._lanes.popleft()
            self._fill()
        return False

    def peek(self, most_rows: int) -> Columns:
        """Return the next rows of the lane whose turn it is, at least one, after `is_ready`."""
        lane = self._lanes[0]
        if len(self._lanes) > 1:
            most_rows = min(most_rows, self._turn - lane.row % self._turn)
        return lane.peek(most_rows)

    def move(self, count: int) -> None:
        """Go on behind the first `count` rows of those that `peek` has returned."""
        lane = self._lanes[0]
        lane.move(count)
        if lane.row % self._turn == 0:
            self._lanes.rotate(-1)

    def _fill(self) -> None:
        while len(self._lanes) < self._width and self._begun < len(self._part.splits):
            self._lanes.append(self._next())
            self._begun += 1
        if self._ahead is None and self._begun < len(self._part.splits):
            self._ahead = self._next()

    def _next(self) -> _Lane:
        ahead, self._ahead = self._ahead, None
        return ahead or _Lane(
            self._source, self._part, self._begun, self._part.rows_read(self._begun)
        )


class _Lane:
    """One split that is being read."""

    def __init__(self, source: SplitReader, part: WorkerPart, split: int, row: int) -> None:
        self.split = split
        """Index in the part."""
        self.row = row
        """Rows of the split that were read."""
        self._blocks = _behind(source.read(part.splits[split]), part.splits[split], row)
        self._block: Columns = ()
        self._at = self._stop = 0

    def load(self) -> bool:
        """Load the next block if the last one is used up; False at the split's end."""
        if self._at == self._stop:
            self._block = next(self._blocks, ())
            self._at, self._stop = 0, num_rows(self._block) if self._block else 0
        return self._at < self._stop

    def peek(self, most_rows: int) -> Columns:
        return rows_between(self._block, self._at, min(self._at + most_rows, self._stop))

    def move(self, count: int) -> None:
        self.row += count
        self._at += count
        if self._at == self._stop:
            self._block = ()  # its memory is not needed while other lanes have their turns


def _behind(blocks: Iterator[Columns], split: Split, row: int) -> Iterator[Columns]:
    """Yield the blocks behind the first `row` rows, none empty."""
    at = 0
    for block in blocks:
        first, at = at, at + num_rows(block)
        if at > max(row, first):
            yield block if first >= row else rows_between(block, row - first, at - first)
    if at < row:
        raise FileChanged(
            f"{split} has {at} rows, {row} of them were read before: the file has changed since "
            "the position was saved"
        )
