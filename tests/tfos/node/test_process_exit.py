"""The end of a node's process: nothing is lost, and the interpreter is not taken down."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, ctypes, gc, sys, threading, time
from tfos.node.process_exit import leave

class Torn:
    def __del__(self):
        print("torn down")

torn = Torn()
atexit.register(print, "exit handler", flush=False)
left_open = open(sys.argv[1], "w")
left_open.write("rows")
gc.freeze()
started = threading.Event()

def work():
    started.wait()
    print("thread")

threading.Thread(target=work).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
ctypes.CDLL(None).printf(b"%s", b"C's stream\\n")
started.set()
leave(7)
"""


def test_a_process_leaves_with_all_that_it_has_written(tmp_path):
    file = tmp_path / "left-open"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 7, run.stderr
    assert sorted(run.stdout.splitlines()) == ["C's stream", "exit handler", "thread"]
    assert file.read_text() == "rows"


def test_an_exit_handler_that_raises_keeps_no_process():
    program = (
        "import atexit; from tfos.node.process_exit import leave\n"
        "def fails(): raise OSError('disk')\n"
        "atexit.register(fails); leave(3)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 3
    assert "OSError: disk" in run.stderr


@pytest.mark.parametrize(
    ("child", "code", "text"),
    [
        ("pass", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit('x')", 1, ""),
        ("1 / 0", 1, "ZeroDivi"),
        ("sys.stdout.flush(); sys.stdout = None", 0, ""),
        ("sys.stderr.close(); 1 / 0", 1, ""),
    ],
)
def test_what_user_code_forks_does_not_come_back_from_it(child, code, text):
    program = (
        "import os, sys\nfrom tfos.node.process_exit import forks_end\n"
        "try:\n with forks_end():\n  pid = os.fork()\n"
        f"  if not pid:\n   print('forked', end=' ')\n   {child}\n"
        "finally:\n if not pid: print('came back')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.returncode) == (f"forked {code}\n", 0)
    assert text in run.stderr
