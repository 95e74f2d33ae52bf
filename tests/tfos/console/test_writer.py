"""Output that nobody reads holds up nobody; what is written keeps its order and its lines whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.support.unread_pipe import UnreadPipe
from tests.support.waiting import WAIT_S
from tfos.console import writer
from tfos.console.console import Console
from tfos.console.direct_stream import DirectStream


@pytest.fixture
def pipe():
    made = UnreadPipe()
    yield made
    if not made.stream.closed:
        made.close()


def fill(console: Console, pipe: UnreadPipe) -> None:
    """Write more than the pipe has room for."""
    for number in range(100):
        console.node_lines("worker:0@h", (f"{number} " + "x" * 1000,), 0)
    assert not console.flush(0.05)


def test_lines_keep_their_order_and_the_lost_ones_are_counted(pipe, monkeypatch):
    console = Console(stream=pipe.stream)
    fill(console, pipe)
    monkeypatch.setattr(writer, "MOST_CHARS", 20_000)
    console.warn("the driver's line is kept", waits=False)
    for number in range(100, 200):
        console.node_lines("worker:0@h", (f"{number} " + "x" * 1000,), 0)
    console.line("the last", waits=False)
    pipe.read()
    assert console.flush(WAIT_S)
    lines = pipe.close().splitlines()
    shown = [int(line.split()[2]) for line in lines if line.startswith("worker:0@h")]
    (gap,) = [line for line in lines if "lines dropped" in line]
    assert (
        gap == f"tfos | ({200 - len(shown)} lines dropped: nobody read standard error for a while)"
    )
    assert shown == sorted(shown)
    assert lines.index(gap) < lines.index("tfos | WARNING: the driver's line is kept")
    assert shown[-1] == 199
    assert lines[-1] == "tfos | the last"


def test_a_blocked_stream_holds_up_the_driver_once_and_not_for_each_line(pipe):
    console = Console(stream=pipe.stream)
    fill(console, pipe)
    began_s = time.monotonic()
    for _ in range(100):
        console.line("more")
    assert time.monotonic() - began_s < 100 * writer.PATIENCE_S / 2
    pipe.read()
    assert console.flush(WAIT_S)
    assert pipe.close().splitlines()[-100:] == ["tfos | more"] * 100


def test_what_the_program_writes_itself_comes_behind_and_between_whole_lines(pipe):
    console = Console(stream=pipe.stream)
    console.line("before")
    pipe.stream.write("the program's own\n")
    pipe.read()

    def write_own() -> None:
        for _ in range(200):
            pipe.stream.write("own " + "y" * 1000 + "\n")

    own = threading.Thread(target=write_own)
    own.start()
    for _ in range(20):
        console.node_lines("w@h", ("x" * 1000,) * 20, 0)
    own.join(WAIT_S)
    assert console.flush(WAIT_S)
    lines = pipe.close().splitlines()
    assert lines[:2] == ["tfos | before", "the program's own"]
    assert set(lines[2:]) == {"own " + "y" * 1000, "w@h | " + "x" * 1000}
    assert len(lines) == 2 + 200 + 400


def test_a_descriptor_that_does_not_block_gets_all_of_it(pipe):
    os.set_blocking(pipe.stream.fileno(), False)
    done = threading.Thread(target=lambda: DirectStream(pipe.stream).write("z" * 300_000))
    done.start()
    pipe.read()
    done.join(WAIT_S)
    assert pipe.close() == "z" * 300_000


def test_where_no_thread_can_be_started_the_last_lines_are_written_by_flush(pipe, monkeypatch):
    """At interpreter exit Python 3.12 starts no thread."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    console = Console(stream=pipe.stream)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        console.line("the summary", waits=False)
        assert console.flush(WAIT_S)
    assert pipe.close() == "tfos | the summary\n"


PROGRAM = """
import sys
from tfos.console.console import Console
console = Console()
for number in range({lines}):
    console.node_lines("worker:0@h", (f"{{number}} " + "x" * 1000,), 0)
console.line("the summary", waits=False)
"""


@pytest.mark.slow
def test_an_exit_writes_the_last_lines():
    program = PROGRAM.format(lines=500)
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 501
    assert done.stderr.endswith("tfos | the summary\n")


@pytest.mark.slow
def test_an_exit_whose_last_lines_nobody_reads_is_an_orderly_one():
    """A buffer's lock that the writer's thread held would end Python with a fatal error."""
    program = f"from tfos.console import writer; writer.EXIT_S = 0.2\n{PROGRAM.format(lines=500)}"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as child:
        try:
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()
