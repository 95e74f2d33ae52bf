from __future__ import annotations

import io

import pytest

from tfos.console.console import Console
from tfos.console.printable import printable
from tfos.console.progress import Sample, TrainingProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_node_line_has_its_prefix():
    out = io.StringIO()
    Console(stream=out).node_lines("worker:1@h", ("one", "two"), 3)
    assert out.getvalue().splitlines() == [
        "worker:1@h | one",
        "worker:1@h | two",
        "worker:1@h | (3 lines dropped: over the rate limit; see its log)",
    ]


@pytest.mark.attack("A24")
def test_terminal_escapes_of_a_node_are_shown_not_obeyed():
    assert printable("\x1b[2Jgone\rfake\u202e") == r"\x1b[2Jgone\rfake\u202e"
    assert printable("tab\tand ünïcode") == "tab\tand ünïcode"
    assert len(printable("x" * 10_000_000)) < 5000


def test_a_silent_console_shows_warnings_only():
    out = io.StringIO()
    console = Console(enabled=False, stream=out)
    console.line("a")
    console.node_lines("w", ("b",), 0)
    console.progress("c")
    console.warn("d")
    assert out.getvalue() == "tfos | WARNING: d\n"


def test_progress_is_plain_lines_where_nobody_could_see_a_live_one():
    out = io.StringIO()
    console = Console(stream=out)
    console.progress("10 rows")
    console.progress("done", final=True)
    assert out.getvalue() == "tfos | 10 rows\ntfos | done\n"


def test_a_live_line_is_replaced_and_the_final_one_stays():
    out = _Terminal()
    console = Console(stream=out)
    console.progress("10 rows")
    console.node_lines("worker:0@h", ("hello",), 0)
    console.progress("20 rows")
    console.progress("done", final=True)
    text = out.getvalue()
    assert "worker:0@h | hello" in text
    assert text.endswith("tfos | done\n")


def test_a_closed_stream_is_no_failure():
    out = io.StringIO()
    console = Console(stream=out)
    out.close()
    console.line("nobody reads this")
    assert not console.enabled


def test_rates_are_over_the_last_seconds():
    progress = TrainingProgress(3)
    progress.start_epoch(0, Sample(0.0, 0, 0.0))
    for second in range(1, 31):
        rows = 100 * second if second <= 10 else 1000 + 200 * (second - 10)
        progress.add(Sample(float(second), rows, second * 2.0, loss=0.25))
    assert progress.rows_per_s == pytest.approx(200)
    assert progress.steps_per_s == pytest.approx(2)
    assert "loss 0.25" in str(progress)


def test_the_time_left_comes_from_rows_once_an_epoch_is_known():
    progress = TrainingProgress(3)
    progress.rows_per_epoch = 1000
    progress.start_epoch(1, Sample(0.0, 1000, 0.0))
    progress.add(Sample(1.0, 1100, 1.0))
    assert progress.eta_s == pytest.approx((2 * 1000 - 100) / 100)


def test_the_time_left_of_the_first_epoch_comes_from_its_tasks():
    progress = TrainingProgress(2)
    progress.start_epoch(0, Sample(0.0, 0, 0.0))
    progress.add(Sample(10.0, 500, 1.0))
    assert progress.eta_s is None
    progress.epoch_fraction = 0.25
    assert progress.eta_s == pytest.approx(2 * 40 - 10)
    assert "ETA 1:10 min" in str(progress)


def test_no_time_is_told_before_a_row_was_trained():
    progress = TrainingProgress(6)
    progress.start_epoch(0, Sample(0.0, 0, 0.0))
    progress.add(Sample(10.0, 0, 0.0))
    progress.epoch_fraction = 0.25  # its rows are in the workers, which still compile
    assert progress.eta_s is None
    assert "ETA -" in str(progress)
