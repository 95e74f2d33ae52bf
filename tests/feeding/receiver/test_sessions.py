"""Sessions of inference: when they end, and who hears of rows without a result."""

from __future__ import annotations

import pytest

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import FeedError, ResultCountError
from feeding.receiver.results import InferenceResults


def rows(count: int, session: int) -> Chunk:
    packer = Packer(FeedConfig(), mode="inference", session=session)
    (chunk,) = packer.chunks(iter(range(count)))
    return chunk


def fed(*sessions: int) -> InferenceResults:
    """Return the sessions of one connection, of two rows each."""
    results = InferenceResults("input", "worker:0", FeedConfig())
    for session in sessions:
        results.fed(rows(2, session), connection=3)
    return results


def answer(results: InferenceResults, session: int, count: int = 2) -> None:
    results.begin_batch()
    results.handed_out(session, 2)
    results.add([0.5] * count)


def test_a_session_ends_once_its_last_result_is_fetched():
    results = fed(7)
    answer(results, 7)
    assert results.session(7).answered_rows == 2
    results.drop_fetched(7)
    assert results.session(7).ready, "its result was not taken"
    results.session(7).ready.clear()
    results.drop_fetched(7)
    with pytest.raises(FeedError, match="session 7 is not known here"):
        results.session(7)


def test_a_connection_that_ends_leaves_the_sessions_with_rows_to_answer():
    results = fed(7, 8)
    answer(results, 7)
    assert results.disconnected(3) == [8]
    assert results.disconnected(3) == []


def test_a_reader_that_stops_fails_what_it_has_not_answered_and_nothing_else():
    results = fed(7, 8, 9)
    answer(results, 7)
    answer(results, 8, 1)
    stopped = results.end()
    assert str(stopped) == "worker:0 returned 1 results for 2 rows"
    assert results.session(7).answered_rows == 2
    for session, text in ((8, "returned 1 results"), (9, "stopped with 0 results for 2 rows")):
        with pytest.raises(ResultCountError, match=text):
            results.session(session)
    assert results.end() is None
