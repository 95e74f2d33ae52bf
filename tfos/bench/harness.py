"""How a benchmark measures and reports: interleaved repeats, medians, one JSON line per figure.

Covers: figures, repeats, what every benchmark is given (`Bench`).
Does not: print (tfos.cli.main does), start servers (tfos.bench.servers).

The ratio is always ours divided by the reference, both measured in the same run on one machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tfos
from rpc.auth.handshake import Credentials
from rpc.endpoint import Endpoint

PACKAGES = ("numpy", "numba", "msgspec", "grpcio", "pyspark", "tensorflow-cpu", "keras")
GIT_TIMEOUT_S = 5.0
Measure = Callable[[], float]
Line = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """What one line reports: its id, its name, its unit and which direction is better."""

    id: str
    name: str
    unit: str
    better: str
    """`higher` or `lower`; empty: the figure only explains."""


@dataclass(frozen=True)
class GivenServers:
    """Servers that the user has started, EMPTY, instead of those a benchmark starts itself."""

    endpoints: tuple[Endpoint, ...]
    credentials: Credentials


@dataclass
class Bench:
    """One run of one benchmark: how much of it, with which servers, and what came out."""

    command: str
    toy: bool = False
    """Only show that it still works."""
    given_repeats: int | None = None
    given_servers: GivenServers | None = None
    on_line: Callable[[Line], None] = lambda _: None
    """Called with each figure as soon as it is there."""
    lines: list[Line] = field(default_factory=list)

    def repeats(self, default: int) -> int:
        """Return how often to measure."""
        return 1 if self.toy else self.given_repeats or default

    def report(
        self,
        figure: Figure,
        ours: Sequence[float],
        reference: Sequence[float] = (),
        reference_name: str = "",
        **more: object,
    ) -> None:
        """Take one figure; `more` goes into its line unchanged.

        Args:
            figure: its id, name and unit.
            ours: one number per repeat.
            reference: one number per repeat; empty: none.
            reference_name: what the reference is.
            **more: further fields of the line.
        """
        ratio = statistics.median(ours) / statistics.median(reference) if reference else None
        line = {
            "id": figure.id,
            "name": figure.name,
            "unit": figure.unit,
            "better": figure.better,
            "ours": _spread(ours),
            "reference": {"name": reference_name, **_spread(reference)} if reference else None,
            "ratio": None if ratio is None else round(ratio, 3),
            "repeats": len(ours),
            **more,
            "command": self.command,
            "versions": _versions(),
        }
        self.lines.append(line)
        self.on_line(line)


def interleave(repeats: int, *measures: Measure) -> list[list[float]]:
    """Run the measures in turn, `repeats` times, so that a slow minute of the machine hits all.

    Args:
        repeats: runs of each measure.
        measures: each returns one number.
    """
    results: list[list[float]] = [[] for _ in measures]
    for _ in range(repeats):
        for values, measure in zip(results, measures, strict=True):
            values.append(measure())
    return results


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds `work` took."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": _short(statistics.median(values)),
        "min": _short(min(values)),
        "max": _short(max(values)),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _versions() -> dict[str, str]:
    found = {
        "tfos": tfos.__version__,
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return {**found, "commit": commit} if commit else found


def _commit() -> str:
    """Return the commit of a checkout; an installed package has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=root,
            check=False,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
