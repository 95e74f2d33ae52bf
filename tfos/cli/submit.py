"""The command `tfos submit`: prints the line of spark-submit for a job file, and becomes it.

Does not: read the file or make the line (tfos.submit).
Runs in: its own process, which spark-submit takes over: signals and the exit status are its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from rpc.errors import TFOSError
from rpc.printable import visible
from tfos.cli.failing import fail


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for the program, after those of the file; after `--`."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the line.")] = False,
) -> None:
    """Run the job that a job file describes, with spark-submit."""
    from tfos.errors import SettingsError
    from tfos.submit import command_line, job_file

    try:
        described = job_file.read(job)
        try:
            line = command_line.of_job(described, args or [])
            warning = line.warning()
        except SettingsError as error:
            raise SettingsError(f"{job}: {error}") from None
        program = spark_submit(os.environ)
        if not program and not dry_run:
            fail("no spark-submit: set SPARK_HOME, or pip install 'tfos[spark]'")
    except TFOSError as error:
        fail(str(error))
    sys.stdout.write(f"{line.text(program or 'spark-submit')}\n")
    sys.stdout.flush()
    if warning:
        sys.stderr.write(f"tfos: {visible(warning)}\n")
    if dry_run:
        return
    try:
        os.execve(program, line.words(program), {**os.environ, **line.variables})
    except OSError as error:
        fail(f"{program} cannot be run: {error.strerror}")


def spark_submit(environ: Mapping[str, str]) -> str:
    """Return the path of spark-submit: Spark's home, the search path, pip's pyspark; or "".

    Args:
        environ: environment variables of this process.
    """
    if home := environ.get("SPARK_HOME"):
        return os.path.join(home, "bin", "spark-submit")
    if found := shutil.which("spark-submit", path=environ.get("PATH")):
        return found
    spec = importlib.util.find_spec("pyspark")
    for directory in (spec and spec.submodule_search_locations) or ():
        program = os.path.join(directory, "bin", "spark-submit")
        if os.path.isfile(program):
            return program
    return ""
