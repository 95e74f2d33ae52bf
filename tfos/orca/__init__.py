"""Orca's names: Estimator.from_keras, whose fit takes DataFrames, files or a function of tf.data.

Covers: BigDL Orca's way of writing a distributed fit.
Does not: train (tfos.estimators), predict (tfos.predict).
Public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from tfos.orca.estimator import Estimator

__all__ = ["Estimator"]

_HOMES = {"Estimator": "tfos.orca.estimator"}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
