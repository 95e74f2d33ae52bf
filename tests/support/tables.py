"""Manifests with sparse tables, and their kernels compiled before a test's clock runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps.manifest.initializer_spec import Constant
from ps.manifest.manifest import Add, Manifest, TableSpec
from ps.manifest.rule_spec import RuleConfig
from ps.optim import kernels
from ps.tables import kernels as table_kernels
from tests.support.ps_cluster import make_manifest


@pytest.fixture(scope="session")
def table_kernels_loaded() -> None:
    """Compiling takes longer than the tests' clients wait where the cache is cold."""
    table_kernels.warm_server(["float32", "float64"])
    table_kernels.warm_client(["float32", "float64"])
    kernels.warm([("rows_add", "float32"), ("rows_adagrad", "float32")])


def table(name: str = "user", rule: RuleConfig | None = None, **settings: Any) -> TableSpec:
    """A table of 4 numbers a row that start at 0."""
    given: dict[str, Any] = {"dim": 4, "initializer": Constant(0.0), "segments": 2, **settings}
    return TableSpec(name=name, rule=rule or Add(), **given)


def with_tables(*tables: TableSpec, size: int = 30, **settings: Any) -> Manifest:
    """A dense group beside the tables."""
    modes = ("consistency", "staleness_bound", "staleness_aware", "reduction")
    mode = {name: settings.pop(name) for name in modes if name in settings}
    dense = make_manifest(size, **settings)
    return Manifest(groups=dense.groups, tables=tables, bucket_bytes=dense.bucket_bytes, **mode)


def ones(ids: Any, dim: int = 4, value: float = 1.0) -> np.ndarray[Any, Any]:
    """A gradient for these ids."""
    return np.full((*np.shape(ids), dim), value, np.float32)
