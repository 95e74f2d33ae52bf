"""Closing lines of scripts/test: why tests were skipped, what failed, and counts over all groups.

Reads the JUnit files that each group's pytest left in a directory; a group that is named as failed
but left no file (it was killed, or failed before collecting) counts as one failure. Exit status 1
when anything failed.
"""

from __future__ import annotations

import argparse
import collections
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Counts:
    """What one or more groups ended in."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)

    def add_file(self, path: Path) -> None:
        """Add the results of one JUnit file; a test with a failure and an error counts once."""
        for case in ET.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(f"{path.stem}: {name}")
            elif skip is not None:
                self.skipped[skip.get("message", "") or "no reason given"] += 1
            else:
                self.passed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("failed_groups", nargs="*")
    args = parser.parse_args()
    counts = Counts()
    for path in sorted(args.directory.glob("*.xml")):
        counts.add_file(path)
    blamed = {name.split(":", 1)[0] for name in counts.failed}
    counts.failed += [
        f"{group}: ended badly" for group in args.failed_groups if group not in blamed
    ]
    for reason, count in counts.skipped.most_common():
        print(f"skipped {count}: {reason}")
    for name in counts.failed:
        print(f"FAILED {name}")
    num_skipped = sum(counts.skipped.values())
    print(f"{counts.passed} passed, {len(counts.failed)} failed, {num_skipped} skipped")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
