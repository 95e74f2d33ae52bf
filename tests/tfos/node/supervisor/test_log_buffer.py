"""Lines of a node's output: clean, cut, rate-limited, remembered."""

import os
import stat

import pytest

from tfos.node.supervisor.log_buffer import (
    BURST_LINES,
    LINES_PER_S,
    MAX_LINE_CHARS,
    MAX_PENDING_BYTES,
    TAIL_LINES,
    LineSplitter,
    NodeLog,
    clean_line,
)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(tmp_path, clock):
    node_log = NodeLog(tmp_path / "node.log", clock=clock)
    yield node_log
    node_log.close()


@pytest.mark.attack("A24")
@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain\r\n", "plain"),
        ("grüße\t1".encode(), "grüße\t1"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        (b"\x1b[2Jwiped", "\\x1b[2Jwiped"),
        (b"1/3\r2/3\r3/3", "3/3"),
        (b"1/3\x08\x08\x082/3", "2/3"),
        (b"a\x00b\x7f", "a\\x00b\\x7f"),
        (b"bad \xff utf", "bad \\xff utf"),
        ("right-to-left \u202e".encode(), "right-to-left \\u202e"),
        ("\U000e0041".encode(), "\\U000e0041"),
    ],
)
def test_nothing_that_could_drive_a_terminal_is_shown(raw, shown):
    assert clean_line(raw) == shown


def test_a_long_line_is_cut_and_says_so():
    shown = clean_line(b"x" * (MAX_LINE_CHARS + 7))
    assert shown == "x" * MAX_LINE_CHARS + " ... (7 more characters)"
    shown = clean_line(b"\x01" * MAX_LINE_CHARS)
    assert shown == "\\x01" * (MAX_LINE_CHARS // 4) + f" ... ({3 * MAX_LINE_CHARS} more characters)"


def test_lines_are_put_together_across_reads():
    splitter = LineSplitter()
    assert splitter.feed(b"on") == []
    assert splitter.feed(b"e\ntwo\nthr") == [b"one", b"two"]
    assert splitter.finish() == [b"thr"]
    assert splitter.finish() == []


def test_a_line_without_end_does_not_grow_in_memory():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * MAX_PENDING_BYTES) == []
    assert splitter.feed(b"y") == [b"x" * MAX_PENDING_BYTES + b"y"]
    assert splitter.finish() == []


@pytest.mark.fault("F60")
def test_a_burst_passes_and_a_flood_is_counted(log, clock):
    log.add([b"line"] * (BURST_LINES + 30))
    lines, dropped = log.take()
    assert (len(lines), dropped) == (BURST_LINES, 30)
    clock.now_s += 0.5
    log.add([b"line"] * 500)
    lines, dropped = log.take()
    assert (len(lines), dropped) == (LINES_PER_S / 2, 500 - LINES_PER_S / 2)
    assert log.take() == ((), 0)


def test_the_tail_has_the_last_lines_even_if_they_were_dropped(log):
    log.add([b"%d" % number for number in range(BURST_LINES + 50)])
    tail = log.tail()
    assert len(tail) == TAIL_LINES
    assert tail[-1] == str(BURST_LINES + 49)


@pytest.mark.attack("A16")
def test_other_users_may_not_read_the_file(log):
    before = os.umask(0)
    try:
        NodeLog(log.path.with_name("another.log")).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.path.with_name("another.log").stat().st_mode) == 0o640


def test_the_file_has_the_raw_bytes(log):
    log.write(b"\x1b[31mred\x00")
    log.write(b"\n")
    assert log.path.read_bytes() == b"\x1b[31mred\x00\n"


@pytest.mark.fault("F39")
def test_a_full_disk_costs_the_file_and_not_the_node(clock, tmp_path):
    log = NodeLog(tmp_path / "full", clock=clock)
    log.close()
    with open("/dev/full", "ab", buffering=0) as log._file:
        log.write(b"lost\n")
    assert log.write_error.endswith("No space left on device")


def test_what_tensorflow_says_at_every_import_stays_in_the_file(log):
    greeting = (
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795247327.100285   16555 port.cc:153] oneDNN custom operations are on. You "
        b"may see slightly different numerical results due to floating-point round-off errors.\n"
        b"I0000 00:00:1795762321.506715   32628 cudart_stub.cc:31] Could not find cuda drivers on "
        b"your machine, GPU will not be used.\n"
        b"E0000 00:00:1795762336.928960   32628 cuda_platform.cc:52] failed call to cuInit: "
        b"INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)\n"
        b"2026-11-27 06:44:54,454 INFO tensorflow: Assets written to: /m/.663b4c629ea1/assets\n"
    )
    serious = (
        "WARNING: All log messages before absl::InitializeLog() is called by hand",
        "E0000 00:00:1795247327.100285   16555 port.cc:153] oneDNN custom operations are on.",
        "F0000 00:00:1795247327.2 1 tensor.cc:1] Check failed",
        "E0000 00:00:1795762336.9 1 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA "
        "error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
        "2026-11-27 06:44:54,454 INFO tensorflow: Assets written to: /models/mine/assets",
    )
    log.write(greeting + "\n".join(serious).encode() + b"\n")
    assert log.take() == (serious, 0)
    assert log.tail() == serious
    assert log.path.read_bytes().startswith(greeting)


def test_tfos_says_little_of_itself_unless_it_is_asked(log, tmp_path):
    when = b"2026-11-23 00:31:05,112"
    details = [
        when + b" INFO ps.server.lifecycle: ps:0 EMPTY -> SERVING",
        when + b" DEBUG rpc.client.connect: server:0 is reached",
    ]
    others = [
        when + b" WARNING ps.server.lifecycle: late",
        when + b" INFO user: of the user",
        when + b" INFO tfos: going on from step 7",
        b"INFO ps.server.lifecycle: as a user might print it",
    ]
    log.write(b"\n".join([*details, *others, b""]))
    assert log.take() == (tuple(line.decode() for line in others), 0)
    assert log.path.read_bytes().startswith(details[0])
    assert log.tail()[0] == details[0].decode()  # a failure shows all
    asked = NodeLog(tmp_path / "asked", show_details=True)
    asked.write(details[0] + b"\n")
    assert asked.take() == ((details[0].decode(),), 0)
    asked.close()
