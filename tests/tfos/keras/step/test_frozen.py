"""Frozen weights for all workers, in pieces, without TensorFlow."""

import numpy as np
import pytest

from ps.errors import WorkerLost
from tfos.keras.step import attach


class Variable:
    path = "embedding/embeddings"

    def __init__(self, value):
        self.value = value

    def numpy(self):
        return self.value

    def assign(self, value):
        self.value = value


def other_worker(answer):
    """The rendezvous of a worker beside the chief; `answer` is what it brings of each key."""
    return lambda key, own: {0: answer(key), 1: own}


def test_a_weight_arrives_in_pieces(monkeypatch):
    monkeypatch.setattr(attach, "PIECE_BYTES", 8)
    chiefs = np.arange(15, dtype=np.float32).reshape(3, 5)
    data = chiefs.tobytes()

    def piece(key):
        start = int(key.rpartition("/")[2])
        return data[start : start + 8]

    weights = [Variable(np.zeros((3, 5), np.float32)), Variable(np.zeros((0, 2), np.float32))]
    attach.share(other_worker(piece), weights, seeds=False)
    np.testing.assert_array_equal(weights[0].value, chiefs)


def test_a_chief_that_is_gone_is_an_error_and_not_the_end_of_the_data():
    weight = Variable(np.ones(3, np.float32))
    with pytest.raises(WorkerLost, match="'embedding/embeddings'; start the training again"):
        attach.share(other_worker(lambda _: b""), [weight], seeds=False)
