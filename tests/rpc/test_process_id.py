"""A process by pid, start and kernel: only what has certainly ended is said to have ended."""

import os
import subprocess
import sys

import msgspec
import pytest

from rpc import process_id
from rpc.process_id import MAX_PID, ProcessId

CHILD = (
    "import sys, msgspec; from rpc.process_id import ProcessId;"
    "sys.stdout.buffer.write(msgspec.json.encode(ProcessId.of_this())); sys.stdout.flush();"
    "sys.stdin.read()"
)


@pytest.fixture
def child():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def named(process) -> ProcessId:
    data = b""
    while not data.endswith(b"}"):
        data += os.read(process.stdout.fileno(), 4096)
    return msgspec.json.decode(data, type=ProcessId)


def test_this_process_lives_and_is_itself():
    assert ProcessId.of_this() == ProcessId.of_this()
    assert ProcessId.of_this().has_ended() is False


def test_another_process_lives_until_it_ends_reaped_or_not(child):
    found = named(child)
    assert found.pid == child.pid
    assert found != ProcessId.of_this()
    assert found.has_ended() is False
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert found.has_ended() is True  # a zombie
    child.wait()
    assert found.has_ended() is True


def test_a_later_process_of_the_same_pid_is_another_one():
    assert msgspec.structs.replace(ProcessId.of_this(), started="1").has_ended() is True


def test_what_cannot_be_looked_up_has_not_ended(monkeypatch):
    here = ProcessId.of_this()
    assert msgspec.structs.replace(here, kernel="another boot pid:[1]").has_ended() is None
    assert msgspec.structs.replace(here, started="").has_ended() is None
    monkeypatch.setattr(process_id, "_state_and_start", lambda _pid: ("", ""))
    assert here.has_ended() is None


@pytest.mark.attack("A18")
@pytest.mark.parametrize("pid", [-1, 0, MAX_PID + 1, 1 << 70])
def test_a_pid_that_no_process_has_is_refused(pid):
    data = msgspec.json.encode({"kernel": "k", "pid": pid, "started": "1"})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=ProcessId)


def test_a_subclass_has_the_fields_in_one_row():
    class Owner(ProcessId, frozen=True, kw_only=True):
        job: str

    fields = msgspec.to_builtins(Owner.of_this(job="a"))
    assert set(fields) == {"kernel", "pid", "started", "job"}
