"""Every rule at every learning rate, in every mode: the same answer and the same parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.errors import NonFiniteGradient, NonFiniteUpdate
from ps.manifest.limits import MAX_SCALAR
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from ps.manifest.rule_spec import Ftrl
from tests.support.ps_cluster import cluster, filled, make_manifest, run_all, succeeded
from tests.support.tables import table, table_kernels_loaded, with_tables
from tests.support.update_rules import RULES

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

MODES = ("async", "ssp", "sync", "hybrid")
RATES = (1e-3, 1e-30, 1e-40, 0.0, 1e12, MAX_SCALAR)
SIZE = 48
MANIFEST = Manifest(
    groups=tuple(
        GroupSpec(f"group-{at}", "float32", rule, (ParamSpec("w", (SIZE,)),))
        for at, rule in enumerate(RULES)
    ),
    bucket_bytes=128,
)


def in_mode(mode: str, manifest: Manifest) -> Manifest:
    if mode == "hybrid":  # it is for tables, and a dense group is as in sync
        settings = {"tables": (table(),), "staleness_bound": 1}
        return msgspec.structs.replace(manifest, consistency=mode, **settings)
    return msgspec.structs.replace(manifest, consistency=mode)


def answer(push: Any) -> str:
    try:
        push()
    except NonFiniteUpdate as error:
        return type(error).__name__
    return "acknowledged"


def trained(mode: str) -> tuple[list[str], bytes]:
    """One worker's answers at each rate, and the parameters after each."""
    answers, values = [], b""
    with cluster(num_servers=2) as bed:
        manifest = in_mode(mode, MANIFEST)
        (client,) = bed.workers(manifest, filled(manifest, 0.5))
        rng = np.random.default_rng(3)
        for rate in RATES:
            grads = {
                spec.name: rng.standard_normal(SIZE).astype(np.float32) for spec in MANIFEST.groups
            }
            answers.append(answer(partial(client.push, grads, hyper=Hyper(rate), rows=1)))
            pulled = bed.pulled(client)
            assert all(np.isfinite(each).all() for each in pulled.values())
            values += b"".join(pulled[spec.name].tobytes() for spec in MANIFEST.groups)
        assert {each.phase for each in client.describe()} == {"SERVING"}
    return answers, values


@pytest.mark.slow
@pytest.mark.fault("F48")
def test_every_mode_gives_the_same_answer_at_every_rate():
    answers, values = trained(MODES[0])
    assert answers == [*["acknowledged"] * 4, *["NonFiniteUpdate"] * 2]
    for mode in MODES[1:]:
        assert trained(mode) == (answers, values), mode


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_of_ftrl_that_ends_at_zero_leaves_the_servers_serving(mode: str):
    manifest = in_mode(mode, make_manifest(rule=Ftrl()))
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest, 0.5))
        ones = filled(manifest, 1.0)
        seen = []
        for rate in (0.1, 0.0, 0.0):
            run = [partial(each.push, ones, hyper=Hyper(rate), rows=1) for each in clients]
            assert all(ack.applied for ack in succeeded(run_all(*run)))
            seen.append(bed.pulled(clients[0])["trainable"].tobytes())
        assert len(set(seen)) == 1


@pytest.mark.fault("F48")
@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_overflows_is_refused_and_leaves_out_its_elements_alone(mode: str, tmp_path):
    manifest = in_mode(mode, make_manifest())
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads = filled(manifest, 1.0)
        grads["trainable"][10] = 3e38
        with pytest.raises(NonFiniteUpdate, match=r"1 of 128 values .*'dense/kernel'"):
            client.push(grads, hyper=Hyper(2.0), rows=1)
        expected = np.full(1000, -2.0, np.float32)
        expected[10] = 0.0
        np.testing.assert_array_equal(bed.pulled(client)["trainable"], expected)
        assert client.push(filled(manifest, 1.0), hyper=Hyper(2.0), rows=1).applied
        client.save(tmp_path, step=1)


@pytest.mark.fault("F48")
def test_each_worker_hears_of_an_overflow_after_clipping_by_norm():
    manifest = make_manifest(600, rule=SGD(clipnorm=1e30), consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        huge = filled(manifest, 1e20)
        for _ in range(2):
            works = [partial(each.push, huge, hyper=Hyper(1e30), rows=1) for each in clients]
            assert [type(result) for result in run_all(*works)] == [NonFiniteUpdate] * 2
        assert not bed.pulled(clients[0])["trainable"].any()
        ones = filled(manifest, 1.0)
        works = [partial(each.push, ones, hyper=Hyper(1.0), rows=1) for each in clients]
        assert all(ack.applied for ack in succeeded(run_all(*works)))


@pytest.mark.fault("F48")
def test_rows_whose_update_overflows_are_refused_and_the_others_change(tmp_path):
    manifest = with_tables(table(rule=SGD()))
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        ids, grads = np.arange(20), np.ones((20, 4), np.float32)
        grads[7, 2] = 3e38
        with pytest.raises(NonFiniteUpdate, match=r"table 'user'.*changed 2 of its 2 segments"):
            client.tables.push({"user": (ids, grads)}, hyper=Hyper(2.0))
        expected = np.full((20, 4), -2.0, np.float32)
        expected[7, 2] = 0.0
        np.testing.assert_array_equal(client.tables.lookup({"user": ids})["user"], expected)
        client.save(tmp_path, step=1)


@pytest.mark.fault("F48")
def test_a_refused_gradient_says_how_many_buckets_have_changed():
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads = filled(manifest, 1.0)
        grads["trainable"][-1] = np.nan
        with pytest.raises(NonFiniteGradient, match="changed 7 of the 8 buckets of ps:0") as told:
            client.push(grads, hyper=Hyper(1.0), rows=1)
        assert told.value.details["changed_buckets"] == "7"
        changed = bed.pulled(client)["trainable"] != 0
        assert changed.tolist() == [True] * 896 + [False] * 104
