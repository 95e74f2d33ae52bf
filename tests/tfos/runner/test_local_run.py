"""Ranks as processes of this host: values in rank order, failures with their cause."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from subprocess import run
from typing import Any, cast

import cloudpickle
import numpy as np
import psutil
import pytest

import tfos
from tests.support.feed import eventually
from tests.support.waiting import WAIT_S
from tfos import runner
from tfos.errors import (
    NodeFailedError,
    NoResultError,
    NotPicklable,
    PhaseError,
    SettingsError,
    ShutdownTimeout,
    UnsupportedError,
)
from tfos.runner import local_run
from tfos.runner.local_run import run_local

pytestmark = pytest.mark.socket
ANY = cast("Callable[[object], Any]", lambda value: value)
"""Hides a wrong type from the type checker."""


@pytest.fixture(autouse=True, scope="module")
def _by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def sums(count, scale=1.0):
    total = runner.allreduce(np.full(count, (runner.rank() + 1) * scale), "sum")
    return runner.rank(), runner.size(), runner.local_rank(), float(total.sum())


def test_values_come_back_in_rank_order_and_the_runner_returns_that_of_rank_0():
    expected = [(rank, 2, rank, 30.0) for rank in range(2)]
    assert run_local(sums, (5,), {"scale": 2.0}, 2) == expected
    assert tfos.Runner(np=-2).run(sums, count=5, scale=2.0) == expected[0]


def test_ranks_run_below_a_long_path_of_temporary_files(tmp_path, monkeypatch):
    """As batch systems set TMPDIR: a Unix socket's path has 107 bytes at most."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert run_local(sums, (5,), {}, 2) == [(rank, 2, rank, 15.0) for rank in range(2)]
    monkeypatch.setattr(local_run, "short_temporary_directory", lambda: str(deep))
    with pytest.raises(NodeFailedError, match=r"OSError: .*at most 107 bytes; name a shorter"):
        run_local(sums, (5,), {}, 1)
    assert list(deep.iterdir()) == []


def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = "import os; from tfos.runner.local_run import run_local; "
    program += "run_local(lambda: os.kill(os.getppid(), 9), (), {}, 1)"
    run([sys.executable, "-c", program], check=False, timeout=WAIT_S)
    assert len(list(tmp_path.iterdir())) == 1
    run_local(os.getpid, (), {}, 1)
    assert list(tmp_path.iterdir()) == []


def says(word):
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    return word


def test_ranks_run_where_the_program_has_closed_its_output():
    """As some daemons do."""
    own = os.dup(1)
    os.close(1)
    try:
        assert run_local(says, ("hello",), {}, 2) == ["hello"] * 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(1)
    finally:
        os.dup2(own, 1)
        os.close(own)


OLDER = """
import os, signal
for name in ("memfd_create", "pidfd_open", "P_PIDFD", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"):
    delattr(os, name)
del signal.pidfd_send_signal
"""


def test_ranks_run_on_a_python_that_lacks_linuxs_newer_calls(tmp_path, monkeypatch):
    """uv's and conda's are built for older systems than they run on."""
    (tmp_path / "sitecustomize.py").write_text(OLDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, name)
    lacks = run_local(lambda: (hasattr(os, "memfd_create"), *sums(5)), (), {}, 2)
    assert lacks == [(False, rank, 2, rank, 15.0) for rank in range(2)]


def tf_config():
    import json

    return json.loads(os.environ["TF_CONFIG"])


def test_tf_config_names_all_ranks_whatever_the_drivers_own_says(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"index": 7}}')
    found = run_local(tf_config, (), {}, 3)
    assert [each["task"] for each in found] == [{"type": "worker", "index": n} for n in range(3)]
    addresses = found[0]["cluster"]["worker"]
    assert all(each["cluster"] == {"worker": addresses} for each in found)
    assert len(set(addresses)) == 3
    for address in addresses:
        host, port = address.split(":")
        assert host == "127.0.0.1"
        with socket.create_server(("", int(port))):  # given up with the run
            pass


def inits_horovod(path, name):
    import importlib

    sys.path.insert(0, path)
    hvd = importlib.import_module(name)
    hvd.init()
    return hvd.size()


@pytest.mark.parametrize("name", ["horovod.tensorflow", "horovod.tensorflow.keras"])
def test_horovod_that_finds_no_other_rank_is_refused(name, tmp_path):
    """With as many processes as there are, by a launcher of its own, it may go on."""
    for size in (1, 2):
        package = tmp_path / str(size) / "horovod" / "tensorflow"
        (package / "keras").mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(f"def init(): ...\ndef size(): return {size}\n")
        (package / "keras" / "__init__.py").write_text("from horovod.tensorflow import init, size")
    alone, joined = (str(tmp_path / each) for each in "12")
    assert run_local(inits_horovod, (alone, name), {}, 1) == [1]
    assert run_local(inits_horovod, (joined, name), {}, 2) == [2, 2]
    with pytest.raises(NodeFailedError) as caught:
        run_local(inits_horovod, (alone, name), {}, 2)
    text = str(caught.value)
    assert "init() has found 1 process in a run of 2 ranks" in text
    assert "docs/guides/runner.md" in text


def trained_together():
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    own = tf.constant(runner.rank() + 1.0)
    total = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
    )
    return strategy.num_replicas_in_sync, float(total)


@pytest.mark.tf
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_strategy_of_tensorflows_joins_all_ranks():
    assert run_local(trained_together, (), {}, 2, timeout_s=240.0) == [(2, 3.0)] * 2


def fails(how):
    runner.barrier()
    if runner.rank() == 1:
        if how == "raises":
            raise ValueError("no luck here")
        os.kill(os.getpid(), signal.SIGKILL)
    runner.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", r"ValueError: no luck here\nraised in rank:1"),
        ("is killed", "rank 1 killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_the_headline_and_the_others_end(how, text):
    with pytest.raises(NodeFailedError, match=text) as found:
        run_local(fails, (how,), {}, 2)
    symptoms = [each.error_type for each in found.value.failures[1:]]
    assert symptoms == ["tfos.errors.RankLost"]


def waits_without_end(late):
    if runner.rank() == late:
        threading.Event().wait()


def test_a_function_that_takes_longer_than_it_may_ends_with_its_own_sentence():
    text = r"within timeout_s=0.5 on .*rank:{}; all ranks were stopped by force. Pass more"
    with pytest.raises(ShutdownTimeout, match=text.format(1)):
        tfos.Runner(np=-2, timeout_s=0.5).run(waits_without_end, late=1)
    slot: dict[str, Any] = {"num_slots": 1, "local_mode": True, "use_gpu": False}
    with pytest.raises(ShutdownTimeout, match=text.format(0)):
        tfos.MirroredStrategyRunner(**slot, timeout_s=0.5).run(waits_without_end, late=0)


def test_what_cannot_be_pickled_is_named_on_either_way():
    lock = __import__("threading").Lock()
    with pytest.raises(NotPicklable, match=r"fn .* refers to 'lock'"):
        run_local(lambda: lock, (), {}, 1)
    with pytest.raises(NodeFailedError, match="rank 0 returned a lock that cannot"):
        run_local(lambda: __import__("threading").Lock(), (), {}, 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tfos.Runner(np=0), SettingsError, "got 0: 4 is four"),
        (lambda: tfos.Runner(np=True), SettingsError, "got True"),
        (
            lambda: tfos.Runner(np=1, driver_log_verbosity=ANY("log_callback_only")),
            UnsupportedError,
            "verbose=False",
        ),
        (lambda: tfos.run(ANY(3)), SettingsError, "must be a function, got int"),
        (lambda: tfos.run(sums, "ab"), SettingsError, "must be a tuple or list, got 'ab'"),
        (lambda: tfos.run(sums, kwargs=ANY({1: 2})), SettingsError, "text keys"),
        (
            lambda: tfos.run(sums, (1,), num_proc=0, sc=ANY(object())),
            SettingsError,
            "from 1, got 0",
        ),
        (lambda: tfos.run(sums, timeout_s=0), SettingsError, "timeout_s must be > 0"),
        (lambda: tfos.Runner(np=1, timeout_s=-1), SettingsError, "timeout_s must be > 0"),
        (runner.rank, PhaseError, r"rank\(\) was called outside of a run"),
        (lambda: runner.allreduce(1.0, "sum"), PhaseError, r"allreduce\(\) was called outside"),
    ],
)
def test_wrong_uses_are_refused_before_anything_starts(call, error, text):
    with pytest.raises(error, match=text):
        call()


def raises_beside_a_thread():
    threading.Thread(target=threading.Event().wait).start()  # no daemon: Python would wait for it
    raise ValueError("no luck here")


def test_the_error_of_a_rank_with_a_thread_that_goes_on_is_shown_all_the_same():
    with pytest.raises(NodeFailedError, match="ValueError: no luck here"):
        run_local(raises_beside_a_thread, (), {}, 1)


def returns_beside_a_thread():
    threading.Thread(target=threading.Event().wait, name="listens").start()
    return runner.rank()


@pytest.mark.slow
def test_a_rank_that_has_returned_ends_although_its_thread_goes_on(capfd):
    assert run_local(returns_beside_a_thread, (), {}, 1) == [0]
    told = capfd.readouterr().err
    assert "rank 0 has returned, and its threads (listens) go on: it ends without them" in told


def returns_without_standard_error():
    sys.stderr = cast("Any", None)
    return returns_beside_a_thread()


@pytest.mark.slow
def test_a_rank_that_has_no_standard_error_ends_although_its_thread_goes_on():
    assert run_local(returns_without_standard_error, (), {}, 1, timeout_s=WAIT_S) == [0]


def raises_on_rank_1():
    if runner.rank() == 0:
        threading.Event().wait()
    raise ValueError("no luck here")


def test_a_rank_that_the_driver_ends_is_no_failure_of_its_own(monkeypatch):
    monkeypatch.setattr(local_run, "_END_S", 0.1)
    with pytest.raises(NodeFailedError, match="no luck here") as found:
        run_local(raises_on_rank_1, (), {}, 2)
    assert [each.node.index for each in found.value.failures] == [1]


def test_a_rank_that_has_returned_is_named_with_what_ranks_must_do(tmp_path):
    def leaves(path):
        if runner.rank():
            with open(f"{path}.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{path}.new", path)
            return
        assert eventually(lambda: os.path.exists(path), "rank 1 is there")
        with open(path) as file:
            pid = int(file.read())
        assert eventually(lambda: not psutil.pid_exists(pid), "rank 1 has ended")
        runner.allreduce(1, "sum")

    with pytest.raises(NodeFailedError, match=r"rank 1 cannot be reached.*returned already: every"):
        run_local(leaves, (str(tmp_path / "pid"),), {}, 2)


@pytest.mark.parametrize(
    ("code", "error", "told"),
    [
        (0, NoResultError, r"ranks 1 of 2 ended without a value: fn called sys\.exit\(0\)"),
        (None, NoResultError, r"ranks 1 of 2 ended without a value: fn called sys\.exit\(0\)"),
        (3, NodeFailedError, r"SystemExit: 3; it called sys\.exit\(3\); return, or raise"),
    ],
)
def test_sys_exit_means_what_it_means_on_executors(code, error, told):
    def leaves(code):
        if runner.rank():
            sys.exit(code)

    with pytest.raises(error, match=told):
        run_local(leaves, (code,), {}, 2)


@pytest.mark.parametrize("child", ["returns", "raises", "exits"])
def test_what_a_rank_forks_is_no_rank(child):
    def forks(child):
        runner.barrier()
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        elif child == "raises":
            raise ValueError("of the fork")
        elif child == "exits":
            sys.exit(0)
        else:
            return "fork"
        return float(runner.allreduce(1, "sum"))

    assert run_local(forks, (child,), {}, 2) == [2.0, 2.0]
