"""The benchmark of reading from HDFS still works, on the HDFS that these tests have anyway."""

from __future__ import annotations

import pytest

from tests.system.bench.test_toy_sizes import NEEDS_HDFS, figures


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_of_hdfs_works(hdfs):
    assert figures("hdfs", "--url", hdfs.url) == NEEDS_HDFS["hdfs"]
