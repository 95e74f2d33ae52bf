"""Draws docs/images/collect.svg from what `scripts/bench collect_fit` has printed.

Usage: scripts/bench collect_fit > lines; python -m scripts.collect_plot < lines
Needs matplotlib, which no part of tfos installs: pip install matplotlib
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "collect.svg"
LABELS = {"COLLECT": "seconds of a fit", "COLLECTm": "MiB of the driver"}
OURS, THEIRS = "KerasEstimator, 1 ps + 2 workers", "toPandas() and fit"


def series(lines: Iterable[str], figure: str) -> dict[str, list[tuple[int, float]]]:
    """Return (rows, median) of both sides of a figure; a reference that failed has no point.

    Args:
        lines: JSON, as printed.
        figure: its id.
    """
    found: dict[str, list[tuple[int, float]]] = {OURS: [], THEIRS: []}
    for line in lines:
        record: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if record.get("id") != figure:
            continue
        found[OURS].append((record["rows"], record["ours"]["median"]))
        if "reference_error" not in record:
            found[THEIRS].append((record["rows"], record["reference"]["median"]))
    return found


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "collect"  # the same lines give the same file
    lines = sys.stdin.read().splitlines()
    picture, places = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for place, (figure, label) in zip(places, LABELS.items(), strict=True):
        for name, points in series(lines, figure).items():
            place.plot(*zip(*points, strict=True), "o-", label=name)
        place.set(xscale="log", xlabel="rows", ylabel=label, ylim=(0, None))
        place.grid(alpha=0.3)
    places[0].legend(frameon=False)
    picture.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
