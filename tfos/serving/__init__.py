"""Serving: rows of tables outside the parameter servers, as files and as an index in memory.

Covers: exports of tables as Parquet (written from checkpoints or running servers), reading them,
`load`: an index on local disk that answers lookups, and the dense model beside it.
Does not: train, or keep optimizer slots (ps.checkpoint).
Importing this package loads neither Keras nor TensorFlow; public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from tfos.serving.checkpoint_export import export_tables
    from tfos.serving.export_reader import read_rows
    from tfos.serving.served_model import ServedModel, load

__all__ = ["ServedModel", "export_tables", "load", "read_rows"]

_HOMES = {
    "ServedModel": "tfos.serving.served_model",
    "export_tables": "tfos.serving.checkpoint_export",
    "load": "tfos.serving.served_model",
    "read_rows": "tfos.serving.export_reader",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
