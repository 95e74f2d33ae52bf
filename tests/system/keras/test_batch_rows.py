"""Which tables of a batch share a route."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ps.manifest.manifest import Adagrad
from ps.manifest.table_spec import TableSpec
from ps.tables.routing import Router
from tfos.keras.embedding.batch_rows import RowPlanner
from tfos.keras.embedding.ids_ahead import LayerCall

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf


class Layer:
    trainable = True
    pad_key = None

    def __init__(self, table: str, dim: int, max_id: int | None) -> None:
        self.table = self.name = table
        self._spec = TableSpec(name=table, dim=dim, rule=Adagrad(), max_id=max_id)
        self.settings = SimpleNamespace(spec=lambda _: self._spec)
        self.router = Router(self._spec, 2)


def planned(layers, keys):
    def route(given):
        return {name: routers[name].route(ids) for name, ids in given.items()}

    routers = {layer.table: layer.router for layer in layers}
    planner = RowPlanner(layers, route, pads=False)
    return planner.plan([LayerCall(layer, "") for layer in layers], keys).routed


def test_tables_of_equal_keys_share_a_route_if_they_take_equal_ids():
    layers = [Layer("deep", 16, None), Layer("b", 8, None), Layer("wide", 1, None)]
    layers.append(Layer("other ids", 1, 1000))
    ids, others = np.array([7, 3, 7, 9]), np.array([7, 3, 9, 7])
    routed = planned(layers, [ids, others, ids.copy(), ids])
    assert routed["deep"] is routed["wide"]
    assert len({id(each) for each in routed.values()}) == 3
    for name, keys in zip(routed, [ids, others, ids, ids], strict=True):
        assert routed[name].unique[routed[name].inverse].tolist() == keys.tolist()


def test_keys_that_only_begin_alike_have_routes_of_their_own():
    first = np.arange(40)
    keys = [first, np.append(first[:39], 99), first[:20], first.copy()]
    layers = [Layer(f"of {len(own)}, {at}", 4, None) for at, own in enumerate(keys)]
    routed = list(planned(layers, keys).values())
    for found, own in zip(routed, keys, strict=True):
        assert found.unique[found.inverse].tolist() == own.tolist()
    assert len({id(each) for each in routed[:3]}) == 3
