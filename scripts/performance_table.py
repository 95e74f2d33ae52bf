"""Take benchmarks' JSON lines from stdin into the table of docs/guides/performance.md.

They replace the rows with the same figure's id; all others stay. Figures without an
entry in BARS only explain and are left out: docs/architecture/performance-notes.md has them.

for name in dense apply small sparse feed_rdd keras_step startup accuracy; do
    scripts/bench $name
done | python scripts/performance_table.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "performance.md"
HEAD = "| id | what | ours | reference | ratio | bar | command |\n|---|---|---|---|---|---|---|\n"
BARS = {
    "P01": "≥ 0.85",
    "P01g": "reported",
    "P02": "≥ 1.5",
    "P03": "≤ 1.1",
    "P04": "≥ 3",
    "P05": "≤ 3",
    "P06": "≥ 0.4",
    "P07": "≥ 1.0",
    "P08": "≥ 0.5",
    "P09": "≥ 0.7",
    "P10": "≥ 1.0",
    "P11": "≥ 0.8",
    "P12": "≥ 0.85",
    "P13": "≥ 0.88",
    "P14": "≥ 1.3 PSS, 0.6 floor, 4 Keras 3, 0.9 tf-keras",
    "P14a": "≥ 5",
    "P14c": "≤ 0.70",
    "P15": "≤ 2 s more",
    "P16": "≤ 1.5 s",
    "P17": "≥ 0.95 async, ≥ 0.90 sync",
    "P18": "≤ 1.03",
    "P19": "≤ 0.02",
    "P20": "≥ 0.7 of the count, 1.2 of the batch UDF, 2 of the pandas_udf",
    "P20c": "≥ 1.5",
    "P21": "≤ 1",
    "P22": "≤ 1.1",
    "P23": "≤ 1.15",
    "P24": "≥ 0.7",
    "P24c": "≤ 1.5",
    "P24n": "≥ 1",
    "P24f": "reported",
    "P24d": "reported",
    "P24r": "reported",
    "P25": "≤ 1.0",
    "P25p99": "≤ 1.0",
    "P26": "≥ 0.7 of sockets, ≥ 1.5 of TF",
    "P27": "≥ 0.9 of the time",
    "P28": "≥ 0.87",
    "P29": "≥ 0.65",
    "ACC": "mean within 0.01",
    "COLLECT": "reported",
    "COLLECTm": "reported",
    "APPLY": "",
    "SIM": "reported",
    "DECODE": "reported",
    "DECODE-arrow": "reported",
}


def cell(side: dict[str, Any] | None, unit: str) -> str:
    """Return `median unit (min to max)`."""
    if side is None:
        return ""
    unit = "" if unit == "1" else f" {unit}"
    text = f"{side['median']:g}{unit} ({side['min']:g} to {side['max']:g})"
    return f"{side['name']}: {text}" if "name" in side else text


def row(figure: dict[str, Any]) -> str:
    """Return one line of the table."""
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    if "more_than_reference_s" in figure:
        ratio = f"+{figure['more_than_reference_s']:.2f} s"
    if "mean_ours" in figure:
        ratio = f"means {figure['mean_ours']:.4f} and {figure['mean_reference']:.4f}"
    cells = [
        figure["id"],
        figure["name"],
        cell(figure["ours"], figure["unit"]),
        cell(figure["reference"], figure["unit"]),
        ratio,
        BARS[figure["id"]],
        f"`{figure['command']}`",
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    figures = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    rows = [row(figure) for figure in figures if figure["id"] in BARS]
    if not rows:
        raise SystemExit("no JSON lines on stdin")
    table = re.compile(r"\| id \|.*\n\|.*\n((?:\|.*\n)+)")
    text, count = table.subn(
        lambda found: HEAD + "".join(merged(found[1].splitlines(keepends=True), rows)),
        PAGE.read_text(),
        count=1,
    )
    if not count:
        raise SystemExit(f"{PAGE} has no table that begins with '| id |'")
    PAGE.write_text(text)


def merged(old: list[str], new: list[str]) -> list[str]:
    """Return the old rows, and the new ones where their figure had rows, or at the end."""
    by_id: dict[str, list[str]] = {}
    for each in new:
        by_id.setdefault(_id_of(each), []).append(each)
    ids = set(by_id)
    found: list[str] = []
    for each in old:
        found += by_id.pop(_id_of(each), [])
        if _id_of(each) not in ids:
            found.append(each)
    return found + [each for left in by_id.values() for each in left]


def _id_of(row_text: str) -> str:
    return row_text.split("|")[1].strip()


if __name__ == "__main__":
    main()
