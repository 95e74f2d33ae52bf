"""Which lines of a node go to its driver, and when."""

from __future__ import annotations

import math

import pytest

from tfos.console.log_tail import PIECE_BYTES, num_fitting
from tfos.node.supervisor.pending_output import (
    BETWEEN_PIECES_S,
    COLLECTING_S,
    KEPT_LINES,
    PendingOutput,
)

SHORT = tuple(f"{number:04}" for number in range(500))
LONG = tuple(f"{number:04}" + "損" * 1996 for number in range(50))


@pytest.fixture
def pending() -> PendingOutput:
    return PendingOutput()


def test_nothing_is_due_while_nobody_reads_and_the_newest_lines_are_kept(pending):
    pending.add(SHORT, 3)
    assert pending.due_s() == math.inf
    assert pending.take(0.0) == (SHORT[-KEPT_LINES:], 0)
    assert pending.is_empty


@pytest.mark.attack("A24")
def test_a_reader_gets_pieces_of_the_newest_lines_and_the_number_of_the_others(pending):
    pending.wanted = "piece"
    pending.add(LONG, 5)
    assert pending.due_s() < 100.0
    taken, dropped = pending.take(100.0)
    assert taken
    assert taken[-1].startswith("0049")
    assert num_fitting(taken) == len(taken)
    assert sum(len(line.encode()) for line in taken) <= PIECE_BYTES
    assert dropped == 5 + len(LONG) - len(taken)
    pending.add(LONG, 0)
    assert pending.due_s() == 100.0 + BETWEEN_PIECES_S


def test_who_shows_all_output_gets_it_in_order(pending):
    pending.wanted = "all"
    pending.add(SHORT, 5)
    taken, dropped = pending.take(100.0)
    assert dropped == 5
    assert pending.due_s() == 100.0 + COLLECTING_S
    while not pending.is_empty:
        taken += pending.take(100.0)[0]
    assert taken == SHORT


def test_lines_that_could_not_be_sent_are_counted(pending):
    pending.wanted = "all"
    pending.add(SHORT[:2], 0)
    pending.take(0.0)
    pending.lose(2)
    assert pending.take(1.0) == ((), 2)
