"""Manifest, layout and hyper-parameters: encoding, limits, the cut into buckets."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.errors import ManifestMismatch, PSSettingsError
from ps.manifest.manifest import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Add,
    Average,
    GroupSpec,
    Hyper,
    Layout,
    Manifest,
    ParamSpec,
)

RULES = [SGD(momentum=0.9, nesterov=True), Adagrad(), Adam(), AdamW(), Average(), Add()]


def manifest(*groups: GroupSpec, **settings) -> Manifest:
    return Manifest(groups=groups, **settings)


def group(name="trainable", rule=None, dtype="float32", shapes=((3, 4), ())) -> GroupSpec:
    params = tuple(ParamSpec(f"p{i}", tuple(shape)) for i, shape in enumerate(shapes))
    return GroupSpec(name, dtype, rule or SGD(), params)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_each_rule_survives_the_wire_as_its_own_class(rule):
    sent = manifest(group(rule=rule), consistency="sync", reduction="sum")
    received = Manifest.decode(sent.encode())
    assert received == sent
    assert type(received.groups[0].rule) is type(rule)
    assert received.hash() == sent.hash()


def test_the_hash_is_stable_across_versions():
    assert manifest(group(rule=Adam())).hash() == "e24af6d114e362f15d86bad9cab69d6a"


@pytest.mark.parametrize(
    "other",
    [
        manifest(group(rule=Adam(epsilon=1e-8))),
        manifest(group(rule=Adam(), shapes=((4, 3), ()))),
        manifest(group(rule=Adam(), dtype="float64")),
        manifest(group(rule=Adam()), consistency="sync"),
        manifest(group(rule=Adam()), bucket_bytes=1024),
        manifest(msgspec.structs.replace(group(rule=Adam()), compression="int8")),
        manifest(group(rule=AdamW(weight_decay=None))),
    ],
)
def test_any_difference_changes_the_hash(other):
    assert other.hash() != manifest(group(rule=Adam())).hash()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1.5), r"SGD: momentum must be in \[0, 1\], got 1.5"),
        (lambda: SGD(momentum=math.nan), "momentum"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: Adam(beta_2=1.0), r"Adam: beta_2 must be in \[0, 1\), got 1.0"),
        (lambda: AdamW(epsilon=-1e-7), "AdamW: epsilon"),
        (lambda: Adagrad(initial_accumulator_value=-0.1), "initial_accumulator_value"),
        (lambda: Adam(clipnorm=math.nan), "clipnorm"),
        (lambda: ParamSpec("w", (2, -1)), "negative dimension"),
        (lambda: ParamSpec("w", (1,) * 33), "has 33 dimensions, at most 32"),
        (lambda: ParamSpec("", ()), "characters"),
        (lambda: group(shapes=((1 << 30, 1 << 30),)), "above the limit"),
        (lambda: GroupSpec("g", "float32", SGD(), (ParamSpec("w", ()),) * 2), "'w' occurs twice"),
        (
            lambda: GroupSpec("g", "float64", SGD(), (), compression="int8"),
            "group 'g': compression='int8' packs float32, the group is float64",
        ),
        (
            lambda: GroupSpec("g", "float32", Average(), (), compression="bf16"),
            "compression='bf16' is for gradients, a running average pushes values",
        ),
        (lambda: manifest(group(), group()), "'trainable' occurs twice"),
        (lambda: manifest(group(), bucket_bytes=100), "bucket_bytes must be a multiple of 8"),
        (
            lambda: manifest(group(shapes=((1 << 28,),)), bucket_bytes=64),
            "16777216 buckets are above the limit 1048576; raise bucket_bytes",
        ),
        (lambda: Hyper(math.inf), "learning_rate must be finite"),
        (lambda: Hyper(math.nan), "learning_rate must be finite"),
        (lambda: Hyper(1e39), "learning_rate must be finite in float32"),
        (
            lambda: Hyper(0.1, {"trainable": (-1e39,)}),
            "scalars of group 'trainable' must be finite",
        ),
        (lambda: Hyper(0.1, {"g": (math.nan,)}), "scalars of group 'g'"),
    ],
)
def test_impossible_settings_are_refused_with_both_values(make, message):
    with pytest.raises(PSSettingsError, match=message):
        make()


def test_an_unknown_compression_from_the_wire_names_those_there_are():
    data = msgspec.msgpack.decode(manifest(group()).encode())
    data["groups"][0]["compression"] = "zip"
    with pytest.raises(ManifestMismatch, match=r"'zip'.*\$\.groups\[0\]\.compression"):
        Manifest.decode(msgspec.msgpack.encode(data))


def test_bad_settings_from_the_wire_name_the_field():
    data = msgspec.msgpack.decode(manifest(group(rule=Adam())).encode())
    data["groups"][0]["rule"]["beta_1"] = 2.0
    with pytest.raises(ManifestMismatch, match=r"beta_1 must be in .*\$\.groups\[0\]\.rule"):
        Manifest.decode(msgspec.msgpack.encode(data))


@given(st.binary(max_size=60), st.integers(0, 300))
def test_bytes_that_are_no_manifest_end_in_one_error(noise, at):
    data = bytearray(manifest(group(rule=Adam()), group("s", Average())).encode())
    at %= len(data)
    data[at : at + len(noise)] = noise
    with contextlib.suppress(ManifestMismatch):
        Manifest.decode(bytes(data))


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)


@given(st.lists(st.tuples(SHAPES, st.booleans()), max_size=3), st.integers(8, 20))
def test_buckets_tile_each_group_exactly_once(groups, eights):
    specs = [
        group(f"g{i}", dtype="float64" if wide else "float32", shapes=shapes)
        for i, (shapes, wide) in enumerate(groups)
    ]
    whole = manifest(*specs, bucket_bytes=8 * eights)
    layout = Layout.of(whole)
    assert [bucket.id for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for spec, cut in zip(specs, layout.groups, strict=True):
        mine = layout.buckets[cut.first_bucket : cut.first_bucket + cut.num_buckets]
        assert all(bucket.group == spec.name for bucket in mine)
        edges = [0, *[bucket.stop for bucket in mine]]
        assert [bucket.start for bucket in mine] == edges[:-1]
        assert edges[-1] == spec.num_elements == cut.num_elements
        for bucket in mine:
            assert 0 < bucket.nbytes <= whole.bucket_bytes
            assert bucket.nbytes == bucket.num_elements * spec.itemsize
    assert sum(cut.num_buckets for cut in layout.groups) == len(layout.buckets)


def test_an_element_is_found_in_its_parameter_past_empty_ones():
    cut = Layout.of(manifest(group(shapes=((2,), (0,), (3,), ())))).group("trainable")
    assert cut.offsets == (0, 2, 2, 5, 6)
    assert [cut.param_at(i) for i in range(6)] == ["p0", "p0", "p2", "p2", "p2", "p3"]


def test_an_unknown_group_is_named_with_the_known_ones():
    with pytest.raises(ManifestMismatch, match="no parameter group 'x'; the manifest has 'train"):
        manifest(group()).group("x")


@pytest.mark.attack("A10")
def test_deep_nesting_is_refused_by_its_own_error():
    bomb = b"\x82\xa6groups\x90\xa1x" + b"\x91" * 60_000 + b"\x01"
    with pytest.raises(ManifestMismatch, match="not a manifest"):
        Manifest.decode(bomb)
