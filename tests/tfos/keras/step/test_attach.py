"""A chief that attaches decides by what all servers have, not by what some of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ps.errors import ManifestMismatch
from ps.manifest.manifest import GroupSpec, Manifest, ParamSpec
from ps.manifest.sharding import bucket_bytes_for
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, raw_seed
from tests.support.tables import table, with_tables
from tfos.config import Checkpoints
from tfos.errors import UnsupportedModel
from tfos.keras.step.attach import as_served, check_same, served_by
from tfos.worker.saver import ChiefSaver

pytestmark = [pytest.mark.socket, pytest.mark.fault("F20")]

MANIFEST = make_manifest(1000, rule=ADD)


def test_a_chief_does_not_wait_for_the_seed_that_it_is_to_bring(tmp_path: Path):
    """Two attempts before it were lost, and each has brought one server its values."""
    fitting = bucket_bytes_for(sum(group.nbytes for group in MANIFEST.pushed_groups), 2)
    manifest = msgspec.structs.replace(MANIFEST, bucket_bytes=fitting)
    with cluster("inproc", num_servers=2) as bed:
        raw_seed(bed, 0, manifest, 7.0, seed_id=7)
        raw_seed(bed, 1, manifest, 8.0, seed_id=8, generation=1)
        chief = bed.client(0, generation=2, timeout_s=2.0)
        saver = ChiefSaver(
            Checkpoints(directory=str(tmp_path), resume=True), bed.client, joins=True
        )
        saver.start()
        assert as_served(MANIFEST, served_by(chief), 2) == manifest
        chief.seed(manifest, filled(manifest, 1.0))
        assert set(bed.pulled(chief)["trainable"]) == {1.0}
        saver.close()


def test_the_buckets_of_servers_with_values_are_kept():
    manifest = msgspec.structs.replace(MANIFEST, bucket_bytes=1024)
    with cluster("inproc", num_servers=2) as bed:
        bed.client().seed(manifest, filled(manifest))
        chief = bed.client(0, generation=1)
        assert as_served(MANIFEST, served_by(chief), 2) == manifest


def with_seed(seed: int | None) -> Manifest:
    return with_tables(table(seed=seed), size=1000)


@pytest.mark.parametrize("pair", [("any", "integers"), ("strings", "any")])
def test_a_layer_that_was_not_called_yet_fits_servers_that_know_its_ids(pair):
    """A worker that evaluates before it distributes has called its layers, the others have not."""
    check_same(*(with_tables(table(id_source=each), size=1000) for each in pair))


def test_strings_do_not_fit_servers_of_integers():
    ours, theirs = (with_tables(table(id_source=each)) for each in ("strings", "integers"))
    with pytest.raises(UnsupportedModel, match="id_source 'strings' and 'integers'"):
        check_same(ours, theirs)


def test_a_model_whose_tables_name_no_seed_fits_servers_of_any():
    check_same(with_seed(None), with_seed(0))
    with pytest.raises(UnsupportedModel, match="seed 1 and 0"):
        check_same(with_seed(1), with_seed(0))
    with cluster("inproc", num_servers=1) as bed:
        served = with_seed(0)
        bed.client().seed(served, filled(served))
        chief = bed.client(0, generation=1)
        assert as_served(with_seed(None), served_by(chief), 1) == served


def test_values_go_a_second_time_only_where_seeds_of_tables_were_what_differed(
    monkeypatch: pytest.MonkeyPatch,
):
    with cluster("inproc", num_servers=1) as bed:
        served = with_seed(0)
        bed.client().seed(served, filled(served))
        chief = bed.client(0, generation=1)
        sent: list[Manifest] = []
        send = chief._dense.seed

        def counted(manifest: Manifest, *rest: Any) -> int:
            sent.append(manifest)
            return send(manifest, *rest)

        monkeypatch.setattr(chief._dense, "seed", counted)
        other = with_tables(table(seed=0), size=999)
        with pytest.raises(ManifestMismatch, match=r"shape \(667,\), found \(666,\)"):
            chief.seed(other, filled(other))
        assert sent == [other]
        chief.seed(with_seed(None), filled(served))
        assert sent == [other, with_seed(None), served]


def named(*names: str) -> Manifest:
    params = tuple(ParamSpec(name, (3,)) for name in names)
    return Manifest(groups=(GroupSpec("trainable", "float32", ADD, params),))


TOWERS = ("user/dense/kernel", "item/dense/kernel")
BUILT = ("sequential/tower/dense/kernel", "sequential/dense_1/kernel")


@pytest.mark.parametrize(
    ("held", "own", "is_same"),
    [
        (BUILT, ("dense/kernel", "dense_1/kernel"), True),
        (("dense/kernel", "dense_1/kernel"), BUILT, True),
        (BUILT, ("dense_1/kernel", "dense/kernel"), False),
        (BUILT, ("dense/kernel",), False),
        (TOWERS, TOWERS[::-1], False),
        (("prelude/kernel", "lude/kernel"), ("lude/kernel", "prelude/kernel"), False),
    ],
)
def test_a_loaded_model_has_the_names_of_the_one_that_code_built(held, own, is_same):
    with cluster("inproc") as bed:
        bed.client().seed(named(*held), filled(named(*held)))
        chief = bed.client(0, generation=1)
        params = as_served(named(*own), served_by(chief), 1).groups[0].params
        assert [each.name for each in params] == list(held if is_same else own)


Q, K = "m/q/kernel", "m/k/kernel"


@pytest.mark.parametrize(
    ("own", "held", "told"),
    [
        (
            (Q, K),
            (K, Q),
            rf"has \['{Q}', '{K}'\] where the parameter servers have \['{K}', '{Q}'\]",
        ),
        ((Q, "dense/kernel", K), (K, "dense_1/kernel", Q), rf"\['{Q}', '{K}'\]"),
        (("m_1/q/kernel", "m_1/k/kernel"), (K, Q), r"\['m_1/q/kernel', 'm_1/k/kernel'\]"),
        (("q/kernel", "k/kernel"), (K, Q), r"\['q/kernel', 'k/kernel'\]"),
        ((Q, K, "m/v/kernel"), (K, Q, "m/v/kernel"), rf"\['{Q}', '{K}'\]"),
        (("expert_0/w", "expert_1/w"), ("expert_1/w", "expert_0/w"), r"\['expert_0/w', "),
        (("a", "b", "c"), ("b", "c", "a"), r"\['a', 'b', 'c'\] .*\['b', 'c', 'a'\]"),
    ],
)
def test_weights_in_another_order_are_refused_by_name(own, held, told):
    with pytest.raises(UnsupportedModel, match=f"{told}.*sort a directory listing"):
        check_same(named(*own), named(*held))


@pytest.mark.parametrize(
    ("own", "held"),
    [
        (("dense/kernel", "dense_1/kernel"), ("dense_1/kernel", "dense_2/kernel")),
        (("dense_2/kernel", "dense_3/kernel"), ("dense/kernel", "dense_1/kernel")),
        (("dense_1/w", "conv/w", "dense_2/w"), ("dense/w", "conv/w", "dense_1/w")),
        (("dense_1/w", "dense/w"), ("dense/w", "dense_1/w")),
        (BUILT, ("dense/kernel", "dense_1/kernel")),
        (("kernel",), ("sequential/dense/kernel",)),
    ],
)
def test_layers_that_keras_numbers_otherwise_are_the_same(own, held):
    """Another model made before shifts the numbers; layers made from a set have any order."""
    check_same(named(*own), named(*held))
