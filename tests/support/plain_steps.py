"""A training loop without a model: one vector on the servers, to which every step adds.

Used inside main_fun, so numpy and ps are imported where they run.
"""

from __future__ import annotations

import time
from typing import Any

PAUSE = 4
"""A step is followed by a pause of so many times its own duration, as if it computed: loops of
servers and workers without one would take the cores from the tests that run beside this one."""
LEAST_PAUSE_S = 0.01


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

    def value(self) -> float:
        """Return what every element is since the last step, or raise if they differ."""
        (value,) = {float(each) for each in self._values}
        return value

    def step(self) -> None:
        """Push the gradient, pull the vector, and pause."""
        from ps.manifest.manifest import Hyper

        begun_s = time.monotonic()
        self._client.push_pull(
            {"trainable": self._gradient},
            {"trainable": self._values},
            hyper=Hyper(learning_rate=1.0),
            rows=1,
        )
        self.count += 1
        time.sleep(max(LEAST_PAUSE_S, PAUSE * (time.monotonic() - begun_s)))
