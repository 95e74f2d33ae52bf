"""Saves of one run of main_fun: when the chief's saver begins, what it keeps, saves on request.

Covers: beginning with main_fun, or once the workers serve the parameters themselves; the best
checkpoint; an order to save now.
Does not: save (tfos.worker.saver), save micro-batches (tfos.worker.trained.feeds).
Runs in: the worker's process; on workers that do not save it does nothing.
Threads: `save_now` on a short-lived thread per order; the rest from main_fun's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rpc.printable import visible
from tfos.control import messages
from tfos.node.spec import NodeSettings
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.trained.feeds import TrainedFeeds

if TYPE_CHECKING:
    from tfos.worker.context import NodeContext
    from tfos.worker.saver import ChiefSaver

_MAX_SAVED_CHARS = 2000

_logger = logging.getLogger(__name__)


class RunSaves:
    """The saver of the cluster's checkpoints, while main_fun runs.

    Args:
        settings: settings of the cluster.
        trained: record of the micro-batches and epochs that a save contains.
        epochs: reports that decide which checkpoint is the best.
        send: function that sends a report to the driver.
    """

    def __init__(
        self,
        settings: NodeSettings,
        trained: TrainedFeeds,
        epochs: EpochReports,
        send: Callable[[Any], object],
    ) -> None:
        self._settings = settings
        self._trained, self._epochs, self._send = trained, epochs, send
        self._saver: ChiefSaver | None = None

    def begin(self, context: NodeContext) -> None:
        """Resume and save by the user's plan from now on; report to the driver what is trained."""
        self._start(context)
        if context.is_chief and self._settings.feeds:
            run, resumes = self._settings.cluster_id, context.servers.resumes_epochs
            self._trained.begin(self._saver, context.ps_client, run=run, resumes=resumes)
        self._let_save()

    def begin_late(self, context: NodeContext) -> None:
        """Begin at ctx.distribute, where the workers serve the parameters themselves."""
        self._start(context)
        if self._saver is not None and self._settings.feeds:
            self._trained.begin_late(self._saver, context.ps_client)
            if context.servers.resumes_rate and self._saver.restored_step is not None:
                _logger.warning(
                    "this run goes on from step %d with num_ps=0, so it learns too late which "
                    "epochs are already trained: it trains every epoch that is fed. Feed only "
                    "those that are left, or use num_ps >= 1, which skips the others",
                    self._saver.restored_step,
                )
        self._let_save()

    def end(self) -> ChiefSaver | None:
        """Take no more requests; return the saver, which its caller closes."""
        saver, self._saver = self._saver, None
        return saver

    def close(self, saver: ChiefSaver) -> str:
        """Make the last save, and tell the driver if it failed: main_fun has returned.

        Args:
            saver: which `end` has returned.

        Returns:
            Why it failed; empty if it did not.
        """
        error = saver.close()
        if error:
            self._not_saved(saver, error, is_last=True)
        return error

    def save_now(self, order: messages.SaveNow) -> None:
        """Carry out an order to save between two steps, and report the checkpoint's place."""
        saver, path, step = self._saver, "", -1
        if saver is None:
            error = "main_fun is not running on the chief: it has not begun yet, or has returned"
        elif not (error := saver.save_between()):
            path, step = saver.place()
        self._send(messages.SavedNow(order.number, _shown(path), step, _shown(error)))

    def _start(self, context: NodeContext) -> None:
        saver = self._saver = context.servers.saver()
        if saver is None:
            return
        saver.on_unsaved(lambda error: self._not_saved(saver, error, is_last=False))
        saver.hold(self)  # a save now would have the record of epochs of the run that it resumes
        saver.start()
        plan = self._settings.config.checkpoints
        if plan is not None and plan.keep_best is not None:
            from tfos.worker.best_checkpoint import BestKeeper  # imports the client that saves

            self._epochs.keep_best(BestKeeper(plan, saver))

    def _let_save(self) -> None:
        if self._saver is not None:
            self._saver.release(self)

    def _not_saved(self, saver: ChiefSaver, error: str, *, is_last: bool) -> None:
        plan = self._settings.config.checkpoints
        directory = plan.directory if plan is not None else ""
        told = messages.NotSaved(_shown(directory), _shown(error), saver.saved_step, is_last)
        self._send(told)


def _shown(text: str) -> str:
    return visible(text, keep="")[:_MAX_SAVED_CHARS]
