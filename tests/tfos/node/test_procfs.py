"""What the kernel knows about processes: ancestors, descendants, their ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_S
from tfos.node import procfs

TREE = """
import os, subprocess, sys, time
from pathlib import Path
from tfos.node import procfs
procfs.become_subreaper()
spared = subprocess.Popen(["sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "1000"])
    os._exit(0)
shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000; true"])
def sleeping():
    pids = procfs.descendants(spare={spared.pid})
    return sum(Path(f"/proc/{pid}/comm").read_text().strip() == "sleep" for pid in pids)
deadline_s = time.monotonic() + 60
while sleeping() < 3 and time.monotonic() < deadline_s:
    time.sleep(0.01)
before = sleeping()
left = procfs.kill_descendants(spare={spared.pid}, timeout_s=60)
procfs.reap_orphans(own={shell.pid, spared.pid})
print(before, left, spared.poll(), shell.wait(), sorted(procfs.descendants()) == [spared.pid])
spared.kill(); spared.wait()
"""


TICK = """
import os, subprocess, sys, time
from pathlib import Path
from tfos.node import procfs
procfs._CHILD_LISTS = Path(sys.argv[1])
procfs.become_subreaper()
spared = subprocess.Popen(["sleep", "1000"])
shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000; true"])
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)  # both are left to this process
def states():
    return sorted(procfs.stat_fields(pid)[0] for pid in procfs.descendants())
deadline_s = time.monotonic() + 60
while states() != [b"S"] * 4 + [b"Z"] * 2 and time.monotonic() < deadline_s:
    time.sleep(0.01)
ours = procfs.descendants(spare={spared.pid})
wanted = sum(map(procfs.resident_bytes, ours))
asked, stat_fields = set(), procfs.stat_fields
procfs.stat_fields = lambda pid: asked.add(pid) or stat_fields(pid)
found = procfs.descendants_rss_bytes(spare={spared.pid})
procfs.reap_orphans(own={spared.pid, shell.pid})
strangers = asked - {os.getpid(), spared.pid, *ours}
print(found == wanted > 0, states() == [b"S"] * 4, not strangers)
procfs.kill_descendants()
spared.wait(); shell.wait(); procfs.reap_orphans(own=())
"""


@pytest.mark.parametrize("child_lists", ["/proc/thread-self/children", "/none"])
def test_a_tick_reads_no_processes_of_others_where_the_kernel_lists_children(child_lists):
    ticking = subprocess.run(
        [sys.executable, "-c", TICK, child_lists],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        timeout=100,
        check=True,
    )
    has_lists = Path(child_lists).exists()
    assert ticking.stdout == f"True True {has_lists}\n", ticking.stderr


def test_parent_is_read_past_any_process_name():
    child = subprocess.Popen(["bash", "-c", "exec -a 'a) S 1 (b' sleep 1000"])
    try:
        assert procfs.parent_of(child.pid) == os.getpid()
        assert procfs.parent_of(2**22 + 1) is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.fault("F57")
def test_descendants_are_killed_across_sessions_and_the_spared_child_is_not():
    tree = subprocess.Popen(
        [sys.executable, "-c", TREE],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    with tree:
        out, _ = tree.communicate(timeout=100)
    assert out == "3 [] None -9 True\n"


def test_an_ended_process_is_seen_and_a_running_one_is_waited_for():
    child = subprocess.Popen(["sleep", "1000"])
    pidfd = procfs.open_pidfd(child.pid)
    assert pidfd is not None
    assert procfs.wait_exited([pidfd], 0) is False
    child.kill()
    assert procfs.wait_exited([pidfd], WAIT_S) is True
    child.wait()
    os.close(pidfd)
    assert procfs.open_pidfd(child.pid) is None


def test_options_of_a_command_line_are_found():
    child = subprocess.Popen(["sleep", "1000"], executable="sleep")
    spark = subprocess.Popen(
        ["java", "-c", "echo up; read x", "--executor-id", "3", "--hostname", "host-b", "--cores"],
        executable="/bin/bash",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        # The kernel shows the command line a moment after Popen returns.
        assert spark.stdout is not None
        assert spark.stdout.readline() == b"up\n"
        assert procfs.command_line_option(spark.pid, "--executor-id") == "3"
        assert procfs.command_line_option(spark.pid, "--hostname") == "host-b"
        assert procfs.command_line_option(spark.pid, "--cores") == ""
        assert procfs.command_line_option(child.pid, "--executor-id") == ""
        assert procfs.java_ancestor() is None
    finally:
        for process in (child, spark):
            process.kill()
            process.wait()
        for pipe in (spark.stdin, spark.stdout):
            assert pipe is not None
            pipe.close()


def test_oom_kills_are_counted_where_the_cgroup_tells():
    assert procfs.oom_kills() >= 0


@pytest.mark.parametrize(
    ("controllers", "name", "unlimited"),
    [("", "memory.max", "max"), ("memory", "memory/memory.limit_in_bytes", str(2**63 - 4096))],
)
def test_the_smallest_limit_of_a_cgroup_and_those_around_it_counts(
    controllers, name, unlimited, tmp_path, monkeypatch
):
    monkeypatch.setattr(procfs, "_CGROUPS", tmp_path)
    monkeypatch.setattr(procfs, "_own_cgroups", lambda: [(controllers, "/pod/container")])
    top = tmp_path / name
    inner = top.parent / "pod" / "container" / top.name
    inner.parent.mkdir(parents=True)
    assert procfs.memory_limit_bytes() is None
    inner.write_text(f"{unlimited}\n")
    assert procfs.memory_limit_bytes() is None
    top.write_text("4096000\n")
    assert procfs.memory_limit_bytes() == 4096000
    inner.write_text("1024000\n")
    assert procfs.memory_limit_bytes() == 1024000
