"""Server orders: what a server that starts later has to hear about the workers.

Covers: which orders are kept, and when one is out of date.
Does not: give them (tfos.control.state, tfos.node.supervisor.restart_policy).
Runs in: the driver, for servers on another executor; supervisors, for their children.      Pure.
"""

from __future__ import annotations

from tfos.control.messages import FenceWorker, Order, WorkerDone, WorkerJoined


def kept_for_servers(kept: list[Order], order: Order) -> list[Order]:
    """Return the orders that a server which starts later needs, in order.

    Args:
        kept: those before.
        order: the next one, of any kind.
    """
    if isinstance(order, WorkerJoined):
        return [
            each for each in kept if not isinstance(each, FenceWorker) or each.rank != order.rank
        ]
    if isinstance(order, FenceWorker | WorkerDone):
        return [*kept, order]
    return kept
