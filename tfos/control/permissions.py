"""Permissions: which node may report which event, and in whose name. Pure.

Covers: roles per event, the node that a failure record names, control characters in its text.
Does not: know who the sender is (its certificate proves it, see control.server).
"""

from __future__ import annotations

import msgspec

from rpc.printable import visible
from tfos.control import messages
from tfos.errors import ControlRefused
from tfos.failure import NodeFailure, NodeId
from tfos.topology import PlannedNode

_OF_CHIEF = (
    messages.TensorBoardUp,
    messages.BatchReport,
    messages.FitReading,
    messages.EpochTrained,
    messages.BestSaved,
    messages.SavedNow,
    messages.NotSaved,
    messages.StrategyBuilt,
)
_OF_WORKERS = (messages.FlushReached, messages.ServesShard, messages.InCollective)
_OF_SERVERS = (messages.Restarted, messages.UpdatesLost)
_OF_MAIN_FUN = (messages.CutShort,)
_OF_EVALUATOR = (messages.Evaluated,)
_LINES = "\t\n"
"""Control characters that a traceback needs."""


def admitted(planned: PlannedNode, sender: NodeId, event: messages.Event) -> messages.Event:
    """Return an event as the driver may use it.

    Args:
        planned: the node that the sender's certificate names.
        sender: its newest attempt.
        event: the event as received; a failure record is returned without terminal escapes.

    Raises:
        ControlRefused: this node may not report this event, or a failure of another node.
    """
    reason = _refusal(planned, event)
    if reason:
        raise ControlRefused(f"{sender.name} may not report {type(event).__name__}; {reason}")
    if isinstance(event, messages.Done):
        return msgspec.structs.replace(event, no_result=visible(event.no_result))
    if isinstance(event, messages.Evaluated):
        metrics = {visible(name): value for name, value in event.metrics.items()}
        return msgspec.structs.replace(event, metrics=metrics)
    if not isinstance(event, messages.Failed | messages.Restarted):
        return event
    failed = event.failure.node
    if failed != sender:
        raise ControlRefused(
            f"{_text(sender)} reported a failure of {_text(failed)}; a node reports its own"
        )
    return msgspec.structs.replace(event, failure=_without_escapes(event.failure))


def _refusal(planned: PlannedNode, event: messages.Event) -> str:
    if isinstance(event, _OF_CHIEF) and not planned.is_chief:
        return "only the chief may"
    if isinstance(event, _OF_SERVERS) and not planned.is_ps:
        return "only parameter servers may"
    if isinstance(event, _OF_EVALUATOR) and not planned.is_evaluator:
        return "only the evaluator may"
    if isinstance(event, _OF_MAIN_FUN) and not planned.runs_main_fun:
        return "only nodes that run main_fun may"
    if isinstance(event, _OF_WORKERS) and (not planned.runs_main_fun or planned.is_evaluator):
        return "only workers may"
    return ""


def _text(node: NodeId) -> str:
    return f"{visible(node.name)} attempt {node.attempt}"


def _without_escapes(failure: NodeFailure) -> NodeFailure:
    return msgspec.structs.replace(
        failure,
        host=visible(failure.host),
        executor_id=visible(failure.executor_id),
        phase=visible(failure.phase),
        error_type=visible(failure.error_type),
        message=visible(failure.message, keep=_LINES),
        traceback=visible(failure.traceback, keep=_LINES),
        log_tail=tuple(map(visible, failure.log_tail)),
        log_path=visible(failure.log_path),
    )
