"""Files sorted by month train as good a model as files of mixed rows."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from scripts import sorted_data
from tfos.reading.file_rows import FileRows

ROWS = 40_000


@pytest.mark.slow
def test_sorted_files_reach_the_auc_of_mixed_ones(tmp_path):
    sorted_data.write(tmp_path, ROWS)
    asked = inspect.signature(FileRows.shuffled).parameters
    defaults = {
        "shuffle_rows": asked["window_rows"].default,
        "interleave": asked["interleave"].default,
        "most_bytes": asked["most_bytes"].default,
    }

    def auc(kind: str, **mixing: int) -> float:
        weights = [sorted_data.trained(tmp_path / kind, seed, mixing) for seed in (1, 2)]
        return float(np.mean([sorted_data.auc(each, ROWS) for each in weights]))

    mixed = auc("mixed", **defaults)
    assert auc("sorted", **defaults) > mixed - 0.005
    assert auc("sorted", shuffle_rows=512) < mixed - 0.01, "the months matter"
