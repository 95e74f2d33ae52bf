"""Training without a cluster: a model with tables, whose parameter server is in this process.

Covers: that server, when a model gets one, its worker's context; Keras' own `fit` and train
function, which give an undistributed model with tables its server. `tfos.keras` imports this module
with the layer, which is not notified of a training: Keras calls only the model.
Does not: train (tfos.keras.fit.distribute, in mode sync with one worker).
Threads: the server's own; it ends with the model and the layers that look rows up there.

So a notebook computes the same numbers as a cluster of one worker. Everything but the transport is
what a cluster runs.
"""

from __future__ import annotations

import functools
import logging
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from ps.checkpoint.storage import OpenStorage, storage_at
from tfos.keras.embedding.layer import embeddings_in, has_tables
from tfos.keras.fit.distribute import distribute

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class _NoReports:
    """Reports of epochs, progress and fed rows when there is no driver, so that nobody asks."""

    so_far = (0.0, 0.0)
    best_metric = None

    def ended(self, *_: Any, **__: Any) -> None:
        """Ignore a report."""

    begin = note = follow = trained = fit_stopped = report = ended


class LocalServer:
    """A parameter server in this process, and its only client.

    Args:
        open_storage: function that opens a checkpoint directory.

    Attributes:
        client: client of the server.
        close: ends both, and so the tables; so does the end of this object. Idempotent.
    """

    def __init__(self, open_storage: OpenStorage = storage_at) -> None:
        from ps.client.client import PSClient
        from ps.config import ServerSettings
        from ps.server.server import PSServer
        from rpc.auth.handshake import Credentials, Identity, Role

        credentials = Credentials.generate()
        settings = ServerSettings(rank=0, num_servers=1, num_workers=1)
        server = PSServer(settings, credentials, open_storage=open_storage)
        server.bind_inproc(f"local-{uuid.uuid4().hex}")
        server.start()
        self.client = PSClient(
            [server.endpoint],
            credentials,
            Identity(Role.WORKER, 0),
            num_workers=1,
            open_storage=open_storage,
        )
        self.close = weakref.finalize(self, _close, self.client, server)


def _close(client: Any, server: Any) -> None:
    client.close()
    server.close(CLOSE_TIMEOUT_S)


class LocalContext:
    """The part of `ctx` that a training uses, for one worker and one server in this process."""

    num_workers = 1
    worker_rank = 0
    is_chief = True
    is_local = True
    stop_asked = False
    fit_place = None
    resumes_epochs = False
    resumes_rate = False

    def __init__(self) -> None:
        self.epochs = self.trained_feeds = self.seen_progress = _NoReports()
        self._server = LocalServer()

    def ps_client(self) -> Any:
        """Return the only client."""
        return self._server.client

    def save_now(self) -> str | None:
        """Save nothing; see NodeContext.save_now."""

    def report_numbers(self, numbers: Mapping[str, float | None]) -> None:
        """Ignore the report. Arguments as for NodeContext.report_numbers."""

    def close(self) -> None:
        """End the server, and with it the tables. Idempotent."""
        self._server.close()


def train_here(model: Any) -> None:
    """Put a compiled model's parameters on a server in this process; `fit` then trains there.

    `fit` and `train_on_batch` call it for a model with Embeddings that is not distributed.

    Args:
        model: the compiled, undistributed model.

    Raises:
        UnsupportedModel, UnsupportedOptimizer: a cluster would refuse the model.
    """
    context = LocalContext()
    sources = [(layer, layer.source) for layer in embeddings_in(model)]
    try:
        distribute(model, context, consistency="sync")
    except BaseException:
        context.close()
        for layer, source in sources:
            layer.bind(source)
        raise
    logger.info(
        "the tables of %s live in this process; ctx.distribute(model) puts them on servers",
        model.name,
    )


def _is_untrained(model: Any) -> bool:
    return "_tfos_trainer" not in vars(model) and has_tables(model)


def _fit_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' fit, which first gives the tables of an undistributed model a server."""

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and _is_untrained(self) and type(self).fit is fit:  # no fit of its own
            train_here(self)
            return self.fit(*args, **kwargs)  # like each later call: it checks callbacks
        return original(self, *args, **kwargs)

    return fit


def _training_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' make_train_function, which does so for all other calls that train."""

    @functools.wraps(original)
    def make_train_function(self: Any, force: bool = False) -> Any:
        if _is_untrained(self):
            train_here(self)
            return self.make_train_function(force)
        return original(self, force)

    return make_train_function


keras.Model.fit = _fit_here(keras.Model.fit)
keras.Model.make_train_function = _training_here(keras.Model.make_train_function)
