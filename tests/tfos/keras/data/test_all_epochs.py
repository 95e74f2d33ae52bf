"""`ctx.all_epochs`: more epochs than any feed has, shown as unknown."""

from __future__ import annotations

import pickle
import sys

from tfos.keras.data.epoch_length import AllEpochs


def test_it_is_a_number_that_keras_can_count_to_and_prints_as_unknown():
    epochs = AllEpochs()
    assert isinstance(epochs, int)
    assert next(iter(range(epochs))) == 0
    assert epochs == sys.maxsize
    assert f"Epoch 1/{epochs}" == f"Epoch 1/{epochs!s}" == f"Epoch 1/{epochs!r}" == "Epoch 1/?"


def test_it_travels():
    assert type(pickle.loads(pickle.dumps(AllEpochs()))) is AllEpochs
