"""A slot's process: what it keeps, and what it tells the driver of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.short_calls import VALUE, file, short_calls
from tfos.control.authority import ClusterAuthority
from tfos.errors import ControlUnavailable
from tfos.many.messages import Draw, Ended, Ending, EndSlot, SlotBeat, Train, TrainItem
from tfos.many.server import many_server
from tfos.many.slot import process
from tfos.many.slot.client import ManyClient
from tfos.many.slot.process import Slot
from tfos.many.slot.specs import RunSettings, SlotSpec
from tfos.many.slot.task import _values

__all__ = ["file", "short_calls"]


@pytest.fixture
def slot(file):
    executor = cast("Any", SimpleNamespace(host="h", scratch_dir="/spark/7"))
    settings = RunSettings(
        run_id="r",
        driver_address="",
        timeout_s=None,
        results_dir="",
        max_result_bytes=4000,
        driver_heap_bytes=1 << 34,
        is_grouped=False,
        shares_gpus=False,
        loopback=True,
    )
    spec = SlotSpec(
        slot=0,
        attempt=0,
        settings=settings,
        keys=cast("Any", None),
        names={3: "c"},
        places={},
        digests={3: "d"},
        function=b"",
        executor=executor,
        sys_path=(),
        items_fd=-1,
        spool_fd=file,
        task_fd=-1,
    )
    made = Slot(spec, cast("Any", None))
    yield made
    for each in made._values_fds:
        os.close(each)


def keep(slot: Slot, item: int, value: bytes) -> Ending:
    slot._holding[item] = 1
    slot._kept = (Ended(item, Ending.RETURNED, 1.0), value)
    slot._keep()
    return slot._ready[-1].how


def test_values_in_a_slots_spool_are_whole(slot, file, tmp_path, short_calls):
    assert keep(slot, 3, VALUE) == keep(slot, 4, b"") == keep(slot, 5, b"c") == Ending.RETURNED
    with open(tmp_path / "value", "rb") as spool:
        assert list(_values(spool)) == [(3, VALUE), (4, b""), (5, b"c")]


def test_a_disk_that_was_full_for_a_moment_costs_its_own_value_alone(
    slot, tmp_path, monkeypatch, short_calls
):
    keep(slot, 3, b"a")
    pwrite: Callable[..., int] = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if at > 1500:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert keep(slot, 4, VALUE) == Ending.NOT_KEPT
    assert "not kept in /spark/7: OSError: [Errno 28]" in slot._ready[-1].error
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert keep(slot, 5, b"c") == Ending.RETURNED
    with open(tmp_path / "value", "rb") as spool:
        assert list(_values(spool)) == [(3, b"a"), (5, b"c")]


def test_a_value_that_spark_would_not_bring_fails_its_item_at_once(slot):
    assert keep(slot, 3, bytes(2800)) == Ending.RETURNED
    assert keep(slot, 4, bytes(2801)) == Ending.NOT_PICKLABLE
    assert "2801 bytes, and Spark brings at most 2800" in slot._ready[-1].error
    assert "pass results_dir" in slot._ready[-1].error


@pytest.mark.parametrize(
    ("max_result_bytes", "heap", "hand_over", "value", "several"),
    [
        (0, 16 << 30, 256 << 20, 1700 << 20, 1956 << 20),
        (400 << 20, 16 << 30, 100 << 20, 280 << 20, 380 << 20),
        (1 << 40, 16 << 30, 256 << 20, 1700 << 20, 1956 << 20),
        (1 << 30, 1000 << 20, 65536000, 174762666, 200 << 20),
    ],
)
def test_values_before_a_hand_over_and_one_beside_them_are_below_the_limit(
    slot, max_result_bytes, heap, hand_over, value, several
):
    limits = {"max_result_bytes": max_result_bytes, "driver_heap_bytes": heap}
    settings = dataclasses.replace(slot._spec.settings, **limits)
    assert (settings.hand_over_bytes, settings.max_value_bytes) == (hand_over, value)
    assert settings.max_job_bytes == several


def test_only_a_slot_that_ends_gives_an_item_back(slot):
    """Another would draw it again, and give it back for ever."""
    settings = dataclasses.replace(slot._spec.settings, driver_heap_bytes=5000)
    slot._spec = msgspec.structs.replace(slot._spec, settings=settings)
    assert keep(slot, 3, bytes(200)) == keep(slot, 4, bytes(820)) == Ending.RETURNED
    assert slot._next_order() == EndSlot()
    assert keep(slot, 5, b"") == Ending.NOT_BEGUN


def test_a_slot_whose_values_are_many_hands_them_over(slot, monkeypatch):
    """Its job brings them, and the driver starts it again."""
    told: list[object] = []

    class Client:
        def draw(self, draw):
            told.append(draw)
            assert len(told) < 9, "it draws without end"
            return Train(3, len(told))

        def beat(self, beat):
            told.append(beat)

    def train(item):
        keep(slot, item, bytes(400))
        slot._answered(slot._take_ready()[0], None)  # the watch's report

    monkeypatch.setattr(slot, "_client", Client())
    monkeypatch.setattr(slot, "_watch", lambda: None)
    monkeypatch.setattr(slot, "_train_from", train)
    slot.run()
    assert [type(each).__name__ for each in told] == ["Draw", "Draw", "Draw", "SlotBeat"]
    assert told[-1] == SlotBeat(0, 0, is_leaving=True)


@pytest.mark.parametrize(("failures", "end"), [(3, Ending.RETURNED), (4, Ending.NOT_KEPT)])
def test_a_storage_that_fails_for_a_moment_costs_no_training(slot, monkeypatch, failures, end):
    asked = []

    class Results:
        def write(self, head, value):
            asked.append((head.item, head.digest, value))
            if len(asked) <= failures:
                raise RuntimeError("503 slow down")  # no OSError, as some clients raise

    slot._results = cast("Any", Results())
    slot._spec = msgspec.structs.replace(
        slot._spec, settings=dataclasses.replace(slot._spec.settings, results_dir="s3://b/r")
    )
    monkeypatch.setattr(process, "_WRITE_AGAIN_S", (0.0, 0.0, 0.0))
    assert keep(slot, 3, b"v") == end
    assert asked == 4 * [("c", "d", b"v")]
    if end is Ending.NOT_KEPT:
        assert slot._ready[-1].error.endswith(
            "was not kept in s3://b/r: RuntimeError: 503 slow down"
        )


def test_an_attempt_that_has_begun_is_held_though_the_one_before_is_confirmed_later(slot):
    slot._answered((), Train(3, 1))
    slot._put_ended(Ended(3, Ending.RAISED, 0.1))
    reported, _ = slot._take_ready()
    slot._answered((), Train(3, 2))  # the driver had the report already
    slot._answered(reported, None)
    assert slot._take_ready() == ((), (3,))


def test_the_last_that_the_driver_hears_of_a_slot_is_that_it_leaves(slot, monkeypatch):
    told = []

    class Client:
        def draw(self, draw):
            told.append(draw)
            return EndSlot()

        def beat(self, beat):
            told.append(beat)
            if len(told) < 3:
                raise ControlUnavailable("no answer")

    monkeypatch.setattr(slot, "_client", Client())
    monkeypatch.setattr(slot, "_watch", lambda: None)
    slot.run()
    assert told == [Draw(0, 0, host="h"), *2 * [SlotBeat(0, 0, is_leaving=True)]]


def test_a_slot_trains_what_comes_back_while_its_last_report_is_under_way(slot, monkeypatch):
    """An item of another slot that was lost may wait again when this one has heard of the end."""
    orders = [EndSlot(), Train(4, 2), EndSlot()]
    told: list[int] = []
    trained: list[int] = []

    class Client:
        def draw(self, draw):
            told.extend(each.item for each in draw.ended)
            assert orders, "it asks without end"
            return orders.pop(0)

        def beat(self, beat):
            assert beat.is_leaving

    def train(item):
        slot._answered((Ended(3, Ending.RETURNED, 1.0, attempt=1),), None)  # the watch's report
        trained.append(item)
        slot._put_ended(Ended(item, Ending.RAISED, 0.1))

    slot._holding[3] = 1
    monkeypatch.setattr(slot, "_client", Client())
    monkeypatch.setattr(slot, "_watch", lambda: None)
    monkeypatch.setattr(slot, "_train_from", train)
    slot.run()
    assert trained == told == [4]


def test_a_slot_that_ends_at_once_says_why_unless_nobody_reads_it(monkeypatch):
    monkeypatch.setattr("tfos.node.procfs.kill_descendants", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    read, written = os.pipe()
    monkeypatch.setattr(process, "_STDERR", written)
    try:
        cast("Any", process._end_at_once)("the driver is gone")
        assert os.read(read, 1000) == b"this slot of map_train ends: the driver is gone\n"
        os.set_blocking(written, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(written, bytes(4096)):
                pass
        os.set_blocking(written, True)
        cast("Any", process._end_at_once)("the driver is gone")
    finally:
        os.close(read)
        os.close(written)


@pytest.fixture
def refused(slot, monkeypatch) -> Iterator[Slot]:
    """A slot whose certificate is that of another process, and which asks once."""
    authority = ClusterAuthority("r")
    server = many_server(cast("Any", None), authority.driver(), num_slots=1)
    address = f"127.0.0.1:{server.start('127.0.0.1')}"
    client = ManyClient(
        dataclasses.replace(slot._spec.settings, driver_address=address), authority.node("worker:0")
    )
    calls: list[object] = []

    def once(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def ask(message: object) -> Any:
            assert not calls, "it asks again"
            calls.append(message)
            return call(message)

        return ask

    asking = SimpleNamespace(draw=once(client.draw), beat=once(client.beat))
    monkeypatch.setattr(slot, "_client", asking)
    yield slot
    client._channel.close()
    server.close()


@pytest.mark.socket
@pytest.mark.parametrize("step", ["_draw", "_watch"])
def test_a_slot_that_the_driver_refuses_ends_at_once_with_the_reason(refused, monkeypatch, step):
    read, written = os.pipe()
    monkeypatch.setattr(refused, "_spec", msgspec.structs.replace(refused._spec, task_fd=read))
    monkeypatch.setattr(process, "_BEAT_S", 0.0)

    def end(reason: str) -> None:
        raise SystemExit(reason)

    monkeypatch.setattr(process, "_end_at_once", end)
    try:
        with pytest.raises(
            SystemExit, match="PERMISSION_DENIED: the certificate is for 'worker:0'"
        ):
            getattr(refused, step)()
    finally:
        os.close(read)
        os.close(written)


@pytest.mark.socket
def test_a_refused_slot_leaves_without_asking_again(refused):
    refused._say_leaving()


def test_a_slot_waits_between_processes_that_do_not_start(slot, monkeypatch):
    """Else what a host lacks for a moment costs the slot all that it may fail in a row."""
    paused: list[float] = []

    class NoProcess:
        def __init__(self, *_: object):
            raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(process, "TrainerProcess", NoProcess)
    monkeypatch.setattr("tfos.many.slot.process.time.sleep", paused.append)
    for attempt in range(1, 5):
        slot._answered((), Train(3, attempt))
        slot._train_from(3)
    assert paused == [1.0, 2.0, 4.0]  # after the fourth the driver has given the slot up
    assert [each.how for each in slot._ready] == 4 * [Ending.NOT_BEGUN]

    class Starts:
        has_ended = has_grown = False

        def __init__(self, *_: object):
            pass

        def await_ready(self, item: int) -> None:
            pass

    monkeypatch.setattr(process, "TrainerProcess", Starts)
    assert slot._living_trainer(3) is not None
    slot._trainer = None
    monkeypatch.setattr(process, "TrainerProcess", NoProcess)
    assert slot._living_trainer(3) is None
    assert paused == [1.0, 2.0, 4.0, 1.0]


def test_a_process_that_has_grown_trains_no_further_item(slot, monkeypatch):
    """TensorFlow keeps memory of each model; a slot of thousands would fill its host."""
    made: list[Any] = []

    class Fake:
        has_ended = has_grown = False

        def __init__(self, *_: object):
            self.items, self.closed = list[int](), list[bool]()
            made.append(self)

        def await_ready(self, item: int) -> None:
            pass

        def order(self, order: TrainItem) -> None:
            self.items.append(order.offset)

        def outcome(self, item: int, *_: object) -> Ended:
            self.has_grown = item >= 3
            return Ended(item, Ending.RAISED, 0.01)

        def close(self, *, kill: bool) -> None:
            self.closed.append(kill)

    class Client:
        def draw(self, draw: Draw) -> Train | EndSlot:
            item = next(items, None)
            return EndSlot() if item is None else Train(item, 1)

    items = iter(range(4, 9))
    places = {item: (item, 1) for item in range(3, 9)}
    slot._spec = msgspec.structs.replace(slot._spec, places=places)
    monkeypatch.setattr(process, "TrainerProcess", Fake)
    monkeypatch.setattr(slot, "_client", Client())
    slot._is_brief = True
    slot._answered((), Train(3, 1))
    slot._train_from(3)
    assert made[0].items == [3, 4]  # 5 is not ordered ahead
    assert slot._living_trainer(5) is made[-1] is not made[0]
    assert made[0].closed == [False]  # its exit handlers run


def test_values_that_would_not_come_back_together_are_handed_over_in_turn(slot):
    """The last one was drawn ahead; the slot's next process trains it, at no attempt's cost."""
    assert keep(slot, 3, bytes(900)) == keep(slot, 4, bytes(2700)) == Ending.RETURNED
    assert keep(slot, 5, bytes(2700)) == Ending.NOT_BEGUN
    assert slot._spooled_bytes <= slot._spec.settings.max_result_bytes
    assert slot._is_full
