"""Dealing buckets to servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.errors import PSSettingsError
from ps.manifest.sharding import bucket_bytes_for, deal

SIZES = st.lists(st.integers(0, 1000), max_size=60)


@given(SIZES, st.integers(1, 12))
def test_ranges_are_contiguous_and_cover_every_bucket(sizes, num_servers):
    ranges = deal(sizes, num_servers)
    assert len(ranges) == num_servers
    assert [i for part in ranges for i in part] == list(range(len(sizes)))


@given(SIZES, st.integers(1, 12))
def test_no_server_gets_more_than_its_share_and_one_bucket(sizes, num_servers):
    loads = [sum(sizes[i] for i in part) for part in deal(sizes, num_servers)]
    assert max(loads) <= sum(sizes) / num_servers + max(sizes, default=0)


@given(st.integers(1, 12), st.integers(1, 40))
def test_equal_buckets_are_dealt_to_within_one(num_servers, num_buckets):
    counts = [len(part) for part in deal([64] * num_buckets, num_servers)]
    assert max(counts) - min(counts) <= 1


def test_known_cuts():
    assert deal([10, 10, 10, 10], 2) == (range(2), range(2, 4))
    assert deal([100, 1, 1], 2) == (range(1), range(1, 3))
    assert deal([5], 3) == (range(0), range(1), range(1, 1))
    assert deal([], 2) == (range(0), range(0))


def test_a_total_beyond_64_bits_is_still_exact():
    assert deal([1 << 62] * 6, 3) == (range(2), range(2, 4), range(4, 6))


@pytest.mark.parametrize(("sizes", "servers"), [([1], 0), ([1], -1), ([1, -1], 1)])
def test_impossible_numbers_are_refused(sizes, servers):
    with pytest.raises(PSSettingsError, match="must be >= "):
        deal(sizes, servers)


@given(st.integers(0, 1 << 24), st.integers(1, 16))
def test_buckets_spread_a_small_model_over_all_servers(model_bytes, num_servers):
    size = bucket_bytes_for(model_bytes, num_servers)
    assert 4096 <= size <= 262_144
    assert size % 2048 == 0
    buckets = [size] * (model_bytes // size) + [model_bytes % size]
    loads = [sum(buckets[i] for i in part) for part in deal(buckets, num_servers)]
    share = model_bytes / num_servers
    assert max(loads) <= max(1.25 * share, share + 4096, 262_144 if num_servers == 1 else 0)


@pytest.mark.parametrize(
    ("model_bytes", "num_servers", "size"),
    [
        (200_000, 4, 12_288),
        (200_000, 1, 262_144),
        (1 << 22, 4, 262_144),
        (1 << 21, 4, 131_072),
        (100, 4, 4096),
    ],
)
def test_large_models_and_single_servers_have_buckets_of_256_kib(model_bytes, num_servers, size):
    assert bucket_bytes_for(model_bytes, num_servers) == size
