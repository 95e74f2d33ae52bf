"""Evaluator: what `evaluator:0` alone may do in main_fun, and what it may not.

Covers: refusing calls that belong to nodes that train; the evaluation of checkpoints.
Does not: evaluate (tfos.keras.fit.checkpoint_evaluation).
Threads: main_fun's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfos.config import Checkpoints
from tfos.errors import NoServersError, PhaseError, SettingsError
from tfos.files.checkpoint_storage import Storages
from tfos.topology import PlannedNode

if TYPE_CHECKING:
    from tfos.worker.context import NodeContext


def check_trains(node: PlannedNode, what: str) -> None:
    """Refuse on the evaluator what only nodes that train have.

    Args:
        node: this one.
        what: what those nodes have, such as "parameter servers".

    Raises:
        NoServersError: this node is the evaluator.
    """
    if node.is_evaluator:
        raise NoServersError(
            f"{node.name} has no {what}: it does not train, it reads checkpoints of the "
            "training. Call ctx.evaluate_checkpoints(model, x, y) there, and train where "
            'ctx.job_name != "evaluator"'
        )


def evaluate_checkpoints(  # noqa: PLR0913 - of one call of NodeContext
    ctx: NodeContext,
    model: Any,
    arguments: dict[str, Any],
    *,
    node: PlannedNode,
    directory: str | None,
    plan: Checkpoints | None,
    storages: Storages,
    poll_s: float,
) -> dict[int, dict[str, float]]:
    """Evaluate the cluster's checkpoints while it trains; see NodeContext.evaluate_checkpoints.

    Args:
        ctx: context of this node.
        model: the compiled and built model.
        arguments: arguments of `model.evaluate`.
        node: this one.
        directory: directory of the checkpoints; None: that of `plan`.
        plan: settings by which the cluster saves; None: it does not.
        storages: storages that open the directory.
        poll_s: seconds between two looks at it.

    Raises:
        PhaseError: this node trains.
        SettingsError: there is no directory.
    """
    if not node.is_evaluator:
        raise PhaseError(
            f"{node.name} trains, and evaluate_checkpoints() waits until the training is over. "
            'Call it if ctx.job_name == "evaluator", with reserve(eval_node=True)'
        )
    place = directory or (plan.directory if plan else None)
    if place is None:
        raise SettingsError(
            f"{node.name}: evaluate_checkpoints() needs a directory of checkpoints. Pass "
            "config=ClusterConfig(checkpoints=Checkpoints(directory)) to reserve(), which also "
            "lets the chief save there"
        )
    from tfos.keras.fit.checkpoint_evaluation import CheckpointEvaluation
    from tfos.keras.fit.saved_parameters import SavedParameters

    saved = SavedParameters(model, ctx.absolute_path(place), storages)
    return CheckpointEvaluation(saved, ctx, arguments, poll_s).run()
