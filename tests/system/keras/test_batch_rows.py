"""Tables of equal keys share a route, and other tables cost nothing more by their number."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from ps.manifest.manifest import Adagrad
from ps.manifest.table_spec import TableSpec
from ps.tables.routing import Router
from tfos.keras.embedding import batch_rows
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
    planner = batch_rows.RowPlanner(layers, route, pads=False)
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


def test_keys_of_equal_hashes_have_their_own_routes(monkeypatch):
    monkeypatch.setattr(batch_rows, "hash", lambda _: 0, raising=False)
    ids, others = np.array([7, 3, 7, 9]), np.array([7, 3, 9, 7])
    routed = planned([Layer("a", 4, None), Layer("b", 4, None)], [ids, others])
    assert routed["b"].unique[routed["b"].inverse].tolist() == others.tolist()


def test_many_tables_are_not_compared_with_each_other(monkeypatch):
    compare = Mock(wraps=batch_rows._is_route_of)
    monkeypatch.setattr(batch_rows, "_is_route_of", compare)
    layers = [Layer(f"t{number}", 4, None) for number in range(60)]
    keys = [np.arange(8) * (number + 1) for number in range(60)]
    assert len(planned(layers, keys)) == 60
    assert not compare.called
