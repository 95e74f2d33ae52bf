"""A trainer: an item has one end, whatever its function has forked or how it leaves."""

from __future__ import annotations

import collections
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tfos.many.messages import Ending, FromTrainer, TrainingRaised
from tfos.many.slot import trainer_process
from tfos.many.slot.trainer_process import TrainerProcess, copy_lines
from tfos.node import procfs
from tfos.node.child_link import ChildLink
from tfos.node.supervisor.children import Child

PROGRAM = """
import os, pickle, socket, sys, tempfile
import cloudpickle
from tfos.many.messages import FromTrainer, TrainItem
from tfos.many.slot.specs import TrainerSpec
from tfos.many.slot.trainer import Trainer
from tfos.node.child_link import ChildLink

def forks(item):
    if item == 3:
        sys.exit("bye")
    if item == 4:
        return sys._getframe()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return {"item": item, "is_fork": not child}

own = os.getpid()
items, value = tempfile.TemporaryFile(), tempfile.TemporaryFile()
ours, theirs = socket.socketpair()
link, offset = ChildLink(ours, FromTrainer), 0
for item in map(int, sys.argv[1:]):
    data = pickle.dumps(item)
    offset += items.write(data)
    link.send(TrainItem(offset - len(data), len(data), value.fileno()))
items.flush()
ours.shutdown(socket.SHUT_WR)
spec = TrainerSpec(
    function=cloudpickle.dumps(forks), is_grouped=False, items_fd=items.fileno(),
    link_fd=theirs.fileno(), spark_files="", title="trainer",
)
Trainer(spec, ChildLink(theirs, TrainItem)).run()
if os.getpid() != own:
    os._exit(0)
theirs.close()
while (message := link.receive(60)) is not None:
    print(type(message).__name__, getattr(message, "metrics", ""), getattr(message, "error", ""))
    print("unpicklable" if getattr(message, "is_unpicklable", False) else "")
if os.fstat(value.fileno()).st_size:
    print(pickle.load(value))
"""


def trained(*items):
    line = [sys.executable, "-c", PROGRAM, *items]
    run = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return [line.rstrip() for line in run.stdout.splitlines() if line]


def test_what_a_function_has_forked_ends_no_item():
    assert trained("1", "2") == [
        "TrainerReady",
        "Returned {'item': 1.0}",
        "Returned {'item': 2.0}",
        "{'item': 2, 'is_fork': False}",
    ]


def test_a_function_that_calls_exit_is_told_to_return_and_the_next_item_is_trained():
    told = trained("3", "4", "1")
    assert "it called sys.exit('bye'); let the function return a value in its place" in told
    assert any("it returned a frame that cannot be pickled" in line for line in told)
    assert told.count("unpicklable") == 1
    assert told[-1] == "{'item': 1, 'is_fork': False}"


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (
            TrainingRaised(0.0, "ModuleNotFoundError: No module named 'mylib'"),
            "before it began: ModuleNotFoundError.*'mylib'. .* sc.addPyFile",
        ),
        (TrainingRaised(0.0, "ImportError: libcuda"), "before it began: ImportError: libcuda$"),
        (False, "no start within 300 s"),
    ],
)
def test_a_trainer_that_does_not_come_to_its_item_costs_no_attempt(got, text):
    trainer: Any = TrainerProcess.__new__(TrainerProcess)
    trainer._next = lambda timeout_s: got
    ended = trainer.await_ready(3)
    assert ended.how is Ending.NOT_BEGUN
    assert re.search(text, ended.error)


def test_an_item_whose_function_lacks_a_package_has_the_extra_in_its_error(monkeypatch):
    monkeypatch.setattr(trainer_process, "private_bytes", lambda pid: 1)
    trainer: Any = TrainerProcess.__new__(TrainerProcess)
    trainer._child, trainer._first_bytes = SimpleNamespace(pid=1), 0
    trainer._tail = collections.deque()
    trainer._next = lambda timeout_s: TrainingRaised(
        0.0, "Traceback:\nModuleNotFoundError: No module named 'keras'"
    )
    ended = trainer.outcome(3, 0.0, None)
    assert ended.how is Ending.RAISED
    assert "'keras'. The extra [cpu] has it" in ended.error


@pytest.mark.fault("F06")
def test_a_suspended_trainer_is_ended_and_its_item_has_another_attempt(monkeypatch):
    monkeypatch.setattr(trainer_process, "SUSPENDED_S", 0.2)
    monkeypatch.setattr(trainer_process, "_LOOK_S", 0.05)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "120"])
    child = Child(process.pid, os.open(os.devnull, os.O_RDONLY), None)
    process.returncode = 0  # `Child.reap` waits for it
    trainer: Any = TrainerProcess.__new__(TrainerProcess)
    trainer._child, trainer._link = child, ChildLink(ours, FromTrainer)
    trainer._oom_kills, trainer._kill_reason, trainer._tail = procfs.oom_kills(), "", []
    trainer._reader, trainer._first_bytes = SimpleNamespace(join=lambda timeout_s: None), 1
    os.kill(child.pid, signal.SIGSTOP)
    try:
        ended = trainer.outcome(3, time.monotonic(), 10.0)
        assert ended.how is Ending.DIED
        assert "SIGKILL after it was suspended (SIGSTOP) for 0 s" in ended.error
    finally:
        child.kill()
        procfs.wait_exited([child.pidfd], 10.0)
        child.reap()
        child.close()
        ours.close()
        theirs.close()


def test_a_trainer_has_grown_by_what_it_keeps_after_its_first_item(monkeypatch):
    private, clock = [3 << 30], [0.0]
    monkeypatch.setattr(trainer_process, "private_bytes", lambda pid: private[0])
    monkeypatch.setattr("tfos.many.slot.trainer_process.time.monotonic", lambda: clock[0])
    trainer: Any = TrainerProcess.__new__(TrainerProcess)
    trainer._child, trainer._started_s, trainer._first_bytes = SimpleNamespace(pid=1), 0.0, 0
    trainer._next, trainer._tail = lambda timeout_s: TrainingRaised(1.0, "no"), collections.deque()
    clock[0] = trainer_process.LEAST_AGE_S + 1
    assert not trainer.has_grown  # what it has loaded before is not known to grow
    trainer.outcome(3, 0.0, None)
    private[0] += trainer_process.GROWN_BYTES
    trainer.outcome(4, 0.0, None)
    assert not trainer.has_grown
    private[0] += 1
    assert trainer.has_grown
    clock[0] = 1.0  # it has just replaced another one
    assert not trainer.has_grown


def test_output_without_line_ends_keeps_an_error_small(tmp_path, capsys):
    output = tmp_path / "output"
    output.write_bytes(b"first\n" + b"=" * 3_000_000 + b"\rlast \xff")
    tail = collections.deque(["before"], maxlen=20)
    with open(output, "rb") as file:
        copy_lines(file.fileno(), tail)
    assert len(tail) == 20
    assert sum(map(len, tail)) <= 20_000
    assert tail[-1].endswith("=\rlast \\xff")
    assert len(capsys.readouterr().err) > 3_000_000
