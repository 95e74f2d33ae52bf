"""An examination of a Spark that is played: answers, silence, failures, and nothing left."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.support.fake_spark import FakeSpark
from tfos.doctor import collection, executors
from tfos.doctor.collection import CollectRequest, collect
from tfos.doctor.examination import ExaminationRequest, PlaceReport, examine, some_of
from tfos.doctor.findings import Beside, Level, of_place
from tfos.doctor.probe_port import open_probe_port
from tfos.errors import SettingsError
from tfos.slots.offer import ExecutorSlots
from tfos.worker import import_ahead

pytestmark = pytest.mark.socket
EXECUTOR = ExecutorSlots("driver", "h", 8)


class PickledRows:
    """Rows whose task is pickled as PySpark does it, and kept instead of run."""

    def __init__(self) -> None:
        self.pickled: list[bytes] = []

    def mapPartitions(self, task: Any) -> Any:
        from pyspark import cloudpickle

        def collected() -> list[Any]:
            self.pickled.append(cloudpickle.dumps(task))
            return [{}]

        return types.SimpleNamespace(collect=collected)


class PlayedRows:
    """One row at an executor: what runs there is called here, or `played` is."""

    def __init__(self, played: Callable[[], Any] | None = None) -> None:
        self._played = played

    def mapPartitions(self, task: Callable[[Iterator[None]], Iterator[Any]]) -> Any:
        def collected() -> list[Any]:
            if self._played is not None:
                return [self._played()]
            return list(task(iter([None])))

        return types.SimpleNamespace(collect=collected)


def examined(
    spark: FakeSpark, patch: pytest.MonkeyPatch, rows: PlayedRows, **wanted: Any
) -> dict[str, PlaceReport]:
    patch.setattr(executors, "rows_at", lambda sc, executor: rows)
    asked = ExaminationRequest(master="local[8]", with_tensorflow=False, **wanted)
    return {each.name: each for each in examine(asked, start_spark=lambda _: spark)}


def levels(report: PlaceReport) -> dict[str, Level]:
    return {each.check: each.level for each in report.findings}


def test_driver_and_executor_are_examined_and_nothing_is_left(spark, monkeypatch, tmp_path):
    reports = examined(spark, monkeypatch, PlayedRows(), hdfs=f"file://{tmp_path}")
    assert list(reports) == ["Spark", "driver", "executor driver"]
    there = reports["executor driver"]
    assert there.facts["place"]["executor_id"] == "driver"
    assert {"python", "packages", "memory", "kernels", "names", "hdfs", "clock"} <= set(
        levels(there)
    )
    assert [each for each in there.findings if each.level is Level.PROBLEM] == []
    assert "the driver is reached" in str(there.findings)
    assert levels(reports["driver"])["hdfs"] is Level.OK
    assert "tensorflow" not in levels(reports["driver"])
    assert "kernels" not in levels(reports["driver"])
    assert list(tmp_path.iterdir()) == []
    assert spark._jsc is None  # stopped


def test_each_step_that_may_take_long_is_told_before_it(spark, monkeypatch):
    monkeypatch.setattr(executors, "rows_at", lambda sc, executor: PlayedRows())
    told: list[str] = []
    asked = ExaminationRequest(master="local[8]", with_tensorflow=False)
    examine(asked, start_spark=lambda _: spark, say=told.append)
    assert told == [
        "starting Spark on local[8], 120 s at most",
        "1 of 1 executors have registered; waiting 120 s at most",
        "examining the driver",
        "examining each of 1 executors, 120 s at most",
    ]


def test_an_executor_that_does_not_answer_is_a_row(spark, monkeypatch):
    go_on = threading.Event()
    reports = examined(spark, monkeypatch, PlayedRows(go_on.wait), timeout_s=0.3)
    go_on.set()
    silent = reports["executor driver"]
    assert levels(silent) == {"answer": Level.PROBLEM}
    assert silent.findings[0].text == "no answer within 0.3 s"
    assert silent.has_problem


def refuse() -> None:
    raise RuntimeError("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9")


def test_an_executor_whose_task_fails_tells_why(spark, monkeypatch):
    reports = examined(spark, monkeypatch, PlayedRows(refuse))
    failed = reports["executor driver"].findings[0]
    assert "PYTHON_VERSION_MISMATCH" in failed.text
    assert "PYSPARK_PYTHON" in failed.next_step


def test_a_task_that_ran_elsewhere_is_no_answer(spark, monkeypatch):
    elsewhere = PlayedRows(lambda: {"place": {"executor_id": "9"}})
    visits = executors.visit_all(
        _with_rows(spark, monkeypatch, elsewhere),
        [EXECUTOR],
        lambda _: CollectRequest(checks=()),
        9,
    )
    assert (visits[0].facts, "executor 9" in visits[0].reason) == (None, True)


def _with_rows(spark: FakeSpark, patch: pytest.MonkeyPatch, rows: PlayedRows) -> FakeSpark:
    patch.setattr(executors, "rows_at", lambda sc, executor: rows)
    # The second look is at the clock, which is no dict.
    patch.setattr(executors, "ask", lambda rows, request: rows.mapPartitions(None).collect()[0])
    return spark


def test_a_spark_that_ends_meanwhile_is_a_row(spark, monkeypatch):
    spark.on_look = refuse
    reports = examined(spark, monkeypatch, PlayedRows())
    assert "ended early: " in reports["Spark"].findings[0].text
    assert reports["Spark"].has_problem


def test_what_was_found_before_spark_ended_is_told(spark, monkeypatch):
    monkeypatch.setattr(executors, "visit_all", lambda *_: refuse())
    asked = ExaminationRequest(master="local[8]", with_tensorflow=False)
    reports = examine(asked, start_spark=lambda _: spark)
    assert [each.name for each in reports] == ["Spark", "driver", "Spark"]
    assert levels(reports[0]) == {"settings": Level.OK, "executors": Level.OK}
    assert "java" in levels(reports[1])
    assert "ended early: " in reports[2].findings[0].text


def test_a_spark_that_does_not_start_is_a_row_beside_the_driver():
    def never(_: ExaminationRequest) -> Any:
        raise RuntimeError("Java gateway process exited")

    reports = examine(ExaminationRequest(master="yarn"), start_spark=never)
    assert [each.name for each in reports] == ["driver", "Spark"]
    assert "Java gateway process exited" in reports[1].findings[0].text
    gone = threading.Event()
    slow = examine(
        ExaminationRequest(master="yarn", timeout_s=1.0), start_spark=lambda _: gone.wait(30.0)
    )
    assert "Spark did not start within 1 s" in slow[1].findings[0].text
    gone.set()


@pytest.mark.parametrize("wrong", ["/tmp/x", "runs", "file://host/x"])
def test_a_directory_that_is_no_url_is_refused(wrong):
    with pytest.raises(SettingsError, match="--hdfs"):
        examine(ExaminationRequest(hdfs=wrong, with_tensorflow=False))


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    reports = examine(ExaminationRequest(hdfs=f"file://{tmp_path}/none", with_tensorflow=False))
    [problem] = reports[-1].findings
    assert (problem.check, problem.level) == ("hdfs", Level.PROBLEM)
    assert "hdfs" not in levels(reports[0])
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_is_a_fact_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    request = CollectRequest(checks=("java", "names", "ports"), host="no.such.host.invalid")
    facts = collect(request)
    assert facts["java"]["error"].startswith("FileNotFoundError")
    assert "error" in facts["ports"]
    assert facts["names"]["failed"] == {}


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("java", "java -version did not answer within 0 s"),
        ("tensorflow", "not imported within 0 s"),
    ],
)
def test_a_slow_host_is_a_warning(monkeypatch, tmp_path, check, text):
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\nexec sleep 60\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(collection, "COMMAND_S", 0.05)
    monkeypatch.setattr(collection, "IMPORT_S", 0.001)
    monkeypatch.setattr(import_ahead, "SLOW", ())  # whether it is installed here or not
    monkeypatch.setattr(import_ahead, "compiled_again", lambda _: "")
    found = of_place(collect(CollectRequest(checks=(check,))), Beside())[-1]
    assert (found.check, found.level) == (check, Level.WARNING)
    assert text in found.text
    assert found.next_step


def test_names_of_other_hosts_that_lead_here_are_told(monkeypatch):
    found = [(0, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    names = ("driver-host", "127.0.1.1", "localhost")
    facts = collect(CollectRequest(checks=("names",), names=names, host="here"))
    assert facts["names"]["misled"] == ["driver-host"]
    same = collect(CollectRequest(checks=("names",), names=names, is_loopback=True))
    assert same["names"]["misled"] == []


@pytest.mark.parametrize("where", [{"host": "::1"}, {"host": "192.0.2.1", "bound": "127.0.0.1"}])
def test_ports_are_tried_where_a_server_of_the_driver_listens(where):
    """An address that only leads to the driver, as behind NAT, is none to bind."""
    found = collect(CollectRequest(checks=("ports",), **where))["ports"]
    assert "error" not in found
    assert list(found["listened"]) == list(dict.fromkeys(("127.0.0.1", [*where.values()][-1])))


@pytest.mark.parametrize(
    ("own", "names", "is_hidden"),
    [
        ("host-a", ("driver", "host-b", "host-a"), True),
        ("host-a", ("driver", "host-a"), False),  # no executor is elsewhere
        ("127.0.1.1", ("driver", "host-b"), False),  # meant as it is
        ("localhost", ("driver", "host-b"), False),
    ],
)
def test_an_executor_that_listens_where_no_other_reaches_it_is_told(
    monkeypatch, own, names, is_hidden
):
    real = socket.getaddrinfo
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *args, **named: real({"host-a": "127.0.1.1"}.get(host, host), *args, **named),
    )
    place = {"host": own, "executor_id": "1", "hostname": "host-a"}
    monkeypatch.setattr(collection, "_place", lambda _: place)
    request = CollectRequest(checks=("ports",), is_executor=True, host="driver", names=names)
    hidden = collect(request)["ports"]["hidden"]
    assert hidden == ("127.0.1.1, where host-a leads on this host" if is_hidden else "")


def is_let_in(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
            return connection.recv(1) == b""  # accepted, and closed
    except TimeoutError:
        return False


def test_a_full_queue_of_connections_does_not_hide_the_driver(monkeypatch):
    monkeypatch.setattr("rpc.transport.listen._BACKLOG", 1)
    with open_probe_port("127.0.0.1") as port:
        assert all(is_let_in(port) for _ in range(5))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS, errno.EPROTO])
def test_a_connection_that_cannot_be_accepted_leaves_the_port_open(monkeypatch, number):
    accept, failures = socket.socket.accept, [OSError(number, "not now")] * 3

    def accepted(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    with open_probe_port("127.0.0.1") as port:
        assert is_let_in(port)
    assert not failures
    assert not [each for each in threading.enumerate() if each.name == "tfos-doctor-probe-port"]


def test_an_executor_that_was_never_asked_is_not_blamed(spark, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(executors, "_IN_FLIGHT", 1)
    sc = _with_rows(spark, monkeypatch, PlayedRows(go_on.wait))
    both = [EXECUTOR, ExecutorSlots("2", "h", 8)]
    visits = executors.visit_all(sc, both, lambda _: CollectRequest(checks=()), 0.3)
    go_on.set()
    assert [each.reason for each in visits] == [
        "no answer within 0.3 s",
        "not asked: 1 others at a time did not answer within 0.3 s",
    ]
    assert [each.was_asked for each in visits] == [True, False]


def test_each_executor_resolves_a_bounded_number_of_hosts():
    hosts = [f"h{number}" for number in range(40)]
    asked = [some_of(hosts, host, 5) for host in hosts]
    assert asked[0] == ("h1", "h2", "h3", "h4", "h5")
    assert asked[38] == ("h39", "h0", "h1", "h2", "h3")
    assert {name for names in asked for name in names} == set(hosts)  # none is left out
    assert some_of(["a", "b"], "a", 5) == ("b", "a")
    assert some_of(["a", "b"], "unknown", 5) == ("a", "b")
    assert some_of([], "a", 5) == ()


def test_names_that_are_not_resolved_in_time_are_told(monkeypatch):
    now_s = iter(range(0, 1000, 15))
    monkeypatch.setattr("tfos.doctor.collection.time.monotonic", lambda: float(next(now_s)))
    names = ("localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3")
    found = collect(CollectRequest(checks=("names",), names=names))["names"]
    assert list(found["resolved"]) == ["localhost"]
    assert found["untried"] == list(names[1:])


def test_an_unreached_driver_and_an_unknown_name_are_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reached = collect(CollectRequest(checks=("names",), driver=("127.0.0.1", port)))
        assert reached["names"]["unreached"] == ""
    request = CollectRequest(checks=("names",), driver=("127.0.0.1", port), names=("x.invalid",))
    facts = collect(request)["names"]
    assert "refused" in facts["unreached"]
    assert list(facts["failed"]) == ["x.invalid"]


def test_its_task_runs_where_tfos_is_not_installed(spark, monkeypatch, tmp_path):
    """Its functions travel by value, and what they find is that tfos is missing."""
    rows = PickledRows()
    monkeypatch.setattr(executors, "rows_at", lambda sc, executor: rows)
    request = CollectRequest(checks=("python", "packages", "memory"))
    executors.visit_all(spark, [EXECUTOR], lambda _: request, 30.0)
    for package in ("pyspark", "py4j"):
        (tmp_path / package).symlink_to(Path(pyspark.__file__).parents[1] / package)
    program = (
        "import pickle, sys; task = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps(list(task(iter([])))))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        input=rows.pickled[0],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    [facts] = pickle.loads(done.stdout)
    assert facts["python"]["executable"]
    assert facts["packages"]["error"] == "ModuleNotFoundError: No module named 'tfos'"
