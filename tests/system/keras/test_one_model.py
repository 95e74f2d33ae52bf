"""A cluster trains one model: the servers know parameters by their names alone."""

import gc

import keras
import pytest

from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials
from tests.tfos.worker.test_context import CHIEF, make_context
from tfos.control.messages import RosterEntry
from tfos.errors import NotCompiled, UnsupportedModel
from tfos.failure import NodeId

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]


@pytest.mark.parametrize("collected", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_second_model_is_refused_which_would_begin_with_the_first_ones_weights(collected):
    """As in a k-fold loop, whose models have equal names after clear_session()."""

    def make_model():
        keras.utils.clear_session()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    credentials = Credentials("c", b"S" * 32)
    server = PSServer(ServerSettings(rank=0, num_servers=1, num_workers=1), credentials)
    server.bind_tcp("127.0.0.1")
    server.start()
    roster = [RosterEntry(NodeId("ps", 0), 0, "h", server.endpoint)]
    with server:
        ctx = make_context(roster, node=CHIEF, num_ps=1, num_workers=1)
        with pytest.raises(NotCompiled):
            ctx.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model = ctx.distribute(make_model())
        with pytest.raises(UnsupportedModel, match="is already distributed"):
            ctx.distribute(model)
        if collected:
            del model
            gc.collect()
        with pytest.raises(UnsupportedModel, match=r"one model.*'sequential'.*tfos\.map_train"):
            ctx.distribute(make_model())
        ctx.ps_client().close()
