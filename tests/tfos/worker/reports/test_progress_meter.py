"""A worker's numbers for the driver: each epoch's steps and seconds are its own."""

from __future__ import annotations

import pytest

from tfos.worker.reports.progress_meter import ProgressMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(meter: ProgressMeter, clock: Clock, steps: range, each_s: float, **values: float) -> None:
    for step in steps:
        clock.now_s += each_s
        meter.note({"steps": float(step), "rows": step * 10.0, **values})


def test_before_the_first_report_there_is_only_the_clock(clock):
    assert ProgressMeter(clock).read() == {"at_s": 100.0, "epochs_begun": 0.0}


def test_an_epoch_of_fit_is_measured_from_the_end_of_its_first_step(clock):
    meter = ProgressMeter(clock)
    meter.note({"steps": 0.0, "rows": 0.0, "epoch": 1.0})
    clock.now_s += 30.0  # compiles
    train(meter, clock, range(1, 12), 0.1, epoch=1.0, loss=0.5)
    read = meter.read()
    assert read["epoch_steps"] == 10
    assert read["epoch_s"] == pytest.approx(1.0)
    assert (read["steps"], read["rows"], read["loss"]) == (11, 110, 0.5)


def test_the_next_epoch_begins_with_its_own_first_step(clock):
    meter = ProgressMeter(clock)
    train(meter, clock, range(1, 6), 1.0, epoch=1.0)
    meter.end_epoch()  # the flush; the loop's own report of the epoch follows it
    meter.note({"steps": 5.0, "rows": 50.0, "epoch": 1.0, "loss": 1.0})
    assert meter.read()["epochs_begun"] == 1
    clock.now_s += 60.0  # validation
    train(meter, clock, range(6, 9), 0.5, epoch=2.0)
    read = meter.read()
    assert (read["epochs_begun"], read["epoch_steps"]) == (2, 2)
    assert read["epoch_s"] == pytest.approx(1.0)
    assert (read["epoch_rows"], read["rows_per_epoch"]) == (30, 50)


def test_a_loop_that_reports_no_epochs_has_those_of_its_feed(clock):
    meter = ProgressMeter(clock)
    train(meter, clock, range(1, 4), 1.0)
    meter.end_epoch()
    train(meter, clock, range(4, 6), 1.0)
    assert (meter.read()["epochs_begun"], meter.read()["epoch_steps"]) == (2, 1)


def test_a_second_fit_that_counts_from_zero_again_is_another_epoch(clock):
    meter = ProgressMeter(clock)
    train(meter, clock, range(1, 4), 1.0, epoch=1.0)
    meter.note({"steps": 0.0, "epoch": 0.0})
    train(meter, clock, range(1, 4), 1.0, epoch=1.0)
    read = meter.read()
    assert (read["epochs_begun"], read["epoch_steps"], read["epoch_rows"]) == (2, 2, 30)
