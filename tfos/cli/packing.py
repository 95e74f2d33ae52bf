"""The command `pack`: its options, progress, and what it says about the archive.

Covers: the above.      Does not: pack (tfos.pack).
Runs in: its own process, on a host like the executors'.
"""

from __future__ import annotations

import contextlib
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfos.cli.failing import fail

if TYPE_CHECKING:
    from tfos.pack.packing import Packed, PackProgress

_MIB = 1 << 20


def pack(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="env.tar.gz, .tgz or .tar.")
    ],
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pack what a rule leaves out: pyspark/jars."),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Of site-packages: --leave-out 'scipy*'."),
    ] = None,
    level: Annotated[int, typer.Option(min=1, max=9, help="Of gzip.")] = 6,
) -> None:
    """Pack this Python environment for hosts that have Java and a libc only."""
    from rpc.errors import TFOSError

    try:
        from tfos.pack.packing import Choices
        from tfos.pack.packing import pack as pack_environment
    except ModuleNotFoundError as error:
        fail(f"tfos pack needs {error.name}: pip install 'tfos[pack]'")
    choices = Choices(kept=tuple(keep or ()), left_out=tuple(leave_out or ()), level=level)
    begun_s = time.monotonic()
    try:
        with _bar() as progress:
            packed = pack_environment(output.absolute(), choices, progress)
    except (TFOSError, OSError) as error:
        fail(str(error), keep="\n\t")  # with the last lines of a process
    sys.stdout.write(summary(output, packed, time.monotonic() - begun_s))


def summary(output: Path, packed: Packed, took_s: float) -> str:
    """Return the summary of an archive."""
    found = packed.libraries
    lines = [
        f"{output}: {_size(packed.archive_bytes)}; {packed.num_files} files of "
        f"{_size(packed.files_bytes)} of the environment's {_size(packed.before_bytes)}; "
        f"{took_s:.0f} s",
        f"runs on: Linux {platform.machine()}, glibc {found.glibc[0]}.{found.glibc[1]} or newer",
        f"from this host: {' '.join(found.files) or 'no library'}",
        f"compiled: {packed.num_modules} modules; {packed.num_kernels} kernels, for processors "
        "like this one",
    ]
    if found.missing:
        lines.append(f"not on this host either: {' '.join(found.missing)}")
    if packed.given_up:
        lines.append(
            f"left out, though a node imports it here: {', '.join(packed.given_up)}; see that "
            "nodes start without it"
        )
    if packed.unmatched:
        lines.append(f"matches nothing: {' '.join(map(shlex.quote, packed.unmatched))}")
    archive = shlex.quote(f"{output}#env")
    lines.append(
        f"spark-submit --archives {archive} --conf spark.pyspark.python=./env/bin/python …"
    )
    return "".join(f"{line}\n" for line in lines)


@contextlib.contextmanager
def _bar() -> Iterator[PackProgress]:
    """Show a bar of the bytes written; a plain line per step where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from tfos.pack.packing import PackProgress

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def on_step(text: str) -> None:
        bar.update(task, description=text)
        if not console.is_terminal:
            sys.stderr.write(f"tfos | {text}\n")

    with bar:
        yield PackProgress(
            on_step,
            lambda total: bar.update(task, total=total),
            lambda count: bar.update(task, advance=count),
        )


def _size(count: int) -> str:
    return f"{count / _MIB:.0f} MiB"
