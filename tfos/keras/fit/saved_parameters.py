"""Parameters of a checkpoint in a plain model: dense values in it, tables on a server here.

Covers: reading the newest whole checkpoint of a training, saved by any number of servers.
Does not: train, write, or tell the training that it reads.
Threads: the one that uses the model; the server has its own and ends with this object.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ps.checkpoint.choice import latest
from ps.checkpoint.storage import OpenStorage
from ps.manifest.manifest import Manifest
from tfos.errors import SettingsError, UnsupportedModel
from tfos.keras.data import tensors
from tfos.keras.fit.distribute import check_model
from tfos.keras.fit.local import LocalServer
from tfos.keras.step import variables
from tfos.keras.step.adapted_layers import check_like, recorded
from tfos.keras.step.attach import adopt_frozen, check_same
from tfos.keras.step.table_specs import learn_id_sources
from tfos.keras.step.tables import ServerRows

FROZEN_TIMEOUT_S = 60.0
"""Seconds to wait for frozen weights, which the server in this process has."""


class SavedParameters:
    """Gives a model the parameters of one checkpoint after another.

    Args:
        model: the model, compiled and built like the workers' model; not distributed.
        directory: path or URL where a cluster saves.
        open_storage: function that opens it.

    Raises:
        NotCompiled, UnsupportedModel, UnsupportedOptimizer: as for ctx.distribute.
        SettingsError: the model is not built.
    """

    def __init__(self, model: Any, directory: str, open_storage: OpenStorage) -> None:
        check_model(model)
        if not tensors.is_built(model):
            raise SettingsError(
                f"the model {model.name!r} is not built, so its parameters are unknown; give it an "
                "Input, or call it once first, model(x[:1])"
            )
        self.model = model
        self.directory = directory
        self._found = variables.collect(model, model.optimizer)
        self._open_storage = open_storage
        self._server: LocalServer | None = None

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint; None: there is none yet.

        Raises:
            OSError: the directory cannot be read.
        """
        return latest(self._open_storage(self.directory), is_told=False)  # `load` logs it once

    def load(self) -> int:
        """Take the newest whole checkpoint; return its step.

        Raises:
            CheckpointError: there is none.
            UnsupportedModel: it belongs to another model; the text says where they differ.
            SettingsError: a layer had learned another vocabulary or other bins.
        """
        self.close()  # tables may take most of the memory: the older ones go first
        server = LocalServer(self._open_storage)
        try:
            step = server.client.restore(self.directory)
            self._adopt(server, f"the checkpoint of step {step} in {self.directory}")
        except BaseException:
            server.close()
            raise
        self._server = server
        return step

    def close(self) -> None:
        """Give up the tables; the model keeps its dense values. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _adopt(self, server: LocalServer, what: str) -> None:
        import tensorflow as tf

        client, saved = server.client, server.client.manifest
        ours = self._like(saved)
        try:
            check_same(ours, saved)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{what} belongs to another model: {error}") from None
        check_like(self.model, recorded(client.metadata()), f"the parameters in {what}")
        received = {
            group.name: np.empty(sum(group.sizes), group.dtype) for group in self._found.groups
        }
        client.pull(received)
        for group in self._found.groups:
            group.assign(tf.constant(received.pop(group.name)))
        if saved.frozen_groups:
            frozen = self._found.frozen
            adopt_frozen(client, self.model, ours, frozen, timeout_s=FROZEN_TIMEOUT_S)
        if self._found.embeddings:
            learn_id_sources(self._found.embeddings, saved.tables)
            rows = ServerRows(client, server)
            for layer in self._found.embeddings:
                layer.bind(rows)

    def _like(self, saved: Manifest) -> Manifest:
        """Return this model's manifest with what only the training decides."""
        packed = [group.compression for group in saved.groups if group.compression != "none"]
        manifest = self._found.manifest(
            self.model.optimizer,
            consistency=saved.consistency,
            reduction=saved.reduction,
            staleness_bound=saved.staleness_bound,
            staleness_aware=saved.staleness_aware,
            compression=packed[0] if packed else "none",
        )
        return msgspec.structs.replace(manifest, bucket_bytes=saved.bucket_bytes)
