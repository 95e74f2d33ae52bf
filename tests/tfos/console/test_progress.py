"""What the progress line says: this epoch's numbers, and nothing that is not known."""

from __future__ import annotations

import pytest

from tfos.console.progress import Sample, TrainingProgress, WorkerSample


def sample(at_s: float, *workers: WorkerSample, starting: str = "") -> Sample:
    return Sample(at_s, {f"worker:{index}": each for index, each in enumerate(workers)}, starting)


def one(at_s: float, rows: float, steps: float = 0.0, loss: float | None = None) -> Sample:
    """One worker whose clock is 1000 s ahead of the driver's."""
    begun = 1.0 if steps else 0.0
    worker = WorkerSample(at_s=1000 + at_s, rows=rows, steps=steps, loss=loss, epochs_begun=begun)
    return sample(at_s, worker)


def begun(num_epochs: int | None = 3, epoch: int = 0, rows: float = 0.0) -> TrainingProgress:
    progress = TrainingProgress(num_epochs)
    progress.start_epoch(epoch, one(0.0, rows))
    return progress


def test_rates_are_over_the_last_seconds():
    progress = begun()
    for second in range(1, 31):
        rows = 100 * second if second <= 10 else 1000 + 200 * (second - 10)
        progress.add(one(float(second), rows, second * 2.0, loss=0.25))
    assert progress.rows_per_s == pytest.approx(200)
    assert progress.steps_per_s == pytest.approx(2)
    assert str(progress) == "epoch 1/3  5000 rows  200 rows/s  2.0 steps/s  loss 0.25"


def test_rates_are_by_the_workers_clock_and_begin_with_the_work():
    """A heartbeat that arrives late, or again, makes no rate wrong."""
    progress = begun()
    for second in range(1, 31):
        progress.add(one(float(second), 0))
    late = one(31.0, 100, 2.0).workers["worker:0"]
    progress.add(sample(31.9, late))
    for at_s in (32.0, 33.0, 34.0):
        progress.add(sample(at_s, one(32.0, 200, 4.0).workers["worker:0"]))
    assert progress.rows_per_s == pytest.approx(100)
    assert progress.steps_per_s == pytest.approx(2)


def test_a_worker_that_is_not_heard_has_no_rate():
    progress = begun()
    progress.add(one(1.0, 100, 1.0))
    last = one(2.0, 200, 2.0)
    progress.add(last)
    progress.add(sample(15.0, last.workers["worker:0"]))
    assert progress.rows_per_s == 0.0
    assert "rows/s" not in str(progress)


def test_nothing_is_printed_that_is_not_known():
    progress = TrainingProgress(2)
    progress.start_epoch(0, sample(0.0, WorkerSample(at_s=0.0)))
    assert str(progress) == "epoch 1/2  0 rows"
    progress.rows_per_epoch = 500
    progress.add(sample(3.0, WorkerSample(at_s=9.0, rows=100.0)))
    assert str(progress) == "epoch 1/2  100 of 500 rows"


def test_workers_that_start_are_named_until_a_row_is_trained():
    progress = TrainingProgress(2)
    progress.start_epoch(0, sample(0.0, WorkerSample(at_s=0.0)))
    progress.add(sample(12.0, WorkerSample(at_s=0.0), starting="workers are starting"))
    assert str(progress) == "epoch 1/2  workers are starting"
    progress.add(sample(13.0, WorkerSample(at_s=5.0, rows=64.0), starting="first step 1 s"))
    assert str(progress) == "epoch 1/2  64 rows"


def test_an_epoch_shorter_than_a_heartbeat_has_its_own_steps_and_loss():
    before = WorkerSample(
        at_s=50.0, rows=640, steps=10, loss=2.0, epochs_begun=1, epoch_steps=9, epoch_s=30.0
    )
    progress = TrainingProgress(2)
    progress.start_epoch(1, sample(100.0, before, before))
    assert progress.loss is None
    assert progress.epoch_steps_per_s is None
    many = WorkerSample(
        at_s=51.0, rows=640 + 300, steps=20, loss=1.0, epochs_begun=2, epoch_steps=9, epoch_s=0.1
    )
    few = WorkerSample(
        at_s=51.0, rows=640 + 100, steps=15, loss=0.2, epochs_begun=2, epoch_steps=4, epoch_s=0.1
    )
    progress.add(sample(100.5, many, few))
    assert progress.epoch_steps_per_s == pytest.approx(90 + 40)
    assert progress.loss == pytest.approx(0.8)  # by rows, as Keras combines batches
    assert progress.first_step_s == pytest.approx(0.4)


def test_a_worker_that_trained_nothing_in_this_epoch_does_not_count():
    old = WorkerSample(at_s=5.0, rows=64, steps=1, loss=9.0, epochs_begun=1)
    progress = TrainingProgress(2)
    progress.start_epoch(1, sample(0.0, old, old))
    new = WorkerSample(at_s=6.0, rows=128, steps=2, loss=1.0, epochs_begun=2)
    progress.add(sample(1.0, old, new))
    assert progress.loss == 1.0
    assert progress.epoch_steps_per_s is None  # one step has no rate


def test_the_time_left_comes_from_rows_once_an_epoch_is_known():
    progress = begun(epoch=1, rows=1000)
    progress.rows_per_epoch = 1000
    progress.add(one(1.0, 1100, 1.0))
    assert progress.eta_s == pytest.approx((2 * 1000 - 100) / 100)


def test_no_time_is_left_when_all_rows_are_trained():
    progress = begun(num_epochs=1)
    progress.rows_per_epoch = 1000
    progress.add(one(1.0, 900, 1.0))
    progress.add(one(2.0, 1000, 2.0))
    assert progress.eta_s is None
    assert str(progress) == "epoch 1/1  1000 of 1000 rows  500 rows/s  1.0 steps/s  the epoch ends"


def test_a_worker_that_is_an_epoch_ahead_makes_no_epoch_longer():
    progress = begun()
    progress.rows_per_epoch = 1000
    progress.add(one(1.0, 1100, 1.0))
    assert str(progress).startswith("epoch 1/3  1000 of 1000 rows")


def test_the_time_left_of_the_first_epoch_comes_from_its_tasks():
    progress = begun(num_epochs=2)
    progress.add(one(10.0, 500, 1.0))
    assert progress.eta_s is None
    progress.epoch_fraction = 0.25
    assert progress.eta_s == pytest.approx(2 * 40 - 10)
    assert "ETA 1:10 min" in str(progress)


def test_the_workers_start_is_no_part_of_the_time_left():
    progress = begun(num_epochs=3)
    for second in range(1, 61):
        progress.add(one(float(second), 0))
    progress.add(one(62.0, 1984, 62.0))
    progress.epoch_fraction = 0.5
    assert progress.eta_s == pytest.approx(3 * 4 - 2)


def test_no_time_is_told_before_a_row_was_trained():
    progress = begun(num_epochs=6)
    progress.add(one(10.0, 0))
    progress.epoch_fraction = 0.25  # its rows are in the workers, which still compile
    assert progress.eta_s is None


def test_rows_of_validation_are_read_and_have_no_loss():
    progress = TrainingProgress(2, title="validation of epoch 1 of 2", is_validation=True)
    progress.start_epoch(0, one(0.0, 0, 5.0, loss=1.0))
    progress.add(one(1.0, 100, 5.0, loss=1.0))
    assert str(progress) == "validation of epoch 1 of 2  100 rows read  100 rows/s"


def test_a_training_of_unknown_length_has_no_total():
    assert str(begun(num_epochs=None, epoch=4)) == "epoch 5  0 rows"
