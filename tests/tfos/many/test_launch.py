"""Launch of a run: whether the driver sees what the executors write."""

from __future__ import annotations

import pytest

from tfos.errors import SettingsError
from tfos.many.launch import _seen_from_here
from tfos.many.results import ResultHead, ResultsDirectory


def test_an_older_result_of_the_item_does_not_hide_that_the_new_one_is_elsewhere(tmp_path):
    results = ResultsDirectory(f"file://{tmp_path}")
    old = ResultHead(item="a", seconds=1.5, metrics={}, rows_digest="1")
    results.write(0, old, b"")
    with pytest.raises(SettingsError, match="a result there that the driver does not see"):
        _seen_from_here(results, {0: old})(0)
    with pytest.raises(SettingsError, match="that the driver does not see"):
        _seen_from_here(results, {})(1)
    results.write(0, ResultHead(item="a", seconds=1.5, metrics={}, rows_digest="2"), b"")
    _seen_from_here(results, {0: old})(0)
