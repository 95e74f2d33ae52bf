"""The groups of tests that scripts/test runs, each in a process of its own.

Covers: the paths, the marks and the time of each group, and which group a test belongs to.
Does not: run them (scripts.test_runner).

A JVM or TensorFlow that one group starts must not be what another group's tests run on. Folders
decide what a group imports, marks decide within them. Tests of Spark are two groups by the kind of
Spark that they run on, so that each kind starts once; as one they took longer than all others.
tests/conftest.py refuses a test that no group or two groups select.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from _pytest.mark.expression import Expression

LATER = "idle or long"
_ROOMS = ("tests/rpc", "tests/ps", "tests/feeding", "tests/tfos")
_PROCESSES = ("tests/ps/cli", "tests/ps/consistency", "tests/ps/server", "tests/tfos/node")
_SYSTEMS = "tests/system"


@dataclass(frozen=True)
class Group:
    """One pytest process: folders and files that it collects, what it selects, what it may take.

    `budget_s` is for two cores that run two other groups beside it, and one beside the unit group;
    a group that takes longer is shown.
    """

    name: str
    paths: tuple[str, ...]
    marks: str
    budget_s: int

    def selects(self, path: str, marks: Collection[str]) -> bool:
        """Say whether it runs a test of this file, relative to the checkout, with these marks."""
        if not any(path == each or path.startswith(f"{each}/") for each in self.paths):
            return False
        return _expression(self.marks).evaluate(lambda name, /, **_: name in marks)


@functools.cache
def _expression(marks: str) -> Expression:
    return Expression.compile(marks)


UNIT = Group(
    "unit",
    (*_ROOMS, "tests/contracts", "tests/architecture"),
    f"not (socket or process or slow or hdfs or {LATER})",
    budget_s=250,
)
GROUPS = (
    UNIT,
    Group("keras", (f"{_SYSTEMS}/keras",), f"not ({LATER})", budget_s=750),
    Group(
        "sockets",
        (*_ROOMS, "tests/contracts", "tests/architecture"),
        f"(socket or slow) and not (process or hdfs or {LATER})",
        budget_s=720,
    ),
    Group(
        "executors",
        (f"{_SYSTEMS}/spark",),
        f"executors and not (process or hdfs or {LATER})",
        budget_s=470,
    ),
    Group(
        "spark",
        (f"{_SYSTEMS}/spark",),
        f"not (executors or process or hdfs or {LATER})",
        budget_s=390,
    ),
    Group(
        "programs",
        (f"{_SYSTEMS}/spark", f"{_SYSTEMS}/examples"),
        f"spark and process and not (hdfs or {LATER})",
        budget_s=350,
    ),
    Group(
        "hdfs",
        ("tests/contracts", f"{_SYSTEMS}/hdfs", f"{_SYSTEMS}/spark", f"{_SYSTEMS}/yarn"),
        f"hdfs and not ({LATER})",
        budget_s=270,
    ),
    Group(
        "processes",
        (*_PROCESSES, f"{_SYSTEMS}/examples", f"{_SYSTEMS}/soak"),
        f"process and not (spark or hdfs or {LATER})",
        budget_s=250,
    ),
    Group("bench", (f"{_SYSTEMS}/bench",), f"not ({LATER})", budget_s=160),
)
"""The fastest to fail first, then the longest first."""
IDLE = Group("idle", ("tests/ps/test_simulation.py",), "idle and not long", budget_s=300)
"""Runs at the lowest priority beside all others. To collect whole folders would cost it as much
processor time as its tests."""
LONG = Group("long", ("tests",), "long", budget_s=4800)
"""Run by scripts/test --long alone."""


def names_for(path: str, marks: Collection[str]) -> list[str]:
    """Return the groups that run a test; a sound test has exactly one."""
    return [group.name for group in (*GROUPS, IDLE, LONG) if group.selects(path, marks)]
