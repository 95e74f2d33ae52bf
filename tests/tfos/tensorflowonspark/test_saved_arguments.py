"""Arguments of an estimator or model that is saved: what JSON would change is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tfos.errors import SettingsError
from tfos.tensorflowonspark import pipeline


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"rates": {1: 0.5}}, "the key 1 is int, not str"),
        ({"layers": [{"sizes": ({True: 3},)}]}, "the key True is bool, not str"),
        ({"fn": len}, "not JSON serializable"),
    ],
)
def test_what_a_file_would_change_is_refused(args: dict[str, Any], named: str):
    """`args.rates[1]` was a KeyError in the program that loads it."""
    with pytest.raises(SettingsError, match=rf"cannot be saved \(.*{named}"):
        pipeline.TFModel(args).write()


def test_what_cannot_be_saved_is_refused_before_an_older_one_is_deleted():
    """`write().overwrite().save(path)` had deleted it, and saved nothing."""

    def train_fn(args, ctx): ...

    with pytest.raises(SettingsError, match=r"train_fn .* cannot be saved"):
        pipeline.TFEstimator(train_fn, {}).write()
