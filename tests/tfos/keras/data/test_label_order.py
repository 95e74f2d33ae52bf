"""Sorted labels are noticed; shuffled ones never, whatever their distribution."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.smoke.checks import readme_program
from tfos.keras.data.label_order import LabelOrder

ROOT = Path(__file__).parents[4]
BATCHES = st.integers(1, 512)


def batches(y: np.ndarray[Any, Any], size: int) -> Iterator[np.ndarray[Any, Any]]:
    for start in range(0, len(y), size):
        yield y[start : start + size]


def alarm_of(y: np.ndarray[Any, Any], size: int) -> int | None:
    """Return the number of rows after which the alarm came, or None."""
    order = LabelOrder()
    for number, batch in enumerate(batches(y, size), 1):
        if order.looks_sorted(batch):
            return min(number * size, len(y))
    return len(y) if order.looks_sorted_at_end() else None


def labels_of(kind: str, rows: int, share: float, random: np.random.Generator) -> Any:
    if kind == "constant":
        return np.full(rows, 3)
    if kind == "classes":
        return random.choice(10, rows, p=random.dirichlet(np.full(10, 0.3)))
    if kind == "one-hot":
        return np.eye(4, dtype=np.float32)[random.integers(0, 4, rows)]
    if kind == "heavy tails":
        return random.standard_cauchy(rows)
    if kind == "mostly zero":
        return np.where(random.random(rows) < share, random.pareto(0.5, rows), 0.0)
    return (random.random(rows) < share).astype(np.int64)


KINDS = ["binary", "constant", "classes", "one-hot", "heavy tails", "mostly zero"]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 20_000),
    st.sampled_from([0.0001, 0.001, 0.01, 0.2, 0.5, 0.99]),
    BATCHES,
    st.integers(0, 2**32),
)
def test_shuffled_labels_raise_no_alarm(kind, rows, share, size, seed):
    random = np.random.default_rng(seed)
    y = labels_of(kind, rows, share, random)
    random.shuffle(y)
    assert alarm_of(y, max(size, rows // 200)) is None


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("size", [1, 32, 1000])
def test_sorted_labels_raise_one(share, size):
    rows = 20_000 if size > 1 else 3000
    y = np.arange(rows) >= rows * (1 - share)
    assert alarm_of(y, size) is not None
    assert alarm_of(np.repeat(np.eye(10), rows // 10, axis=0), size) is not None
    assert alarm_of(np.sort(np.random.default_rng(1).normal(size=rows)), size) is not None


def test_it_comes_soon_where_both_classes_are_seen():
    y = np.repeat([0, 1] * 20, 500)  # 40 files, each of one class
    found = alarm_of(y, 50)
    assert found is not None
    assert found <= 10_000


def test_labels_that_drift_strongly_raise_one_and_weakly_none():
    random = np.random.default_rng(5)
    month = np.repeat(np.arange(12), 2000)
    strong = random.random(month.size) < np.where(month % 2, 0.9, 0.05)
    assert alarm_of(strong, 64) is not None
    weak = random.random(month.size) < 0.2 + 0.01 * (month % 5)
    assert alarm_of(weak, 64) is None


def test_mixed_months_raise_none():
    random = np.random.default_rng(6)
    month = np.tile(np.arange(12), 2000)
    assert alarm_of(random.random(month.size) < np.where(month % 2, 0.9, 0.05), 64) is None


@pytest.mark.parametrize(
    "y", [np.array(["a", "b"], object), (np.zeros(2), np.ones(2)), {"a": np.zeros(2)}, None]
)
def test_labels_that_are_no_numbers_of_one_output_are_left_alone(y):
    order = LabelOrder()
    assert not any(order.looks_sorted(y) for _ in range(1000))


@pytest.mark.slow
def test_memory_is_bounded_and_nan_raises_none():
    order = LabelOrder()
    for _ in range(5000):
        assert not order.looks_sorted(np.full(100, np.nan))
    assert order._num_kept < 8192


class Rows(list[Any]):
    """Stands for an RDD, and for the SparkContext that makes one."""

    def range(self, count: int) -> Rows:
        return Rows(range(count))

    def map(self, function: Callable[[Any], Any]) -> Rows:
        return Rows(map(function, self))


def test_the_rows_of_the_program_in_the_readme_raise_no_alarm():
    program = readme_program((ROOT / "README.md").read_text())
    lines = re.findall(r"^ *((?:points|rows) = .*)$", program, re.MULTILINE)
    found: dict[str, Any] = {"sc": Rows()}
    exec("\n".join(lines), found)
    labels = np.array([label for _, label in found["rows"]])
    assert len(labels) == 4096
    assert len(set(labels)) > 2
    assert alarm_of(labels, 32) is None
