"""The benchmark of reading from HDFS still works, on the HDFS that these tests have anyway."""

from __future__ import annotations

import pytest

from tests.support.benchmarks import ON_HDFS, printed_by


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_hdfs_works(hdfs):
    lines = printed_by("scripts.benchmarks.hdfs", "--toy", "--url", hdfs.url)
    assert [line["id"] for line in lines] == ON_HDFS["hdfs"]
