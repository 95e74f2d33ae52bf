"""Closing lines of scripts/test: times, why tests were skipped, what failed, and counts.

Reads what a run left in a directory: the JUnit file of each group, `took.json` (the seconds of
each step) and `failed` (names of steps). A step that is named as failed but left no failed test (it
was killed, or failed before collecting) counts as one failure. Exit status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

SLOWEST = 20


@dataclass
class Counts:
    """What one or more groups ended in, and the seconds of each file's tests."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    file_s: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    file_tests: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def add_file(self, path: Path) -> None:
        """Add the results of one JUnit file; a test with a failure and an error counts once."""
        for case in ET.parse(path).getroot().iter("testcase"):
            module = case.get("classname", "")
            name = f"{module}::{case.get('name', '')}"
            file = path.stem, module.split(".Test")[0]
            self.file_s[file] += float(case.get("time", 0))  # type: ignore[assignment]
            self.file_tests[file] += 1
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(f"{path.stem}: {name}")
            elif skip is not None:
                self.skipped[skip.get("message", "") or "no reason given"] += 1
            else:
                self.passed += 1


def show_times(counts: Counts, took: dict[str, dict[str, float]]) -> None:
    """Print the seconds of each step beside its budget, and the slowest files."""
    print("\nseconds (of processor time), budget:")
    for name, of in took.items():
        budget_s = of["budget_s"]
        above = ", ABOVE ITS BUDGET" if 0 < budget_s < of["seconds"] else ""
        shown = f", {budget_s:.0f}{above}" if budget_s else ""
        print(f"  {name:10} {of['seconds']:5.0f} ({of['processor_s']:.0f}){shown}")
    print("slowest files: seconds, tests, group:")
    for file, seconds in counts.file_s.most_common(SLOWEST):
        group, module = file
        print(f"  {seconds:6.1f} {counts.file_tests[file]:4d}  {group:10} {module}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=int, required=True, help="of the whole run")
    given = parser.parse_args()
    counts = Counts()
    for path in sorted(given.directory.glob("*.xml")):
        counts.add_file(path)
    blamed = {name.split(":", 1)[0] for name in counts.failed}
    failed, took = given.directory / "failed", given.directory / "took.json"
    steps = failed.read_text().split() if failed.exists() else []
    counts.failed += [f"{step}: ended badly" for step in steps if step not in blamed]
    if took.exists():
        show_times(counts, json.loads(took.read_text()))
    print()
    for reason, count in counts.skipped.most_common():
        print(f"skipped {count}: {reason}")
    for name in counts.failed:
        print(f"FAILED {name}")
    print(f"whole run: {given.seconds} s")
    num_skipped = sum(counts.skipped.values())
    print(f"{counts.passed} passed, {len(counts.failed)} failed, {num_skipped} skipped")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
