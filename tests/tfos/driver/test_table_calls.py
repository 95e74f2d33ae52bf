"""Rows of a running cluster at the driver and in Spark's tasks, without Spark."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from ps.string_ids.ids import hashed
from rpc.auth.handshake import Role
from tests.support.ps_cluster import Cluster, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tfos.config import Checkpoints, ClusterConfig
from tfos.console.console import Console
from tfos.driver.shutdown import Shutdown
from tfos.driver.table_calls import TableCalls
from tfos.errors import (
    IdError,
    ManifestMismatch,
    NodeFailedError,
    NoServersError,
    PhaseError,
    RequestTimeout,
    RoleError,
    ServerGone,
    ServerPhaseError,
    SettingsError,
    ShapeError,
    TFOSError,
)
from tfos.failure import NodeFailure, NodeId
from tfos.phases import ClusterPhase
from tfos.serving.table_tasks import LoadTask, ScanTask, TaskServers
from tfos.watch.job import Outcome

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

IDS = np.arange(50)


class Coordinator:
    """A coordinator of a cluster whose servers serve, but for some that do after a wait or never.

    Args:
        bed: the servers; None: there are none.
        phase: of the cluster.
        away: ranks of servers that are started again when a call looks.
        happens: what a wait for them sees; None: nothing, until its time is up.
    """

    def __init__(
        self,
        bed: Cluster | None,
        phase: ClusterPhase = ClusterPhase.RUNNING,
        away: Sequence[int] = (),
        happens: Callable[[Coordinator], None] | None = None,
    ) -> None:
        self.phase = phase
        self._endpoints = [] if bed is None else list(bed.endpoints)
        self._happens = happens
        servers = [
            SimpleNamespace(name=f"ps:{rank}", endpoint=None if rank in away else endpoint)
            for rank, endpoint in enumerate(self._endpoints)
        ]
        self.state = SimpleNamespace(servers=servers, workers=[None], phase=phase, live=list)
        self._failures: tuple[NodeFailure, ...] = ()

    def read(self, what: Callable[[Any], Any]) -> Any:
        return what(self.state)

    def wait(self, done: Callable[[Any], bool], timeout_s: float) -> bool:
        if not done(self.state) and self._happens is not None:
            self._happens(self)
        return done(self.state)

    def serve(self) -> None:
        """All servers listen."""
        for server, endpoint in zip(self.state.servers, self._endpoints, strict=True):
            server.endpoint = endpoint

    def fail(self, *failures: NodeFailure) -> None:
        """The cluster fails; without a failure of a node, as by its start."""
        self.phase = self.state.phase = ClusterPhase.FAILED
        self._failures = failures

    def error(self) -> NodeFailedError | None:
        return NodeFailedError(self._failures) if self._failures else None

    raised_error = error


def calls_to(
    bed: Cluster | None,
    phase: ClusterPhase = ClusterPhase.RUNNING,
    away: Sequence[int] = (),
    happens: Callable[[Coordinator], None] | None = None,
) -> TableCalls:
    calls = TableCalls()
    coordinator: Any = Coordinator(bed, phase, away, happens)
    credentials: Any = None if bed is None else bed.credentials
    calls._reserved = SimpleNamespace(  # type: ignore[assignment]  # what a call uses of it
        coordinator=coordinator, credentials=credentials, config=ClusterConfig()
    )
    console = Console(stream=io.StringIO())
    calls._ending = Shutdown(coordinator, ClusterConfig(), console, credentials)
    calls._ending.leave()  # nothing is to end at the interpreter's exit
    return calls


def pushed(bed: Cluster) -> Any:
    """Return the chief's client; each row has its id as its numbers."""
    manifest = with_tables(table(unseen=(9.0,) * 4))
    (chief,) = bed.workers(manifest, filled(manifest))
    gradients = np.repeat(IDS[:, None], 4, 1).astype(np.float32)
    chief.tables.push({"user": (IDS, gradients)}, hyper=Hyper(1.0))
    return chief


def test_single_rows_at_the_driver():
    with cluster(num_servers=2) as bed:
        pushed(bed)
        calls = calls_to(bed)
        rows = calls.lookup("user", [[3, 77], [49, 3]])
        assert rows[..., 0].tolist() == [[3.0, 9.0], [49.0, 3.0]]
        assert calls.lookup("user", [77])[0].tolist() == [9.0] * 4  # no row was made
        with pytest.raises(ManifestMismatch, match="no table 'item'; the manifest has 'user'"):
            calls.lookup("item", [1])
        with pytest.raises(IdError, match="'user'"):
            calls.lookup("user", [-1])


def test_a_task_reads_the_rows_of_its_server():
    with cluster(num_servers=2) as bed:
        pushed(bed)
        task = ScanTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        found = []
        for rank in range(2):
            batches = list(task(iter([pa.record_batch([pa.array([rank])], ["id"])])))
            found.append({one for batch in batches for one in batch["id"].to_pylist()})
            for batch in batches:
                assert batch["row"].to_pylist() == [
                    [float(one)] * 4 for one in batch["id"].to_pylist()
                ]
        assert found[0] | found[1] == set(IDS.tolist())
        assert found[0]
        assert not found[0] & found[1]


def frame_of(columns: dict[str, str]) -> Any:
    """A DataFrame's columns and types."""
    return SimpleNamespace(dtypes=list(columns.items()))


def batch_of(ids: list[Any], rows: list[Any]) -> pa.RecordBatch:
    lists = pa.array(rows, pa.list_(pa.float32()))
    return pa.record_batch([pa.array(ids), lists], ["id", "row"])


def test_a_task_loads_its_rows_and_may_run_twice():
    with cluster(num_servers=2) as bed:
        chief = pushed(bed)
        task = LoadTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        sliced = batch_of([1, 60, 61], [[0.0] * 4, [1.0] * 4, [2.0] * 4])[1:]
        for added in (3, 0):
            given = [sliced, batch_of(["a"], [[3.0] * 4]), batch_of([], [])]
            counted = [batch.to_pydict() for batch in task(iter(given))]
            assert len(counted) == 2, "a batch without rows may lack the offsets of its lists"
            assert sum(one for counts in counted for one in counts["added"]) == added
            assert sum(one for counts in counted for one in counts["given"]) == 3
        calls = calls_to(bed)
        assert calls.lookup("user", [60, 61])[:, 0].tolist() == [1.0, 2.0]
        assert calls.lookup("user", ["a"]).tolist() == [[3.0] * 4]
        assert chief.tables.lookup({"user": [7]})["user"][0, 0] == 7.0


def test_ids_above_int64_are_their_bits_in_a_dataframe_and_come_back():
    """Spark's bigint has no unsigned numbers."""
    ids = np.array([3, 2**63 + 5, 2**64 - 1], np.uint64)
    bits = ids.view(np.int64).tolist()
    manifest = with_tables(table(id_kind="uint64"))
    with cluster(num_servers=2) as bed:
        (chief,) = bed.workers(manifest, filled(manifest))
        servers = TaskServers(bed.endpoints, lambda: bed.credentials, 1)
        loaded = LoadTask("user", servers)(iter([batch_of(bits, [[2.0] * 4] * 3)]))
        assert [each.to_pydict() for each in loaded] == [{"given": [3], "added": [3]}]
        assert (chief.tables.lookup({"user": ids})["user"] == 2.0).all()
        ranks = pa.record_batch([pa.array([0, 1])], ["rank"])
        found = [part.column("id") for part in ScanTask("user", servers)(iter([ranks]))]
        assert {part.type for part in found} == {pa.int64()}
        assert sorted(one for part in found for one in part.to_pylist()) == sorted(bits)


def test_an_id_that_comes_twice_is_refused_in_one_batch_and_kept_once_in_two():
    with cluster() as bed:
        pushed(bed)
        task = LoadTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        twice = batch_of(["a", "a"], [[1.0] * 4, [2.0] * 4])
        with pytest.raises(IdError, match="id 'a' occurs twice"):
            list(task(iter([twice])))
        counted = [each.to_pydict()["added"] for each in task(iter([twice[:1], twice[1:]]))]
        assert counted == [[1], [0]]


class Frame:
    """A DataFrame whose tasks run here, each after what happens before it.

    Args:
        batches: one a task.
        happens: before the task of this number.
    """

    dtypes = (("id", "bigint"), ("row", "array<float>"))

    def __init__(self, batches: Sequence[pa.RecordBatch], happens: dict[int, Any]) -> None:
        self._batches, self._happens = batches, happens

    def select(self, *names: str) -> Frame:
        assert names == ("id", "row")
        return self

    def mapInArrow(self, task: LoadTask, _: str) -> Frame:
        self._task = task
        return self

    def selectExpr(self, *_: str) -> Frame:
        return self

    def first(self) -> tuple[int, int]:
        given = added = 0
        for number, batch in enumerate(self._batches):
            self._happens.get(number, bool)()
            for counted in self._task(iter([batch])):
                given += counted["given"][0].as_py()
                added += counted["added"][0].as_py()
        return given, added


class Saves:
    """The job's save, as the chief carries it out or does not."""

    def __init__(self, *does: Callable[[], Any] | str) -> None:
        self._does = list(does)

    def save(self, timeout_s: float) -> Outcome:
        assert timeout_s == Checkpoints(directory="/c").timeout_s
        does = self._does.pop(0)
        if isinstance(does, str):
            return Outcome(False, does)
        does()
        return Outcome(True, "the parameters are saved")


def loading_calls(bed: Cluster, *saves: Callable[[], Any] | str) -> Any:
    calls: Any = calls_to(bed)
    plan = Checkpoints(directory="/c") if saves else None
    calls._reserved.config = ClusterConfig(checkpoints=plan)
    calls._reserved.job = Saves(*saves)
    calls._servers_of_tasks = lambda _: TaskServers(bed.endpoints, lambda: bed.credentials, 1)
    return calls


LOADED = np.arange(100, 180)


def loaded_frame(happens: dict[int, Any] | None = None) -> Any:
    parts = np.split(LOADED, 2)
    return Frame([batch_of(part.tolist(), [[2.0] * 4] * 40) for part in parts], happens or {})


@pytest.mark.fault("F08")
@pytest.mark.parametrize("moment", ["within", "behind", "at the save"])
def test_rows_that_a_restarted_server_has_lost_do_not_count_as_loaded(tmp_path, moment):
    with cluster(num_servers=2) as bed:
        chief = pushed(bed)
        chief.save(tmp_path, 0)

        def restart() -> None:
            bed.restart(1, tmp_path, generation=1)

        def save() -> None:
            chief.save(tmp_path, None)

        def late() -> None:
            restart()
            save()

        saves = [] if moment == "within" else [late if moment == "at the save" else restart]
        calls = loading_calls(bed, *saves, *([save] if saves else []))
        before = chief.stats()[1].start
        with pytest.raises(
            ServerPhaseError, match=rf"ps:1 \(start {before}, now \d+\) was"
        ) as told:
            calls.load_rows("user", loaded_frame({1: restart} if moment == "within" else {}))
        assert "Call load_rows again" in str(told.value)
        assert told.value.details == {"table": "user", "servers": "1"}
        assert (calls.lookup("user", LOADED)[:, 0] == 9.0).any(), "ps:1 lacks some"
        assert calls.load_rows("user", loaded_frame()) > 0
        assert (calls.lookup("user", LOADED) == 2.0).all()


def test_loaded_rows_are_saved_or_a_warning_says_that_they_are_not(tmp_path, caplog):
    with cluster(num_servers=2) as bed:
        chief = pushed(bed)
        calls = loading_calls(bed, lambda: chief.save(tmp_path, 7), "main_fun is not running")
        assert calls.load_rows("user", loaded_frame()) == LOADED.size
        assert not caplog.records
        for rank in range(2):
            bed.restart(rank, tmp_path, generation=1)
        assert (calls.lookup("user", LOADED) == 2.0).all()
        assert calls.load_rows("user", loaded_frame()) == 0
        assert "not in a checkpoint yet: main_fun is not running. A server" in caplog.text


def test_rows_that_a_task_cannot_load_are_refused_by_name():
    wrong = [
        (batch_of([1, None], [[0.0] * 4] * 2), "1 of 2 ids of a batch are null"),
        (batch_of([1, 2], [[0.0] * 4, None]), "the row of the key 2 is null"),
        (
            batch_of([1, 2], [[0.0] * 4, [0.0, None, 0.0, 0.0]]),
            "key 2 has 4 values, 1 of them null",
        ),
        (batch_of([1, 2], [[0.0] * 4, [0.0] * 3]), "the key 2 has 3 values, .* needs 4"),
        (batch_of([1, 2], [[0.0] * 3] * 2), "the key 1 has 3 values, .* needs 4"),
        (batch_of([5, 5], [[0.0] * 4] * 2), "id 5 occurs twice"),
    ]
    with cluster() as bed:
        pushed(bed)
        task = LoadTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        for batch, message in wrong:
            with pytest.raises((SettingsError, ShapeError, IdError), match=message):
                list(task(iter([batch])))
        for columns in [
            {"id": "bigint", "row": "array<double>"},
            {"id": "double", "row": "array<float>"},
            {"user": "bigint", "row": "array<float>"},
        ]:
            with pytest.raises(SettingsError, match=r"takes the columns id .*row array<float>; th"):
                calls_to(bed).load_rows("user", frame_of(columns))


def test_text_is_refused_where_the_training_had_integers():
    manifest = with_tables(table(id_source="integers"), table("word", id_source="strings"))
    with cluster() as bed:
        bed.workers(manifest, filled(manifest))
        calls, servers = calls_to(bed), TaskServers(bed.endpoints, lambda: bed.credentials, 1)
        with pytest.raises(IdError, match=r"'user' was trained with integers .*text '17'.*int64"):
            calls.lookup("user", ["17"])
        columns = {"id": "string", "row": "array<float>"}
        with pytest.raises(SettingsError, match=r"'user' was trained with integer ids.*cast\(id"):
            calls.load_rows("user", frame_of(columns))
        given = batch_of(["17"], [[1.0] * 4])
        with pytest.raises(IdError, match="'user' was trained with integers"):
            list(LoadTask("user", servers)(iter([given])))
        list(LoadTask("word", servers)(iter([given])))
        assert calls.lookup("word", ["17"]).tolist() == [[1.0] * 4]
        assert calls.lookup("word", hashed(["17"])).tolist() == [[1.0] * 4]  # as a scan gives it


def test_a_task_can_change_no_row():
    with cluster() as bed:
        pushed(bed)
        client = bed.client(role=Role.FEEDER)
        client.attach()
        with pytest.raises(RoleError, match="may not call pushrows"):
            client.tables.push({"user": ([1], ones([1]))}, hyper=Hyper(1.0))


def test_a_cluster_that_cannot_answer():
    with pytest.raises(PhaseError, match=r"lookup\(\)"):
        calls_to(None, ClusterPhase.RESERVED).lookup("user", [1])
    with pytest.raises(NoServersError, match="num_ps >= 1"):
        calls_to(None).lookup("user", [1])


@pytest.mark.parametrize("away", [[0], [1], [0, 1]])
def test_a_call_waits_for_a_server_that_is_started_again(away):
    with cluster(num_servers=2) as bed:
        pushed(bed)
        calls = calls_to(bed, away=away, happens=Coordinator.serve)
        assert calls.lookup("user", [3, 49])[:, 0].tolist() == [3.0, 49.0]


@pytest.mark.parametrize(
    ("plan", "is_lost", "expected"),
    [
        (None, False, ServerGone),
        (Checkpoints(directory="/c"), False, None),
        (Checkpoints(directory="/c"), True, None),
    ],
    ids=["nothing restarts", "here", "elsewhere"],
)
def test_a_server_that_answers_nothing_is_asked_again_where_it_is_started_again(
    monkeypatch, plan, is_lost, expected
):
    """A frozen one is ended after 16 s, so the first try has its address, and fails after 10 s."""
    with cluster() as bed:
        pushed(bed)
        calls: Any = calls_to(bed, happens=Coordinator.serve)
        calls._reserved.config = ClusterConfig(checkpoints=plan)
        state = calls._reserved.coordinator.state
        attach, tried = PSClient.attach, []

        def silent_at_first(client: PSClient) -> None:
            tried.append(client)
            if len(tried) == 1:
                state.servers[0].endpoint = None if is_lost else bed.endpoints[0]
                raise ServerGone("ps:0 could not be reached for 10 s")
            attach(client)

        monkeypatch.setattr(PSClient, "attach", silent_at_first)
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            assert calls.lookup("user", [3])[:, 0].tolist() == [3.0]
        assert len(tried) == (2 if expected is None else 1)


def test_a_server_that_stays_silent_is_given_up_after_a_minute(monkeypatch):
    now_s = iter([0.0, 59.0, 60.0])
    with cluster() as bed:
        calls: Any = calls_to(bed)
        calls._reserved.config = ClusterConfig(checkpoints=Checkpoints(directory="/c"))

        def attach(client: PSClient) -> None:
            raise ServerGone("ps:0 could not be reached for 10 s")

        monkeypatch.setattr(PSClient, "attach", attach)
        clock = SimpleNamespace(monotonic=lambda: next(now_s))
        monkeypatch.setattr("tfos.driver.table_calls.time", clock)
        with pytest.raises(ServerGone), contextlib.ExitStack() as stack:
            calls._client("lookup()", stack)
    assert next(now_s, None) is None


@pytest.mark.parametrize(("num_servers", "away"), [(1, 0), (2, 0), (2, 1)])
def test_a_server_that_does_not_serve_again_in_time_is_named(num_servers, away):
    with cluster(num_servers=num_servers) as bed:
        pushed(bed)
        calls = calls_to(bed, away=[away])
        text = rf"lookup\(\): ps:{away} did not serve within 60 s; .*Call it again"
        with pytest.raises(RequestTimeout, match=text):
            calls.lookup("user", [1])


def test_a_cluster_that_fails_meanwhile_is_no_reason_to_wait():
    with cluster() as bed:
        calls = calls_to(bed, away=[0], happens=Coordinator.fail)
        with pytest.raises(TFOSError, match=r"lookup\(\)") as raised:
            calls.lookup("user", [1])
    assert isinstance(raised.value, PhaseError)


MAIN_FUN_RAISED = NodeFailure(
    NodeId("worker", 0), "h", 7, error_type="ValueError", message="no", traceback="line 36"
)


@pytest.mark.parametrize(
    "ask",
    [
        lambda calls: calls.lookup("user", [1]),
        lambda calls: calls.rows("user"),
        lambda calls: calls.load_rows("user", frame_of({})),
    ],
    ids=["lookup", "rows", "load_rows"],
)
@pytest.mark.parametrize(
    "plan", [None, Checkpoints(directory="/c")], ids=["no restarts", "restarts"]
)
def test_servers_that_end_with_a_failed_cluster_are_not_its_cause(ask, monkeypatch, plan):
    """main_fun raised after train() had returned; the servers are stopped while they are asked."""
    with cluster() as bed:
        calls: Any = calls_to(bed)
        calls._reserved.config = ClusterConfig(checkpoints=plan)
        coordinator: Any = calls._reserved.coordinator

        def attach(client: Any) -> None:
            coordinator.fail(MAIN_FUN_RAISED)
            raise ServerGone("ps:0 could not be reached for 10 s")

        monkeypatch.setattr("ps.client.client.PSClient.attach", attach)
        with pytest.raises(NodeFailedError, match="ValueError: no\nraised in worker:0") as raised:
            ask(calls)
        assert "line 36" in str(raised.value.__cause__)
        calls._ending.raise_failure()  # a user who has seen it sees it once


def test_a_call_after_a_failure_that_nobody_has_seen_raises_it():
    with cluster() as bed:
        calls = calls_to(bed)
        coordinator: Any = calls._reserved.coordinator
        coordinator.fail(MAIN_FUN_RAISED)
        with pytest.raises(NodeFailedError, match="ValueError: no"):
            calls.lookup("user", [1])
        with pytest.raises(
            PhaseError, match=r"lookup\(\) needs the cluster to be RUNNING; it is FAILED"
        ):
            calls.lookup("user", [1])


@pytest.mark.parametrize("num_free", [0, 1])
def test_tasks_that_have_no_slot_because_nodes_hold_all_are_told(monkeypatch, caplog, num_free):
    """Workers that read their own data keep theirs: the call would wait for them in silence."""
    monkeypatch.setattr("tfos.driver.table_calls.num_free_slots", lambda _: num_free)
    monkeypatch.setattr("tfos.driver.table_calls.give_credentials", lambda *_: None)
    with cluster() as bed:
        calls: Any = calls_to(bed)
        calls._reserved.sc = None
        calls._reserved.feeder_credentials = bed.credentials
        calls._servers_of_tasks("load_rows()")
    told = [each for each in caplog.messages if each.startswith("load_rows(): its Spark tasks")]
    assert len(told) == (0 if num_free else 1)


def test_servers_that_are_gone_from_a_running_cluster_are_told(monkeypatch):
    with cluster() as bed:

        def attach(client: Any) -> None:
            raise ServerGone("ps:0 could not be reached for 10 s")

        monkeypatch.setattr("ps.client.client.PSClient.attach", attach)
        with pytest.raises(ServerGone, match="ps:0"):
            calls_to(bed).lookup("user", [1])


def test_rows_of_a_server_that_has_moved_are_asked_for_anew():
    """A DataFrame has the addresses of the servers when it was made."""

    def unreachable() -> Any:
        raise RequestTimeout("ps:0 does not answer")

    servers: Any = SimpleNamespace(connected=unreachable)
    batch = pa.record_batch([pa.array([0])], ["id"])
    with pytest.raises(RequestTimeout, match="ps:0 does not answer") as raised:
        list(ScanTask("user", servers)(iter([batch])))
    assert "call cluster.rows('user') again" in "".join(getattr(raised.value, "__notes__", []))
