"""A server's shard: updates, sharded = unsharded, atomicity, locking, averages, clipping."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.dense.ema import MovingAverage
from ps.dense.shard import DenseShard
from ps.errors import ManifestMismatch, NonFiniteGradient, PSSettingsError, ShapeError
from ps.manifest.manifest import (
    MAX_BUCKET_BYTES,
    SGD,
    Adam,
    AdamW,
    Add,
    Average,
    GroupSpec,
    Hyper,
    Manifest,
    ParamSpec,
)
from tests.support.update_rules import RULES, WITH_DTYPES

PARAMS = (ParamSpec("dense/kernel", (37, 11)), ParamSpec("dense/bias", (11,)), ParamSpec("s", ()))
NUM = 37 * 11 + 11 + 1


def manifest(rule, dtype="float32", **settings):
    return Manifest(
        groups=(GroupSpec("trainable", dtype, rule, PARAMS),), bucket_bytes=256, **settings
    )


def shards(whole, num_servers=1, num_workers=1):
    return [
        DenseShard(whole, rank=rank, num_servers=num_servers, num_workers=num_workers)
        for rank in range(num_servers)
    ]


def seed(servers, values):
    for server in servers:
        for bucket in server.buckets:
            server.set_values(bucket.id, values[bucket.start : bucket.stop])


def push(servers, gradient, hyper):
    for server in servers:
        for bucket in server.buckets:
            server.apply(bucket.id, gradient[bucket.start : bucket.stop], hyper)


def pull(servers):
    return np.concatenate([server.values(i) for server in servers for i in server.bucket_ids])


def numbers(seed_, dtype="float32"):
    return np.random.default_rng(seed_).standard_normal(NUM).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype"), [*WITH_DTYPES, (Add(), "float32")])
def test_sharded_equals_unsharded_bit_for_bit(rule, dtype):
    results = []
    for num_servers in (1, 2, 3):
        servers = shards(manifest(rule, dtype), num_servers)
        seed(servers, numbers(0, dtype))
        for step in range(1, 6):
            push(servers, numbers(step, dtype), Hyper(0.05))
        results.append(pull(servers).tobytes())
    assert results[0] == results[1] == results[2]
    assert results[0] != numbers(0, dtype).tobytes()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    rule=st.sampled_from(RULES),
    bucket_bytes=st.integers(8, 300).map(lambda words: 8 * words),
    num_servers=st.integers(1, 3),
)
def test_where_buckets_are_cut_changes_no_bit(rule, bucket_bytes, num_servers):
    results = []
    group = GroupSpec("trainable", "float32", rule, PARAMS)
    for size, servers in ((MAX_BUCKET_BYTES, 1), (bucket_bytes, num_servers)):
        cut = shards(Manifest(groups=(group,), bucket_bytes=size), servers)
        seed(cut, numbers(0))
        for step in (1, 2):
            push(cut, numbers(step), Hyper(0.05))
        results.append(pull(cut).tobytes())
    assert results[0] == results[1]


def test_more_servers_than_buckets_leaves_some_empty():
    whole = Manifest(groups=(GroupSpec("g", "float32", SGD(), (ParamSpec("w", (3,)),)),))
    servers = shards(whole, 3)
    assert [len(server.buckets) for server in servers] == [0, 1, 0]
    assert [server.value_nbytes for server in servers] == [0, 12, 0]


def test_the_size_is_that_of_the_values_without_their_slots():
    (shard,) = shards(manifest(Adam()))
    assert shard.value_nbytes == NUM * 4
    assert shard.slots(0).keys() == {"momentum", "velocity"}


@pytest.mark.fault("F48")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_bucket_is_refused_whole_and_names_the_parameter(poison):
    (shard,) = shards(manifest(AdamW()))
    seed([shard], numbers(0))
    push([shard], numbers(1), Hyper(0.01))
    last = shard.bucket_ids[-1]
    before = shard.values(last).tobytes(), [s.tobytes() for s in shard.slots(last).values()]
    gradient = numbers(2)[shard.buckets[last].start :].copy()
    gradient[-1] = poison
    with pytest.raises(NonFiniteGradient, match=r"1 of \d+ values .* the first in 's'") as caught:
        shard.apply(last, gradient, Hyper(0.01))
    assert caught.value.details["param"] == "s"
    after = shard.values(last).tobytes(), [s.tobytes() for s in shard.slots(last).values()]
    assert before == after
    assert (shard.version(last), shard.step(last)) == (2, 1)


@pytest.mark.fault("F47")
@pytest.mark.parametrize(
    "wrong", [np.zeros(63, np.float32), np.zeros(64, np.float64), np.zeros((8, 8), np.float32)]
)
def test_a_wrong_shape_or_dtype_is_refused_with_both(wrong):
    (shard,) = shards(manifest(SGD()))
    for call in (
        lambda: shard.apply(0, wrong, Hyper(0.1)),
        lambda: shard.set_values(0, wrong),
        lambda: shard.load(0, wrong, [], 0),
    ):
        with pytest.raises(ShapeError, match=r"is float32\[64\], .* was float"):
            call()
    assert shard.version(0) == 0


def test_a_foreign_bucket_is_named():
    first, second = shards(manifest(SGD()), 2)
    with pytest.raises(
        ManifestMismatch, match=r"bucket 0 is not on this server, which owns 3\.\.6"
    ):
        second.apply(0, np.zeros(64, np.float32), Hyper(0.1))
    assert 0 in first.bucket_ids


def test_scalars_that_do_not_fit_leave_the_bucket_unchanged():
    (shard,) = shards(manifest(AdamW()))
    seed([shard], numbers(0))
    before = pull([shard]).tobytes()
    with pytest.raises(PSSettingsError):
        push([shard], numbers(1), Hyper(0.1, {"trainable": (1.0, 2.0)}))
    assert pull([shard]).tobytes() == before


def test_unaligned_and_read_only_gradients_are_applied_and_not_changed():
    (plain,), (odd,) = shards(manifest(Adam())), shards(manifest(Adam()))
    raw = b"x" + numbers(1).tobytes()
    gradient = np.frombuffer(raw, np.float32, offset=1)
    assert not gradient.flags.aligned
    push([odd], gradient, Hyper(0.1))
    push([plain], numbers(1), Hyper(0.1))
    assert pull([odd]).tobytes() == pull([plain]).tobytes()
    assert raw[1:] == numbers(1).tobytes()


def statistics(num_workers, consistency):
    params = (ParamSpec("mean", (100,)),)
    whole = Manifest(
        groups=(GroupSpec("statistics", "float32", Average(), params),), consistency=consistency
    )
    (shard,) = shards(whole, 1, num_workers)
    shard.set_values(0, np.ones(100, np.float32))
    return shard


@pytest.mark.parametrize(("num_workers", "consistency"), [(1, "async"), (1, "sync"), (3, "sync")])
def test_statistics_are_taken_exactly_where_they_are_the_mean(num_workers, consistency):
    shard = statistics(num_workers, consistency)
    pushed = np.linspace(-1, 1e-30, 100, dtype=np.float32)
    shard.apply(0, pushed, Hyper(0.0))
    assert shard.values(0).tobytes() == pushed.tobytes()
    assert shard.version(0) == 2


def test_async_statistics_move_by_one_share():
    shard = statistics(4, "async")
    shard.apply(0, np.full(100, 3, np.float32), Hyper(0.0))
    assert set(shard.values(0)) == {np.float32(1.5)}


def test_nonfinite_statistics_are_refused():
    shard = statistics(1, "async")
    with pytest.raises(NonFiniteGradient, match="'mean'"):
        shard.apply(0, np.full(100, np.nan, np.float32), Hyper(0.0))
    assert set(shard.values(0)) == {np.float32(1)}


def test_clipping_by_value_is_the_servers_in_sync_mode_only():
    gradient = numbers(1) * 10
    clipped = np.clip(gradient, -0.5, 0.5)
    results = {}
    for consistency in ("sync", "async"):
        servers = shards(manifest(SGD(clipvalue=0.5), consistency=consistency))
        seed(servers, numbers(0))
        push(servers, gradient, Hyper(1.0))
        results[consistency] = pull(servers)
    assert results["sync"].tobytes() == (numbers(0) - clipped).tobytes()
    assert results["async"].tobytes() == (numbers(0) - gradient).tobytes()
    assert gradient.tobytes() == (numbers(1) * 10).tobytes()


def test_assigned_values_keep_slots_and_steps():
    (shard,) = shards(manifest(Adam()))
    push([shard], numbers(1), Hyper(0.1))
    slots = {name: slot.copy() for name, slot in shard.slots(0).items()}
    shard.set_values(0, np.zeros(64, np.float32))
    assert not shard.values(0).any()
    assert all((shard.slots(0)[name] == slot).all() for name, slot in slots.items())
    assert (shard.step(0), shard.version(0)) == (1, 2)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frequency", [None, 3])
def test_averages_follow_the_values_and_replace_them_as_often_as_asked(dtype, frequency):
    """Against SGD with decay in numpy; at the first update the average is the value."""
    rule = SGD(weight_decay=0.1, ema_momentum=0.9, ema_overwrite_frequency=frequency)
    number = np.dtype(dtype).type
    servers = shards(manifest(rule, dtype), 3)
    expected = numbers(0, dtype)
    seed(servers, expected)
    assert averages_of(servers).tobytes() == expected.tobytes(), "no update yet"
    average = np.zeros_like(expected)
    for step in range(1, 8):
        push(servers, numbers(step, dtype), Hyper(0.05))
        decay, rate = number(np.float32(0.1)) * number(0.05), number(0.05)
        expected = expected - expected * decay
        expected = expected - numbers(step, dtype) * rate
        kept = number(0.9 if step > 1 else 0)
        average = kept * average + (number(1) - kept) * expected
        if frequency and step % frequency == 0:
            expected = average.copy()
        assert averages_of(servers).tobytes() == average.tobytes(), step
        assert pull(servers).tobytes() == expected.tobytes(), step


def averages_of(servers):
    parts = [server.averages(i) for server in servers for i in server.bucket_ids]
    return np.concatenate(
        [np.frombuffer(p, s) for p, s in zip(parts, dtypes(servers), strict=True)]
    )


def dtypes(servers):
    return [server.dtype(i) for server in servers for i in server.bucket_ids]


def test_groups_without_averages_answer_with_their_values():
    (shard,) = shards(manifest(SGD()))
    push([shard], numbers(1), Hyper(0.1))
    assert averages_of([shard]).tobytes() == pull([shard]).tobytes()


def test_a_dumped_bucket_can_be_loaded_elsewhere():
    (one,), (two,) = shards(manifest(Adam())), shards(manifest(Adam()))
    push([one], numbers(1), Hyper(0.1))
    for bucket in one.buckets:
        copies = [np.empty(bucket.num_elements, np.float32) for _ in range(3)]
        step = one.dump(bucket.id, copies)
        two.load(bucket.id, copies[0], copies[1:], step)
    for shard in (one, two):
        push([shard], numbers(2), Hyper(0.1))
    assert pull([one]).tobytes() == pull([two]).tobytes()


def test_handed_out_views_cannot_be_written():
    (shard,) = shards(manifest(SGD()))
    assert shard.value_bytes(0).readonly
    with pytest.raises(ValueError, match="read-only"):
        shard.values(0)[0] = 1


def test_a_copy_waits_for_its_bucket_alone():
    (shard,) = shards(manifest(SGD()))
    copied = threading.Event()
    out = np.empty(64, np.float32)

    def copy():
        shard.dump(0, [out])
        copied.set()

    thread = threading.Thread(target=copy, daemon=True)
    with shard._by_id[0].lock:
        thread.start()
        shard.apply(1, np.ones(64, np.float32), Hyper(0.1))  # another bucket is free
        assert not copied.wait(0.02)
    thread.join(10)
    assert copied.is_set()


def test_parallel_pushes_are_neither_lost_nor_torn():
    (shard,) = shards(manifest(Add()))
    pushes, num_threads = 200, 4
    ones = np.ones(NUM, np.float32)

    def work():
        for _ in range(pushes):
            push([shard], ones, Hyper(0.0))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    out = np.empty(64, np.float32)
    for _ in range(100):
        shard.dump(0, [out])
        assert len(set(out)) == 1
    for thread in threads:
        thread.join(60)
    assert set(pull([shard])) == {np.float32(pushes * num_threads)}
    assert {shard.version(i) for i in shard.bucket_ids} == {pushes * num_threads}


def test_a_pull_during_the_first_update_has_no_average_that_is_not_filled_yet(monkeypatch):
    """Pulls take no lock: until the average is written, its values stand for it."""
    [shard] = shards(manifest(SGD(ema_momentum=0.9)))
    seed([shard], numbers(0))
    seen = []
    follow = MovingAverage.follow

    def looked_at(*arguments):
        seen.append(averages_of([shard]))
        follow(*arguments)

    monkeypatch.setattr(MovingAverage, "follow", looked_at)
    shard.apply(0, numbers(1)[: shard.buckets[0].num_elements], Hyper(0.05))
    assert seen[0].tobytes() == pull([shard]).tobytes()
    assert averages_of([shard]).tobytes() == pull([shard]).tobytes()
    assert (shard.step(0), shard.version(0)) == (1, 2)
