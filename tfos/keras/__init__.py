"""The Keras binding: models that compute here and keep their parameters on the servers.

Covers: `distribute` (ctx.distribute), `dataset` (ctx.dataset), `callbacks`, `export`, `Embedding`.
Does not: sharding, update rules, transport (ps), rows (feeding), processes (tfos.node).
Importing this package loads neither Keras nor TensorFlow: its public names load on first use, and
its modules import TensorFlow in the functions that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rpc.lazy import lazy_names
from tfos.console import missing_packages

if TYPE_CHECKING:
    from tfos.keras.data.feed_dataset import FeedDataset
    from tfos.keras.data.file_dataset import FileDataset
    from tfos.keras.embedding.keras_rows import rows_of
    from tfos.keras.embedding.layer import Embedding
    from tfos.keras.export import load_model

__all__ = [
    "Embedding",
    "FeedDataset",
    "FileDataset",
    "load_model",
    "rows_of",
]

_HOMES = {
    "Embedding": "tfos.keras.embedding.layer",
    "FeedDataset": "tfos.keras.data.feed_dataset",
    "FileDataset": "tfos.keras.data.file_dataset",
    "load_model": "tfos.keras.export",
    "rows_of": "tfos.keras.embedding.keras_rows",
}

_load, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> object:
    try:
        if name in ("Embedding", "load_model"):  # models with tables, whose `fit` begins there
            importlib.import_module("tfos.keras.fit.local")
        return _load(name)
    except ModuleNotFoundError as error:
        error.msg += missing_packages.extra_advice(f"ModuleNotFoundError: {error}")
        raise
