"""The commands `inspect` and `export` of `python -m ps` and `tfos`.

Covers: their arguments, what is printed of checkpoints.
Does not: look into files (ps.checkpoint.inspect), parse the command line (ps.cli.main).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator

import msgspec

from ps.checkpoint.choice import newest_sound, read_manifest
from ps.checkpoint.inspect import DirectoryReport, StepReport, export_npz, inspect
from ps.checkpoint.reader import Root, telling_removed
from ps.checkpoint.storage import OpenStorage
from ps.cli.printed import line

NOTHING = "no step can be restored; the reason of each is below"
EMPTY = (
    "no checkpoint is here, or no such directory; name the one that holds step-1, step-2, …: that "
    "of Checkpoints(directory=…) or of --save-dir"
)
_METADATA_CHARS = 200
_DIRECTORY_HELP = "The checkpoint directory; with `tfos` also a URL such as hdfs://…"


def add_inspect(parser: argparse.ArgumentParser, open_storage: OpenStorage) -> None:
    """Add the arguments of `inspect`.

    Args:
        parser: parser of the command.
        open_storage: opens the directory.
    """
    parser.add_argument("directory", help=_DIRECTORY_HELP)
    parser.add_argument("--json", action="store_true", help="JSON, for programs.")
    parser.set_defaults(run=lambda given: show(open_storage(given.directory), as_json=given.json))


def add_export(parser: argparse.ArgumentParser, open_storage: OpenStorage) -> None:
    """Add the arguments of `export`.

    Args:
        parser: parser of the command.
        open_storage: opens the directory.
    """
    parser.add_argument("directory", help=_DIRECTORY_HELP)
    parser.add_argument("--npz", metavar="OUT", required=True, help="The local file to write.")
    parser.add_argument("--step", type=int, help="Default: the newest that is whole.")
    parser.add_argument("--slots", action="store_true", help="The optimizer's slots as well.")
    parser.set_defaults(
        run=lambda given: export(
            open_storage(given.directory), given.npz, step=given.step, slots=given.slots
        )
    )


def show(root: Root, *, as_json: bool = False) -> int:
    """Print what a directory holds.

    Args:
        root: the directory.
        as_json: print JSON instead of lines.

    Returns:
        The exit status: 1 where nothing can be restored.
    """
    report = inspect(root)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        sys.stdout.writelines(map(line, _lines(report)))
    return 0 if report.newest is not None else 1


def export(root: Root, npz: str, *, step: int | None = None, slots: bool = False) -> int:
    """Write one step's parameters to a file for numpy.load.

    Args:
        root: the checkpoint directory.
        npz: the local file.
        step: None: the newest that is whole.
        slots: write the optimizer's slots as well.

    Returns:
        The exit status.
    """
    found = newest_sound(root) if step is None else read_manifest(root, step)
    with telling_removed(root, found):
        count = export_npz(root, found, npz, slots=slots)
    sys.stdout.write(line(f"{npz}: {count} arrays of step {found.step}"))
    return 0


def _lines(report: DirectoryReport) -> Iterator[str]:
    none = NOTHING if report.steps else EMPTY
    newest = f"newest step {report.newest}" if report.newest is not None else none
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
    if step.score is not None:
        yield f"  scored: {step.score.metric} {step.score.value:g}"
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
    for name, text in sorted(step.metadata.items()):
        yield f"  metadata {name}: {textwrap.shorten(text, _METADATA_CHARS)}"
