"""Cutting flat buffers for servers, and runs for reading: nothing is lost, doubled or copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.client.slices import check_arrays, slice_by_server, views_per_server, whole
from ps.dense.staging import StagedGradient, split_into_runs
from ps.errors import ShapeError
from ps.manifest.diff import MAX_SHOWN, manifest_differences
from ps.manifest.manifest import SGD, Adam, DType, GroupSpec, Layout, Manifest, ParamSpec
from ps.manifest.rule_spec import RuleConfig
from ps.manifest.sharding import deal
from tests.support.tables import table, with_tables

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=3)


def manifest_of(group_sizes: list[int]) -> Manifest:
    dtypes: tuple[DType, ...] = ("float32", "float64", "float32")
    groups = tuple(
        GroupSpec(f"g{index}", dtypes[index], SGD(), (ParamSpec("w", (size,)),))
        for index, size in enumerate(group_sizes)
    )
    return Manifest(groups=groups, bucket_bytes=64)


@given(sizes, st.integers(1, 5))
def test_pieces_cover_every_element_once_in_the_servers_bucket_order(group_sizes, num_servers):
    manifest = manifest_of(group_sizes)
    layout = Layout.of(manifest)
    arrays = {
        group.name: np.arange(group.num_elements).astype(group.dtype) for group in manifest.groups
    }
    owned = deal(layout.bucket_bytes(), num_servers)
    slices = slice_by_server(layout, num_servers)
    views = views_per_server(arrays, slices)
    for pieces, sent, mine in zip(slices, map(b"".join, views), owned, strict=True):
        assert len(pieces) <= len(manifest.groups), "neighbours are merged"
        buckets = layout.buckets[mine.start : mine.stop]
        expected = b"".join(arrays[b.group][b.start : b.stop].tobytes() for b in buckets)
        assert sent == expected


@given(sizes, st.integers(1, 5), st.lists(st.integers(0, 300), max_size=4))
def test_a_gradient_in_parts_is_sent_as_the_same_bytes(group_sizes, num_servers, cuts):
    layout = Layout.of(manifest_of(group_sizes))
    flat = {
        group.name: np.arange(group.num_elements).astype(group.dtype) for group in layout.groups
    }
    parts = {
        name: np.split(each, sorted(min(at, each.size) for at in cuts))
        for name, each in flat.items()
    }
    check_arrays(layout, parts, "grads")
    slices = slice_by_server(layout, num_servers)
    sent = [list(map(b"".join, views_per_server(each, slices))) for each in (parts, flat)]
    assert sent[0] == sent[1]
    for name, each in whole(parts).items():
        np.testing.assert_array_equal(each, flat[name])


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([np.zeros(60, np.float32)], r"float32\[60\]"),
        ([np.zeros(60, np.float32), np.zeros(41, np.float32)], r"float32\[101\]"),
        ([np.zeros(60, np.float32), np.zeros(40)], r"float64\[40\]"),
        ([np.zeros(60, np.float32), np.zeros((4, 10), np.float32)], r"float32\[4, 10\]"),
        ([np.zeros(60, np.float32), np.zeros(80, np.float32)[::2]], "contiguous"),
        ([np.zeros(60, np.float32), [0.0] * 40], "list"),
    ],
)
def test_parts_that_are_no_flat_buffer_together_are_refused(parts, text):
    with pytest.raises(ShapeError, match=text):
        check_arrays(Layout.of(manifest_of([100])), {"g0": parts}, "grads")


def test_nothing_is_filled_in_parts():
    parts = [np.zeros(60, np.float32), np.zeros(40, np.float32)]
    with pytest.raises(ShapeError, match="list"):
        check_arrays(Layout.of(manifest_of([100])), {"g0": parts}, "into", writable=True)


@pytest.mark.parametrize("size", [1, 100])
def test_an_array_in_place_of_a_dict_of_arrays_is_refused_by_what_it_is(size):
    array: Any = np.zeros(size, np.float32)
    with pytest.raises(ShapeError, match=r"grads must have the groups \['g0'\], got ndarray;"):
        check_arrays(Layout.of(manifest_of([100])), array, "grads")


def test_views_share_the_arrays_memory():
    manifest = manifest_of([100])
    arrays = {"g0": np.zeros(100, np.float32)}
    ((view,),) = views_per_server(arrays, slice_by_server(Layout.of(manifest), 1))
    view.cast("f")[7] = 3.0
    assert arrays["g0"][7] == 3.0


@given(sizes, st.integers(64, 1000))
def test_runs_cover_all_buckets_and_never_mix_dtypes(group_sizes, max_bytes):
    buckets = Layout.of(manifest_of(group_sizes)).buckets
    runs = split_into_runs(buckets, max_bytes)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(buckets)))
    for run in runs:
        mine = buckets[run.start : run.stop]
        assert len({bucket.group for bucket in mine}) == 1
        assert run.nbytes == sum(bucket.nbytes for bucket in mine)
        assert run.nbytes <= max_bytes or len(mine) == 1


@given(sizes)
def test_staged_gradients_are_aligned_and_filled_run_by_run(group_sizes):
    manifest = manifest_of(group_sizes)
    layout = Layout.of(manifest)
    staged = StagedGradient(
        layout.buckets, lambda bucket_id: layout.group(layout.buckets[bucket_id].group).numpy_dtype
    )
    for run in split_into_runs(layout.buckets, 256):
        staged.window(run)[:] = bytes([run.start % 251]) * run.nbytes
        for index in range(run.start, run.stop):
            array = staged.arrays[index]
            assert array.flags.aligned
            assert set(array.tobytes()) == {run.start % 251}


def test_differences_of_manifests_are_sentences():
    one = manifest_of([4, 4])
    other = Manifest(
        groups=(
            GroupSpec("g0", "float64", Adam(), (ParamSpec("w", (5,)), ParamSpec("b", (1,)))),
            GroupSpec("extra", "float32", SGD(), ()),
        ),
        consistency="sync",
        bucket_bytes=64,
    )
    text = "; ".join(manifest_differences(one, other))
    for part in (
        "group 'g1' is missing",
        "group 'extra' is unexpected",
        "expected dtype float32, found float64",
        "parameter 'b' is unexpected",
        "'w' expected shape (4,), found (5,)",
        "consistency: expected 'async', found 'sync'",
    ):
        assert part in text
    assert manifest_differences(one, one) == ()


def test_another_rule_is_shown_with_the_settings_that_it_uses():
    def of(rule: RuleConfig) -> Manifest:
        dense = GroupSpec("g", "float32", rule, ())
        return Manifest(groups=(dense,), tables=(table(rule=rule),))

    found = "SGD(clipnorm=2.0, momentum=0.0, nesterov=False)"
    wanted = f"expected rule SGD(momentum=0.0, nesterov=False), found {found}"
    assert manifest_differences(of(SGD()), of(SGD(clipnorm=2.0))) == (
        f"group 'g': {wanted}",
        f"table 'user': {wanted}",
    )


def test_many_differences_are_cut_short():
    def numbered(count: int) -> Manifest:
        params = tuple(ParamSpec(f"p{n}", (1,)) for n in range(count))
        return Manifest(groups=(GroupSpec("g", "float32", SGD(), params),))

    sentences = manifest_differences(numbered(0), numbered(100))
    assert len(sentences) == MAX_SHOWN + 1
    assert sentences[-1] == "and 92 more"


def test_differences_of_groups_come_in_the_order_of_their_names_in_every_process():
    def of(dtype: DType) -> Manifest:
        return Manifest(groups=tuple(GroupSpec(f"g{n}", dtype, SGD(), ()) for n in range(9)))

    sentences = manifest_differences(of("float32"), of("float64"))
    assert [each.split("'")[1] for each in sentences[:MAX_SHOWN]] == [
        f"g{n}" for n in range(MAX_SHOWN)
    ]


def test_another_order_of_the_same_parameters_is_a_difference():
    params = (ParamSpec("a", (1,)), ParamSpec("b", (1,)))
    one = Manifest(groups=(GroupSpec("g", "float32", SGD(), params),))
    other = Manifest(groups=(GroupSpec("g", "float32", SGD(), params[::-1]),))
    assert manifest_differences(one, other) == (
        "group 'g': the same parameters in another order, expected 'a' where 'b' was found",
    )


def test_what_ids_are_made_of_is_no_difference_as_no_hash_has_it():
    one, other = (with_tables(table(id_source=each)) for each in ("any", "strings"))
    assert one.hash() == other.hash()
    assert manifest_differences(one, other) == ()
