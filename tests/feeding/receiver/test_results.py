"""Inference by arrays: batches in as columns, results out as columns, one per row, in order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from feeding.errors import ResultCountError, RowError, SchemaError
from feeding.receiver.data_feed import DataFeed
from tests.support.feed import (
    CONFIG,
    Background,
    Worker,
    feed_task,
    inference_task,
    read_epochs,
    workers,
)

pytestmark = pytest.mark.socket


def run(task, rows):
    return list(task(0, iter(rows)))


def answer_arrays(
    worker: Worker, answer: Callable[[Any], Any], batch_size: int = 10, **options: Any
) -> Background:
    def loop() -> list[Any]:
        feed = DataFeed(worker.channel, train_mode=False, **options)
        batches = []
        while not feed.should_stop():
            batch = feed.next_arrays(batch_size)
            if batch is not None:
                batches.append(batch)
                feed.batch_results(answer(batch))
        return batches

    return Background(loop)


def finish(worker):
    worker.channel.finish("input")


ANSWERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "vectors": (lambda x: x * 2, lambda row: np.array(row) * 2),
    "numbers": (lambda x: x.sum(axis=1), sum),
    "matrices": (lambda x: x[:, :, None], lambda row: np.array(row)[:, None]),
    "bools": (lambda x: x[:, 0] > 50, lambda row: row[0] > 50),
    "halves": (lambda x: x.astype(np.float16), np.array),
    "text": (lambda x: x[:, 0].astype(str), lambda row: str(row[0])),
    "big endian": (lambda x: x.astype(">i4"), np.array),
    "every second": (lambda x: np.repeat(x, 2, axis=1)[:, ::2], np.array),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_array_answers_a_batch_as_its_rows_would(kind):
    whole, single = ANSWERS[kind]
    rows = [[r, -r] for r in range(107)]
    with workers(1) as (worker,):
        loop = answer_arrays(worker, whole)
        results = run(inference_task([worker]), rows)
        assert len(results) == len(rows)
        for result, row in zip(results, rows, strict=True):
            np.testing.assert_array_equal(result, single(row))
        finish(worker)
        # Batches cross the borders of 16-row chunks.
        assert [len(batch) for batch in loop.result()] == [10] * 10 + [7]


def test_a_dict_of_arrays_gives_rows_with_names():
    rows = [(r, [r / 2] * 3, f"row {r}") for r in range(40)]

    def answer(batch):
        number, vector, text = batch
        return {"text": text, "sum": vector.sum(axis=1) + number}

    with workers(1) as (worker,):
        loop = answer_arrays(worker, answer, 7)
        results = run(inference_task([worker]), rows)
        assert results == [{"text": f"row {r}", "sum": 2.5 * r} for r in range(40)]
        finish(worker)
        loop.result()


def test_results_that_are_written_in_place_again_do_not_change_those_before():
    out = np.zeros(4)

    def answer(batch):
        out[: len(batch)] = batch
        return out[: len(batch)]

    with workers(1) as (worker,):
        loop = answer_arrays(worker, answer, 4)
        assert run(inference_task([worker]), range(300)) == list(range(300))
        finish(worker)
        loop.result()


def test_large_arrays_of_results_come_in_several_chunks():
    config = dataclasses.replace(CONFIG, chunk_bytes=2000)
    with workers(1, config) as (worker,):
        loop = answer_arrays(worker, lambda x: np.repeat(x[:, None], 100, axis=1), 64)
        results = run(inference_task([worker], config), range(200))
        np.testing.assert_array_equal(
            np.stack(results), np.repeat(np.arange(200), 100).reshape(200, 100)
        )
        finish(worker)
        loop.result()


@pytest.mark.fault("F38")
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda x: x[:-1], "returned 9 results for 10 rows"),
        (lambda x: np.append(x, 0), "returned 11 results for 10 rows"),
        (lambda x: {"a": x, "b": x[:-1]}, "different lengths: 10 of 'a', 9 of 'b'"),
    ],
)
def test_arrays_of_another_length_are_an_error(answer, text):
    with workers(1) as (worker,):
        loop = answer_arrays(worker, answer)
        feeding = Background(lambda: run(inference_task([worker]), range(50)))
        with pytest.raises(ResultCountError, match=text):
            loop.result()
        worker.channel.fail(text, error_type="ResultCountError")  # as the worker's process does
        with pytest.raises(Exception, match=text):
            feeding.result()


def test_arrays_of_what_cannot_travel_are_refused_on_both_sides():
    with workers(1) as (worker,):
        loop = answer_arrays(worker, lambda x: x.astype(complex))
        with pytest.raises(RowError, match=r"worker:0: a result fits no column: .*array of compl"):
            run(inference_task([worker]), range(50))
        with pytest.raises(RowError, match="array of complex128"):
            loop.result()


def test_a_mapping_names_the_arrays():
    mapping = {"a": "x", "b": "y"}
    with workers(1) as (worker,):
        loop = answer_arrays(worker, lambda t: t["x"] + t["y"], input_mapping=mapping)
        assert run(inference_task([worker]), [{"b": r, "c": 0, "a": 1} for r in range(5)]) == [
            1 + r for r in range(5)
        ]
        assert run(inference_task([worker]), []) == []
        finish(worker)
        loop.result()
    with workers(1) as (worker,):
        loop = answer_arrays(worker, lambda t: t["x"] - t["y"], input_mapping=mapping)
        assert run(inference_task([worker]), [(r, 1) for r in range(5)]) == [
            r - 1 for r in range(5)
        ]
        finish(worker)
        loop.result()
    with workers(1) as (worker,):
        loop = answer_arrays(worker, lambda _: None, input_mapping=mapping)
        feeding = Background(lambda: run(inference_task([worker]), [(1, 2, 3)]))
        with pytest.raises(SchemaError, match="input_mapping names 2 columns"):
            loop.result()
        worker.channel.close()
        with pytest.raises(Exception, match="stopping"):
            feeding.result()


def test_rows_of_different_inferences_may_look_different():
    with workers(1) as (worker,):
        loop = answer_arrays(worker, lambda x: x["a"] if isinstance(x, dict) else x)
        assert run(inference_task([worker]), [{"a": r, "b": 0} for r in range(5)]) == [*range(5)]
        assert run(inference_task([worker]), [{"b": "text", "a": 0.5}] * 5) == [0.5] * 5
        assert run(inference_task([worker]), range(5)) == [*range(5)]
        finish(worker)
        loop.result()


def test_a_reader_that_trains_drops_the_rows_of_an_inference_and_its_task_fails_at_once():
    with workers(1) as (worker,):
        reading = read_epochs(worker, 4)
        with pytest.raises(ResultCountError, match=r"worker:0 trains on feed 'input'.*once main_"):
            run(inference_task([worker]), range(50))
        list(feed_task([worker])(0, iter(range(9))))
        worker.channel.flush("input", 0)
        worker.channel.finish("input")
        assert [[batch.num_rows for batch in epoch] for epoch in reading.result()] == [[4, 4, 1]]
        stats = worker.channel.stats("input")
        assert (stats.trained_rows, stats.in_flight_rows) == (9, 0)
        assert stats.fed_rows == 9 + stats.dropped_rows > 9
