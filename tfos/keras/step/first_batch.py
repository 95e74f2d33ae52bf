"""First batch: workers with an unbuilt model agree on the batch that all build it from.

Covers: the rendezvous, at which points of an epoch this worker comes to it.
Does not: build the model (tfos.keras.data.tensors), attach it (tfos.keras.step.trainer).
Threads: the thread that runs the model's `fit`.

Every unbuilt worker comes here once an epoch until anybody has had a batch: with its first batch,
or without one at the end of an epoch that had none. So all build and attach at the same point, and
the chief can seed even if it has no rows.
"""

from __future__ import annotations

from tfos.keras.step.other_workers import OtherWorkers


class FirstBatch:
    """The agreement of one model's workers.

    Args:
        workers: the others.
    """

    def __init__(self, workers: OtherWorkers) -> None:
        self._workers = workers
        self._fit = "apart"
        self._epoch = 0
        self._was_empty = False

    def begin_epoch(self, fit: str, epoch: int) -> None:
        """Forget that this worker came without a batch in the epoch before.

        Args:
            fit: prefix of the rendezvous' keys.
            epoch: number of the epoch, from 0.
        """
        self._fit, self._epoch, self._was_empty = fit, epoch, False

    def agree(self, own: bytes) -> bytes | None:
        """Return the description of the lowest rank's batch; None: no worker has had any.

        A worker that was started again may come to an epoch that the others have ended without a
        batch; they meet it in the next one.

        Args:
            own: description of this worker's first batch, see tensors.describe.
        """
        while True:
            answers = self._workers.rendezvous(f"{self._fit}/{self._epoch}/build", own)
            self._epoch += 1
            found = next((answers[rank] for rank in sorted(answers) if answers[rank]), None)
            if found is not None or not own:
                return found

    def agree_without(self) -> bytes | None:
        """Come at the end of an epoch without a batch, once; returns as `agree`."""
        if self._was_empty:
            return None
        self._was_empty = True
        return self.agree(b"")
