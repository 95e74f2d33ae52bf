"""How a benchmark measures and reports: interleaved repeats, medians, one JSON line per figure.

The ratio is always ours divided by the reference, both measured in the same run on one machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "numba", "msgspec", "grpcio", "pyspark", "tensorflow-cpu", "keras")
Measure = Callable[[], float]


@dataclass(frozen=True)
class Figure:
    """What one line reports: its id, its name, its unit and which direction is better."""

    id: str
    name: str
    unit: str
    better: str
    """`higher` or `lower`."""


def parse_arguments(doc: str | None, repeats: int) -> argparse.Namespace:
    """Read the flags that every benchmark has; --toy means one quick repeat."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="only show that it still works")
    parser.add_argument("--repeats", type=int, default=repeats)
    args = parser.parse_args()
    if args.toy:
        args.repeats = 1
    return args


def interleave(repeats: int, *measures: Measure) -> list[list[float]]:
    """Run the measures in turn, `repeats` times, so that a slow minute of the machine hits all."""
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


def report(
    figure: Figure,
    ours: Sequence[float],
    reference: Sequence[float],
    reference_name: str,
    **more: object,
) -> None:
    """Print one figure as one JSON line."""
    line = {
        "id": figure.id,
        "name": figure.name,
        "unit": figure.unit,
        "better": figure.better,
        "ours": _spread(ours),
        "reference": {"name": reference_name, **_spread(reference)} if reference else None,
        "ratio": round(statistics.median(ours) / statistics.median(reference), 3)
        if reference
        else None,
        "repeats": len(ours),
        **more,
        "command": f"scripts/bench {Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip(),
        "versions": _versions(),
    }
    print(json.dumps(line), flush=True)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": _short(statistics.median(values)),
        "min": _short(min(values)),
        "max": _short(max(values)),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cores": str(os.cpu_count())}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    found["commit"] = commit.stdout.strip() or "unknown"
    return found
