"""Connecting to several servers at once.

Covers: one thread per server for the time of connecting, so that a slow one costs the others
nothing.
Does not: decide when to connect again (ps.client.channel), send (ps.client.fan_out).
Threads: its own ones end before it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ps.client.channel import Link
from ps.errors import PSError
from rpc.errors import RpcError


def connect_together(links: Sequence[Link], left_s: float) -> dict[int, RpcError | PSError]:
    """Connect those links that have no connection and may try now; bounded as one attempt is.

    Returns:
        By the server's rank why no attempt will ever succeed. A link that only has to try again
        later is not among them, nor one that is connected now.
    """
    due = [link for link in links if link.is_due()]
    if len(due) < 2:
        return {}  # the caller's own thread can do that
    failures: dict[int, RpcError | PSError] = {}

    def connect(link: Link) -> None:
        try:
            link.open_connection(left_s)
        except (RpcError, PSError) as error:
            failures[link.server] = error

    threads = [
        threading.Thread(target=connect, args=(link,), name=f"ps-connect-{link.server}")
        for link in due
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
