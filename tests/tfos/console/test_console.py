from __future__ import annotations

import io

import pytest

from rpc.printable import printable
from tests.support.waiting import WAIT_S
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_node_line_has_its_prefix():
    out = io.StringIO()
    console = Console(stream=out)
    console.node_lines("worker:1@h", ("one", "two"), 3)
    assert console.flush(WAIT_S)
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
    assert console.flush(WAIT_S)
    text = out.getvalue()
    assert "worker:0@h | hello" in text
    assert text.endswith("tfos | done\n")


def test_a_last_line_that_was_just_written_does_not_come_again():
    now_s = [0.0]
    stream = io.StringIO()
    lines = ProgressLines(Console(stream=stream), clock=lambda: now_s[0])
    now_s[0] = 60.0
    lines.show("3 of 3 done")
    lines.end("3 of 3 done")
    assert stream.getvalue() == "tfos | 3 of 3 done\n"


def test_the_last_line_comes_also_if_it_is_not_time_for_one():
    stream = io.StringIO()
    lines = ProgressLines(Console(stream=stream))
    lines.show("2 of 3 done")
    lines.end("3 of 3 done")
    assert stream.getvalue() == "tfos | 3 of 3 done\n"


def test_a_silent_console_has_no_last_line():
    stream = io.StringIO()
    ProgressLines(Console(enabled=False, stream=stream)).end("3 of 3 done")
    assert stream.getvalue() == ""


def test_a_closed_stream_is_no_failure():
    out = io.StringIO()
    console = Console(stream=out)
    out.close()
    console.end_progress()
    console.line("nobody reads this")
    assert not console.enabled


def test_details_are_for_those_who_ask():
    out = io.StringIO()
    Console(stream=out).detail("rows take shared memory")
    Console(details=True, stream=out).detail("rows take TCP")
    assert out.getvalue() == "tfos | rows take TCP\n"
