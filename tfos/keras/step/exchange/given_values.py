"""Values that the program gives to the variables of an attached model.

Covers: which of them the servers' next answer would replace, when they are looked for, the text
that refuses them or warns of them.
Does not: compare (tfos.keras.step.exchange.replica, held_weights), put values on the servers
(tfos.keras.step.exchange.exchange), refuse a model that was compiled again
(tfos.keras.step.trainer).
Threads: the thread that trains.
"""

from __future__ import annotations

import logging

from tfos.errors import UnsupportedModel
from tfos.keras.step.exchange.exchange import ParameterExchange
from tfos.keras.step.exchange.held_weights import HeldWeights
from tfos.keras.step.exchange.program_writes import ProgramWrites
from tfos.keras.step.tables import TableTraining
from tfos.keras.step.variables import MOVING_COPY, Variables

logger = logging.getLogger(__name__)

CHECKED_CALLS = 2
"""Number of training calls that are checked in any case. It covers what happens before each step; a
check reads every variable."""
_LOST = "It does not reach the servers, and the model takes the servers' values"
_LOST_HERE = "It is lost: the model takes the values that its training left"
_KEPT = ". To keep it, call model.set_weights(model.get_weights()) after the change, on the chief"
_WHOLE_MODEL = ". Call set_weights or load_weights of the whole model in the callback, on the chief"


class GivenValues:
    """Finds values that the program, its callbacks included, gave to the model.

    Args:
        variables: the model's variables, in the servers' groups.
        exchange: exchange of their values.
        tables: the model's tables.
        since: call that bound the model to its servers, for messages.
        is_local: whether the servers are in this process, for this model alone.
        is_mixed: whether the servers mix the statistics of several workers as they come.
    """

    def __init__(
        self,
        variables: Variables,
        exchange: ParameterExchange,
        tables: TableTraining,
        *,
        since: str,
        is_local: bool = False,
        is_mixed: bool = False,
    ) -> None:
        self._exchange = exchange
        self._replica = exchange.replica
        self._tables = tables
        self._since = since
        self._is_local = is_local
        self._tells_mixed = is_mixed
        """Whether a mixed statistic is still to be told."""
        self._tells_kept = self._tells_statistic = True
        self._frozen = HeldWeights(variables.frozen)
        self._writes = ProgramWrites([*variables.trained, *variables.held])
        self._checked_calls = 0
        """Number of training calls in this epoch, or after a fit, that compared values first."""

    # -- refused

    def check(self) -> None:
        """Refuse values of single variables: the servers' next answer overwrites them.

        Averages are exempt: callbacks that swap them with the weights round them.

        Raises:
            UnsupportedModel: the text names a variable, and how to reach the servers.
        """
        if path := self._frozen.changed():
            raise UnsupportedModel(
                f"{path!r}, which is not trained, was changed after {self._since}. "
                "The parameter servers, their checkpoints and restarted workers keep the previous "
                "values. Call adapt, load_weights, set_weights or assign before "
                f"{self._since}. {MOVING_COPY}"
            )
        if path := self._changed():
            raise UnsupportedModel(
                f"{path!r} was changed after {self._since}, but only in the model; the next answer "
                "of the parameter servers would overwrite it. load_weights or set_weights of a "
                "layer or of a nested model, assign, a training loop of your own (GradientTape and "
                "optimizer.apply outside of train_step), and training another model that shares "
                f"the layer do not reach the servers. Set weights before {self._since}, or call "
                "set_weights or load_weights of the whole model (with tables, only before the "
                "first step). Move a loop's step into the model's train_step, and call fit. If "
                "another model was trained, rebuild and compile this one: "
                "keras.Model(model.inputs, model.outputs)"
            )

    def check_with_rows(self) -> None:
        """Refuse also rows that are another model's now.

        Raises:
            UnsupportedModel: as for `check`; or the text names an Embedding.
        """
        self._tables.check_rows()  # of a model that shares both, it names the layer
        self.check()

    def check_call(self) -> None:
        """Refuse, before a training call, what `check_with_rows` refuses.

        It checks before the first two calls of an epoch for which the values to compare with exist,
        and after a fit: that is enough to see what is done at each step. Later calls are checked if
        Keras has assigned a variable, and else cost nothing.

        Raises:
            UnsupportedModel: as for `check_with_rows`.
        """
        if self._checked_calls < CHECKED_CALLS or self._writes.were_made:
            self.check_with_rows()
            if self._replica.knows_values:
                self._checked_calls += 1
                self._writes.were_made = False

    def check_next_calls(self) -> None:
        """Check the next training calls in any case: an epoch begins, or a fit has ended."""
        self._checked_calls = 0

    def accept(self) -> None:
        """Allow the variables to have the program's values until the servers' next answer.

        Raises:
            UnsupportedModel: weights that are not trained have changed.
        """
        self._replica.forget_values()
        self.check()

    # -- told

    def tell_mixed(self) -> None:
        """Warn once of a statistic set since the last pull, if other workers' are mixed in."""
        if (
            self._tells_mixed
            and self._exchange.has_pulled
            and (path := self._replica.set_statistic())
        ):
            self._tells_mixed = False
            logger.warning(
                "%r, which is not trained, was changed between two steps. The servers keep a "
                "running mean of what the workers have in such weights, so this value is mixed "
                "with the previous ones and may never be reached. For a value that callbacks set "
                "on every worker (an annealed weight of a loss), use a tf.Variable, which stays "
                'in its process, or consistency="sync"',
                path,
            )

    def tell_statistic(self) -> None:
        """Warn once of a statistic that the program has set: a pull is about to replace it."""
        if self._tells_statistic and (path := self._replica.set_statistic()):
            self._tells_statistic = False
            logger.warning(
                "%r, which is not trained, was changed outside of a step, as a call of the model "
                "with training=True changes the statistics of BatchNormalization. %s%s",
                path,
                _LOST_HERE if self._is_local else _LOST,
                "" if self._exchange.has_trained_rows else _KEPT,
            )

    def tell_changed(self) -> None:
        """Warn of values that callbacks gave to single variables: the pull after fit replaces them.

        An error would fail a training whose values the servers have.
        """
        self.tell_statistic()
        if path := self._changed():
            logger.warning(
                "%r has other values at the end of fit than on the parameter servers, because a "
                "callback has changed a single layer or variable. They do not reach the servers, "
                "and the model takes the servers' values%s",
                path,
                "" if self._exchange.has_trained_rows else _WHOLE_MODEL,
            )

    def tell_lost(self) -> None:
        """Warn of values given after an aborted training: the pull that follows replaces them."""
        if path := self._changed():
            logger.warning(
                "the previous training was aborted, so the model takes the servers' values; "
                "the values that %r had here are lost. Call set_weights or load_weights of "
                "the whole model now to put values on the servers",
                path,
            )

    def tell_kept(self, name: str, num_updates: int) -> None:
        """Warn once that the program's first values change nothing.

        Args:
            name: name of the method that has given the model its values.
            num_updates: number of updates that the servers had before.
        """
        if self._tells_kept:
            self._tells_kept = False
            logger.warning(
                "%s before the first step here changes nothing: the servers' parameters were "
                "already trained (%d updates, made before the chief was restarted or in the "
                "checkpoint that the run resumes), and training goes on with them. To train from "
                "the values of %s, begin a run with checkpoints in an empty directory",
                name,
                num_updates,
                name,
            )

    def _changed(self) -> str:
        """Return the path of a trained variable changed since its values came; empty: none."""
        return "" if self._exchange.keeps_averages else self._replica.changed_here()
