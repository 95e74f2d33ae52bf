"""A training loop without a model: one vector on the servers, to which every step adds.

Used inside main_fun, so numpy and ps are imported where they run.
"""

from __future__ import annotations

from typing import Any


class PlainSteps:
    """One worker's view of the vector; the chief seeds it."""

    def __init__(self, ctx: Any, num_elements: int) -> None:
        import numpy as np

        from ps.manifest.manifest import Add, GroupSpec, Manifest, ParamSpec

        self._client = ctx.ps_client()
        self._gradient = np.ones(num_elements, np.float32)
        self._values = np.zeros(num_elements, np.float32)
        params = (ParamSpec("w", (num_elements,)),)
        group = GroupSpec(name="trainable", dtype="float32", rule=Add(), params=params)
        if ctx.is_chief:
            self._client.seed(Manifest(groups=(group,)), {"trainable": self._values})
        self._client.attach(timeout_s=60)
        self.count = 0

    def step(self) -> None:
        """Push the gradient, pull the vector."""
        from ps.manifest.manifest import Hyper

        self._client.push_pull(
            {"trainable": self._gradient},
            {"trainable": self._values},
            hyper=Hyper(learning_rate=1.0),
            rows=1,
        )
        self.count += 1
