"""The command `warm` of `python -m ps` and `tfos`: compile all kernels into a directory.

Covers: the argument and the printed count.      Does not: compile.
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ps.errors import PSSettingsError
from ps.jit.cache import CACHE
from rpc.jit.cache_directory import CACHE_VARIABLE

_DTYPES = ("float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument("directory", help=f"For {CACHE_VARIABLE}; made if it is missing.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile every kernel of every rule, table and format; returns the exit status.

    Raises:
        PSSettingsError: the directory cannot be used.
    """
    directory = Path(options.directory).resolve()
    os.environ[CACHE_VARIABLE] = str(directory)
    CACHE.directory.forget()
    used = CACHE.directory.path()
    if used.parent != directory:
        raise PSSettingsError(
            f"{directory} cannot be used (owner, mode or disk); kernels would go to {used}"
        )
    start_s = time.monotonic()
    count = warm_all()
    sys.stdout.write(f"{count} kernels in {used} after {time.monotonic() - start_s:.1f} s\n")
    return 0


def warm_all() -> int:
    """Compile every kernel of every rule, table and format into the cache; returns how many."""
    from ps.compression import kernels as packing
    from ps.optim import kernels as rules
    from ps.sorted_rows import search
    from ps.tables import kernels as tables

    count = rules.warm((name, dtype) for name in rules.ALL_NAMES for dtype in _DTYPES)
    count += tables.warm_server(_DTYPES) + tables.warm_client(_DTYPES)
    count += sum(map(search.warm, _DTYPES))
    return count + packing.warm_server(packing.ALL_KINDS) + packing.warm_client(packing.ALL_KINDS)
