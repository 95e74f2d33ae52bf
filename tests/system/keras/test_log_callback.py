"""LogCallback: rank 0's metrics as lines of output."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from tfos.runner import LogCallback, ranks

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]


def lines_of(rank: int, capsys: Any, *, per_batch_log: bool = False) -> list[str]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=["accuracy"])
    x, y = np.ones((8, 2), np.float32), np.eye(3, dtype=np.float32)[np.arange(8) % 3]
    log = LogCallback(per_batch_log=per_batch_log)
    group: Any = SimpleNamespace(rank=rank, size=1)
    with ranks.entered(group, 0):
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[log])
    return list(capsys.readouterr().out.splitlines())


def test_rank_0_shows_each_epochs_numbers(capsys):
    lines = lines_of(0, capsys)
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        pattern = rf"epoch {epoch + 1}, \d+\.\d s: accuracy \d\.\d+, loss \d\.\d+"
        assert re.fullmatch(pattern, line), line


def test_rank_0_shows_each_batch_if_it_is_asked_to(capsys):
    names = [line.partition(": ")[0] for line in lines_of(0, capsys, per_batch_log=True)]
    assert names[:2] == ["epoch 1, batch 1", "epoch 1, batch 2"]
    assert names[3:5] == ["epoch 2, batch 1", "epoch 2, batch 2"]
    assert len(names) == 6


def test_other_ranks_show_nothing(capsys):
    assert lines_of(1, capsys, per_batch_log=True) == []
