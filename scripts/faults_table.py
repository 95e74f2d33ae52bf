"""Fill the last column of docs/faults.md with the tests that carry each row's id.

Run it after adding or moving a test with a `fault` or `attack` marker.
`tests/architecture/test_docs.py` fails while the table and the tests differ. A new id needs a row
first: this script invents no promises.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "faults.md"
MARK = re.compile(r"mark\.(?:fault|attack)\(\s*((?:\"[FA]\d\d\"(?:,\s*)?)+)\)")
ROW = re.compile(r"^(\| ([FA]\d\d) \|.*\|) [^|]* \|$", re.MULTILINE)
NO_TEST = "none yet"


def marked_tests() -> dict[str, list[str]]:
    """Return the test files of each id, sorted."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for ids in MARK.findall(path.read_text()):
            for name in re.findall(r"[FA]\d\d", ids):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return {name: sorted(paths) for name, paths in found.items()}


def filled(text: str, tests: dict[str, list[str]]) -> str:
    """Return the document with its last column as the tests say."""

    def row(match: re.Match[str]) -> str:
        paths = ", ".join(f"`{path}`" for path in tests.get(match[2], [])) or NO_TEST
        return f"{match[1]} {paths} |"

    return ROW.sub(row, text)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    tests = marked_tests()
    text = TABLE.read_text()
    rows = {match[2] for match in ROW.finditer(text)}
    if missing := sorted(set(tests) - rows):
        raise SystemExit(f"tests carry ids without a row in {TABLE.name}: {missing}; add the rows")
    TABLE.write_text(filled(text, tests))


if __name__ == "__main__":
    main()
