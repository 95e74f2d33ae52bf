"""Callbacks: what a worker's `fit` reports to TensorBoard and to the driver.

Covers: Keras' TensorBoard callback in a directory per worker; which of a user's callbacks only one
worker has, if every worker runs the same code.
Does not: report progress (tfos.keras.fit.progress), write the servers' numbers
(tfos.keras.fit.tensorboard_scalars) or make workers agree (tfos.keras.fit.epoch_agreement does,
unasked).
Threads: the thread that runs `fit`. A failing callback here never stops the training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras

from tfos.keras.data.running_fit import is_lone
from tfos.keras.fit.epoch_report import LoneEpochReporter
from tfos.keras.fit.progress import ProgressReport
from tfos.keras.fit.tensorboard_scalars import ClusterScalars
from tfos.keras.protocols import ShownContext

logger = logging.getLogger(__name__)

_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.TensorBoard,
)


def callbacks(ctx: ShownContext) -> list[Any]:
    """Return a list of the callbacks for this worker's `fit`; users put their own before them.

    Args:
        ctx: the node's context; without `log_dir` there is no TensorBoard.
    """
    found: list[Any] = [ProgressReport(ctx), LoneEpochReporter(ctx)]
    if ctx.log_dir:
        found.append(EventFiles(ctx.log_dir, is_chief=ctx.is_chief))
        if ctx.is_chief:
            found.append(ClusterScalars(ctx))
    return found


def of_rank(given: Any, rank: int) -> Any:
    """Return the user's callbacks that this worker's `fit` gets: only rank 0 writes files.

    All workers have the same path. Two that write one `.keras` file at once leave a broken file.

    Args:
        given: callbacks of `fit`: None, one, several, also nested, or Keras' CallbackList, which
            then loses the others.
        rank: rank of this worker.
    """
    if not given or rank == 0:
        return given
    own = [each for each in listed(given) if not isinstance(each, _WRITING)]
    if not isinstance(given, keras.callbacks.CallbackList):
        return own
    given.callbacks = own
    return given


def listed(given: Any) -> list[Any]:
    """Return callbacks in a new flat list, as Keras' fit takes them.

    Args:
        given: None, one, several, also nested, or Keras' CallbackList.
    """
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    return [] if given is None else list(keras.tree.flatten(given))


class EventFiles(keras.callbacks.TensorBoard):  # type: ignore[misc]  # Keras has no types
    """Keras' TensorBoard callback; if it cannot write, training goes on without it.

    The metrics of a distributed fit are those of all workers together, so only its chief writes
    them; otherwise equal curves would overlap.

    Args:
        log_dir: log directory of this worker.
        is_chief: whether this worker writes what all workers have in common.
    """

    _is_broken = False

    def __init__(self, log_dir: str, *, is_chief: bool) -> None:
        super().__init__(log_dir=log_dir)
        self._is_chief = is_chief

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be written here."""
        model = self.__dict__.get("_model")
        is_distributed = model is not None and not is_lone(model)
        return self._is_broken or (is_distributed and not self._is_chief)


def _tolerant(name: str) -> Callable[..., Any]:
    original = getattr(keras.callbacks.TensorBoard, name)

    @functools.wraps(original)
    def hook(self: EventFiles, *args: Any, **kwargs: Any) -> Any:
        if name == "set_model" and args:
            self._model = args[0]  # as Keras does, which is not called if this is quiet
        if self.is_quiet:
            return None
        try:
            return original(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training never fails because of its display
            self._is_broken = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning("no more event files in %s: %s", self.log_dir, reason)
            return None

    return hook


for _name in vars(keras.callbacks.TensorBoard):
    if _name == "set_model" or _name.startswith("on_"):
        setattr(EventFiles, _name, _tolerant(_name))
