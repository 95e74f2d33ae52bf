"""The command line `python -m ps`: `inspect` and `export` for checkpoints, `stats`, `warm`.

Covers: arguments and what is printed of checkpoints, also for the command `tfos`.
Does not: look into files (ps.checkpoint.inspect), ask servers (ps.cli.stats).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import msgspec

from ps.checkpoint.inspect import DirectoryReport, StepReport, export_npz, inspect
from ps.checkpoint.reader import Root, read_manifest
from ps.checkpoint.restore import newest_sound
from ps.cli import stats, warm
from ps.errors import PSError
from rpc.errors import RpcError

NOTHING = "no step can be restored"
_NOTE_CHARS = 200


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, 1 for nothing to restore, 2 for an error."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "stats":
            return stats.run(options)
        if options.command == "warm":
            return warm.run(options)
        if options.command == "export":
            step, slots = options.step, options.slots
            return export(options.directory, options.npz, step=step, slots=slots)
        return show(options.directory, as_json=options.json)
    except (PSError, RpcError, OSError) as error:
        sys.stderr.write(f"ps {options.command}: {error}\n")
        return 2


def show(root: Root, *, as_json: bool = False) -> int:
    """Print what a directory holds; returns the exit status."""
    report = inspect(root)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(report))
    return 0 if report.newest is not None else 1


def export(root: Root, npz: str, *, step: int | None = None, slots: bool = False) -> int:
    """Write one step's parameters to a file for numpy.load; returns the exit status."""
    found = newest_sound(root) if step is None else read_manifest(root, step)
    count = export_npz(root, found, npz, slots=slots)
    sys.stdout.write(f"{npz}: {count} arrays of step {found.step}\n")
    return 0


def _lines(report: DirectoryReport) -> Iterator[str]:
    newest = f"newest step {report.newest}" if report.newest is not None else NOTHING
    yield f"{report.directory}: {newest}"
    yield f"lease: {report.lease or 'nobody saves here'}"
    for step in report.steps:
        yield from _step_lines(step)


def _step_lines(step: StepReport) -> Iterator[str]:
    if not step.files:
        yield f"step {step.step}: INCOMPLETE: {step.error}"
        return
    kind = "full" if step.base is None else f"adds to step {step.base}"
    size = sum(step.files.values()) / 1e6
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.saved_at_s))
    yield (
        f"step {step.step}: {kind}, {step.consistency}, clock {step.clock}, {len(step.files)} "
        f"servers, {size:.1f} MB, saved {saved} by job {step.job!r}"
    )
    yield f"  DAMAGED: {step.error}" if step.error else "  whole: every digest is right"
    for name, nbytes in step.files.items():
        yield f"  {name}  {nbytes:,} bytes"
    for group in step.groups:
        slots = f", slots {', '.join(group.slots)}" if group.slots else ""
        yield f"  group {group.name}: {group.dtype}, rule {group.rule}{slots}"
        for name, shape in group.params.items():
            yield f"    {name} {list(shape)}"
    for table in step.tables:
        slots = f", slots {', '.join(table.slots)}" if table.slots else ""
        kind = "" if step.base is None else "changed "
        yield (
            f"  table {table.name}: {table.dtype}[{table.dim}], rule {table.rule}{slots}, "
            f"{table.rows:,} {kind}rows, {table.nbytes:,} bytes"
        )
    for name, text in sorted(step.notes.items()):
        yield f"  note {name}: {textwrap.shorten(text, _NOTE_CHARS)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ps", description="Look into a checkpoint directory or a running server."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    looking = commands.add_parser("inspect", help="print what each step holds and if it is whole")
    looking.add_argument("directory")
    looking.add_argument("--json", action="store_true", help="for programs")
    export = commands.add_parser("export", help="write one step's parameters for numpy.load")
    export.add_argument("directory")
    export.add_argument("--npz", metavar="OUT", required=True, help="the file to write")
    export.add_argument("--step", type=int, help="default: the newest that is whole")
    export.add_argument("--slots", action="store_true", help="the optimizer's slots as well")
    stats.add_parser(commands)
    warm.add_parser(commands)
    return parser
