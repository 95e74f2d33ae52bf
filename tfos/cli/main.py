"""The command `tfos`: its subcommands and their options.

Covers: `bench` with its tables and JSON lines; the commands of `python -m ps`, with URLs besides;
those about jobs, `doctor` and `submit`.
Does not: define their options (ps.cli, tfos.cli.jobs, doctor, submit). Each command imports its
part when it runs.
Runs in: its own process; `import tfos` does not load this module.
"""

from __future__ import annotations

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import tfos
from ps.cli import CLUSTER_ID_HELP, COMMANDS, INTEGRITY_HELP, SECRET_FILE_HELP
from tfos.cli import jobs
from tfos.cli.doctor import doctor
from tfos.cli.failing import fail
from tfos.cli.packing import pack
from tfos.cli.submit import submit

if TYPE_CHECKING:
    from tfos.bench.harness import Bench, GivenServers, Line

LOOK_PATIENCE_S = 20.0
"""Seconds to wait for servers that are away while a user waits at a terminal."""
SERVERS_HELP = (
    "Measure these servers (HOST:PORT,HOST:PORT,... in the order of their ranks) that "
    "`python -m ps.server --num-workers 1` has started, instead of own ones. They must be EMPTY "
    "and are seeded; restart them for another benchmark."
)

app = typer.Typer(
    name="tfos",
    help="Parameter servers on Spark executors for Keras 3.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that is closed is None
            # A name from elsewhere may have characters that this terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tfos {tfos.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options before a command's name."""


@app.command()
def bench(  # noqa: PLR0913  # one parameter per option
    name: Annotated[str, typer.Argument(help="Which one; without it they are listed.")] = "",
    json_lines: Annotated[
        bool, typer.Option("--json", help="One JSON line per figure instead of a table.")
    ] = False,
    toy: Annotated[bool, typer.Option(help="Only show that it still works.")] = False,
    repeats: Annotated[int, typer.Option(min=0, help="How often; 0: its own choice.")] = 0,
    servers: Annotated[str, typer.Option(metavar="HOST:PORT,...", help=SERVERS_HELP)] = "",
    secret_file: Annotated[
        str, typer.Option(metavar="FILE", help=f"With --servers. {SECRET_FILE_HELP}")
    ] = "",
    cluster_id: Annotated[
        str, typer.Option(metavar="NAME", help=f"With --servers. {CLUSTER_ID_HELP}")
    ] = "",
    integrity: Annotated[
        str, typer.Option(metavar="WHAT", help=f"With --servers. {INTEGRITY_HELP}")
    ] = "auto",
) -> None:
    """Measure this machine: ours against the plain way, in turns, in one run."""
    from rpc.errors import TFOSError
    from tfos.bench import catalogue
    from tfos.bench.harness import Bench

    if not name:
        _list((each, catalogue.question(each)) for each in catalogue.NAMES)
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    command = " ".join(["tfos", *sys.argv[1:]])
    try:
        asked = servers or secret_file or cluster_id or integrity != "auto"
        given = _given(servers, secret_file, cluster_id, integrity) if asked else None
        run = Bench(command, toy=toy, given_repeats=repeats or None, given_servers=given)
        _run(name, run, json_lines)
    except ModuleNotFoundError as error:
        fail(f"{name} compares with {error.name}, which is not installed; pip install 'tfos[cpu]'")
    except (TFOSError, OSError) as error:
        fail(str(error), keep="\n\t")  # with the last lines of a process


def _pass_on(context: typer.Context) -> None:
    """Run a command of `python -m ps`, whose parser has its options; also opens URLs."""
    from feeding.filesystem.config import FileSystemConfig
    from ps.cli.main import main as ps_main
    from tfos.files.checkpoint_storage import Storages

    storages = Storages(config=FileSystemConfig(patience_s=LOOK_PATIENCE_S))
    arguments = [context.info_name or "", *context.args]
    raise typer.Exit(ps_main(arguments, prog="tfos", open_storage=storages))


for _name, _sentence in COMMANDS.items():
    app.command(
        _name,
        help=_sentence,
        add_help_option=False,
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,
        },
    )(_pass_on)


jobs.add_to(app)
app.command()(doctor)
app.command()(pack)
app.command()(submit)


def _given(servers: str, secret_file: str, cluster_id: str, integrity: str) -> GivenServers:
    from ps.cli.addresses import endpoints_of
    from ps.cli.credentials import credentials_of
    from ps.errors import PSSettingsError
    from tfos.bench.harness import GivenServers

    if not (servers and secret_file and cluster_id):
        raise PSSettingsError(
            "--servers, --secret-file and --cluster-id go together: where the servers listen, and "
            "what they were started with"
        )
    options = Namespace(
        secret_file=secret_file,
        cluster_id=cluster_id,
        integrity=integrity,
        tls_cert=None,
        tls_key=None,
        tls_ca=None,
    )
    return GivenServers(endpoints_of(servers), credentials_of(options))


def _run(name: str, run: Bench, json_lines: bool) -> None:
    from tfos.bench import catalogue

    if json_lines:
        run.on_line = _write_json
        catalogue.run(name, run)
        return
    progress = Console(stderr=True, soft_wrap=True)
    try:
        with progress.status(f"{name}: {_question(name)}") as status:

            def tell(line: Line) -> None:
                status.update(f"{name}: measured {line['name']}")
                if not progress.is_terminal:
                    progress.print(f"tfos bench {name} | measured {line['name']}", markup=False)

            run.on_line = tell
            catalogue.run(name, run)
    finally:  # an interrupted run keeps what it has measured
        if run.lines:
            Console().print(_table(name, run.lines))


def _question(name: str) -> str:
    from tfos.bench import catalogue

    return catalogue.question(name) if name in catalogue.NAMES else ""


def _list(questions: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, title="tfos bench NAME", title_justify="left")
    table.add_column("NAME")
    table.add_column("question")
    for name, text in questions:
        table.add_row(name, text)
    Console().print(table)


def _table(name: str, lines: list[Line]) -> Table:
    """Show medians, with the smallest and the largest value in brackets."""
    table = Table(title=f"tfos bench {name}", title_justify="left", caption_justify="left")
    for column in ("what", "ours", "reference", "ratio"):
        table.add_column(column, overflow="fold")
    for line in lines:
        reference = line["reference"]
        beside = f"{reference['name']}: {_cell(reference, line['unit'])}" if reference else ""
        ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        table.add_row(line["name"], _cell(line["ours"], line["unit"]), beside, ratio)
    versions = lines[0]["versions"] if lines else {}
    table.caption = ", ".join(f"{key} {value}" for key, value in versions.items())
    return table


def _cell(side: dict[str, Any], unit: str) -> str:
    return f"{side['median']:g} {unit} ({side['min']:g} to {side['max']:g})"


def _write_json(line: Line) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
