"""The flags and printed lines of the programs here; `tfos/bench/harness.py` measures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfos.bench.harness import Bench, Figure, interleave, timed

__all__ = ["ROOT", "Figure", "interleave", "parse_arguments", "report", "timed"]

ROOT = Path(__file__).parents[2]


def parse_arguments(
    doc: str | None, repeats: int, more: Mapping[str, Mapping[str, Any]] | None = None
) -> argparse.Namespace:
    """Read the flags that every benchmark has; --toy means one quick repeat.

    Args:
        doc: what --help shows.
        repeats: how many without --repeats.
        more: further flags of this benchmark, such as `--yarn`, each with what argparse is told.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="only show that it still works")
    parser.add_argument("--repeats", type=int, default=repeats)
    for name, settings in (more or {}).items():
        parser.add_argument(name, **settings)
    args = parser.parse_args()
    if args.toy:
        args.repeats = 1
    return args


def report(
    figure: Figure,
    ours: Sequence[float],
    reference: Sequence[float] = (),
    reference_name: str = "",
    **more: object,
) -> None:
    """Print one figure as one JSON line."""
    command = f"scripts/bench {Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip()
    bench = Bench(command)
    bench.report(figure, ours, reference, reference_name, **more)
    print(json.dumps(bench.lines[0]), flush=True)
