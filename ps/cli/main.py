"""The command line `python -m ps`: `inspect`, `export`, `stats` and `warm`.

Covers: the parser of all commands, errors as one line, the exit status; also for the command
`tfos`, which opens URLs besides.
Does not: run a command (ps.cli.checkpoints, ps.cli.stats, ps.cli.warm), start servers
(ps.cli.serve).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ps.checkpoint.storage import OpenStorage, storage_at
from ps.cli import COMMANDS, checkpoints, stats, warm
from ps.cli.printed import line
from rpc.errors import TFOSError

FAILED_STATUS = 2


def main(
    arguments: Sequence[str], *, prog: str = "python -m ps", open_storage: OpenStorage = storage_at
) -> int:
    """Run one command.

    Args:
        arguments: the command's name and what follows it.
        prog: how the user calls it, for the help and for errors.
        open_storage: opens a checkpoint directory as its user named it.

    Returns:
        The exit status: 0, 1 where nothing can be restored, 2 for an error.
    """
    options = _parser(prog, open_storage).parse_args(arguments)
    try:
        status: int = options.run(options)
    except (TFOSError, OSError) as error:
        sys.stderr.write(line(f"{prog} {options.command}: {error}"))
        return FAILED_STATUS
    return status


def _parser(prog: str, open_storage: OpenStorage) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Look into a checkpoint directory or a running server."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=sentence, description=sentence, allow_abbrev=False)
        for name, sentence in COMMANDS.items()
    }
    checkpoints.add_inspect(parsers["inspect"], open_storage)
    checkpoints.add_export(parsers["export"], open_storage)
    stats.add_arguments(parsers["stats"])
    warm.add_arguments(parsers["warm"])
    return parser
