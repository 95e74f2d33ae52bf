"""The times that docs/yarn.md promises: to the first line of main_fun, and of shutdown()."""

from __future__ import annotations

import pytest

from tests.support.benchmarks import printed_by
from tests.support.on_yarn import TIMEOUT_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S, func_only=True)]
START_S, STOP_S = 5.0, 3.0


def test_a_cluster_on_yarn_starts_and_ends_in_the_promised_times():
    start, stop = printed_by("scripts.benchmarks.startup", "--yarn", "--repeats", "3")
    print(start["ours"], start["reference"], start["first_cluster"], stop["ours"])  # noqa: T201
    assert (start["id"], stop["id"]) == ("P15y", "P16y")
    assert start["more_than_reference_s"] <= START_S
    assert start["first_cluster"]["start_s"] <= start["reference"]["median"] + START_S
    assert stop["ours"]["max"] <= STOP_S
