"""Run the cells one after the other and print a table; see scripts/smoke_versions.

A cell's environment is deleted before the next one is made. A failed cell is reported at once, and
the others still run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from scripts.smoke import checks, table
from scripts.smoke.cells import Cell, named
from scripts.smoke.environment import Environment, NoInterpreter, SmokeFailed


def run_cell(cell: Cell, wheel: Path) -> table.Row:
    """Make the environment, run the checks in it, and return what the table says of them."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"tfos-smoke-{cell.name}-") as directory:
        environment = Environment.made(cell, wheel, Path(directory))
        versions = checks.versions(environment)
        installed = time.monotonic()
        print(f"{cell.name}: {versions}, installed in {installed - began:.0f} s", flush=True)
        seconds = []
        for check in checks.ALL:
            started = time.monotonic()
            check(environment)
            seconds.append(time.monotonic() - started)
            print(f"{cell.name}: {check.__name__} {seconds[-1]:.0f} s", flush=True)
    return table.Row(cell.name, versions, installed - began, tuple(seconds))


def main() -> int:
    """Run what the command line names; exit status 1 where a cell failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it started
    parser = argparse.ArgumentParser(prog="scripts/smoke_versions")
    parser.add_argument("cells", nargs="*", help="names; none: all of the matrix")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help=f"put the rows into {table.PAGE.name}")
    options = parser.parse_args()
    rows, failed, skipped = [], [], []
    for cell in named(options.cells):
        try:
            rows.append(run_cell(cell, options.wheel.resolve()))
        except NoInterpreter as missing:
            skipped.append(cell.name)
            print(f"{cell.name}: skipped, {missing}", flush=True)
        except SmokeFailed as failure:
            failed.append(cell.name)
            print(f"{cell.name}: FAILED\n{failure}", flush=True)
    print("\n".join(table.lines(rows)))
    print(f"{len(rows)} passed, {len(failed)} failed, {len(skipped)} skipped")
    if options.write:
        table.write(rows)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
