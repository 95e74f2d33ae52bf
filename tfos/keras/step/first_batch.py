"""First batch: workers with an unbuilt model agree on the batch that all build it from.

Covers: the rendezvous, and when in an epoch this worker comes to it; without other workers, which
rows of `evaluate` and `predict` can be inspected without taking them from their loop.
Does not: build the model (tfos.keras.data.tensors), attach it (tfos.keras.step.trainer).
Threads: the thread that runs the model's `fit`.

Every unbuilt worker comes here once an epoch until any worker has a batch: with its first batch,
or without one at the end of an epoch that had none. So all build and attach at the same point, and
the chief can seed even if it has no rows.

The rendezvous are numbered, inside and outside of `fit` alike: a restarted worker passes those that
are over, takes the batch of one that had any, or meets the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.trainers.data_adapters import get_data_adapter

from tfos.keras.data import tensors
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.step.other_workers import OtherWorkers


class FirstBatch:
    """The agreement of one model's workers.

    Args:
        workers: the other workers.
    """

    def __init__(self, workers: OtherWorkers) -> None:
        self._workers = workers
        self._process = uuid.uuid4().bytes
        self._num_asked = 0
        self._was_empty = False

    def begin_epoch(self) -> None:
        """Forget that this worker came without a batch in the epoch before."""
        self._was_empty = False

    def agree(self, own: bytes) -> bytes | None:
        """Return the description of the lowest rank's batch; None: no worker has one.

        Answers without a batch and without this process's value come from a rendezvous that was
        over before this worker restarted: the others meet it at a later one.

        Args:
            own: description of this worker's first batch, see tensors.describe.
        """
        value = self._process + own
        while True:
            self._num_asked += 1
            answers = self._workers.rendezvous(f"build/{self._num_asked}", value)
            batches = (answers[rank][len(self._process) :] for rank in sorted(answers))
            found = next(filter(None, batches), None)
            if found is not None or value in answers.values():
                return found

    def agree_without(self) -> bytes | None:
        """Come at the end of an epoch without a batch, once; return like `agree`."""
        if self._was_empty:
            return None
        self._was_empty = True
        return self.agree(b"")


def first_rows(x: Any) -> Any:
    """Return a batch of nested tensors, or its like; None: it is unknown, or lost to the loop.

    Args:
        x: data of `evaluate`, `predict`, `test_on_batch` or `predict_on_batch`; None: another call.
    """
    if isinstance(x, BatchDataset):
        return x.next_tensors()
    import tensorflow as tf

    if x is None or isinstance(x, Iterator):  # it allows one pass only
        return None
    if isinstance(x, tf.data.Dataset):  # so may this
        return tensors.zeros_of(x.element_spec)
    if isinstance(x, keras.utils.PyDataset):  # its adapter would start workers
        return tensors.to_tensors(x[0])
    try:
        return next(iter(get_data_adapter(x=x).get_tf_dataset()), None)
    except ValueError:  # Keras does not take it as rows
        return None
