"""Commands about jobs: status, logs, save, stop and page of a running one, history of ended ones.

Covers: their options, tables, following a log, exit statuses.
Does not: ask a driver (tfos.watch.operator), answer (tfos.watch.job).
Runs in: its own process, on the driver's host, as its user.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import time
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rpc.errors import TFOSError
from tfos.console.printable import visible
from tfos.watch.snapshot import Json

FAILED_STATUS = 2
FOLLOW_S = 2.0
"""Between two looks at a log: with the size of an answer it bounds the traffic."""
JobOption = Annotated[
    str,
    typer.Option(
        "--job",
        metavar="ID",
        help="Which job: the beginning of its cluster's id, or its Spark application's id or name. "
        "Needed where several run.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, logs, save, stop, page, history):
        app.command()(command)


def status(job: JobOption = "", as_json: JsonOption = False) -> None:
    """Show a running job: its nodes, stragglers, epochs and failures."""
    found = _ask(job, "status")
    if as_json:
        _write(json.dumps(found))
        return
    _show(found)


def logs(
    node: Annotated[str, typer.Argument(help="Whose: worker:2, ps:0, chief:0.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    job: JobOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON text per line.")] = False,
) -> None:
    """Print the newest lines of a node's output."""
    from tfos.control.messages import Ask
    from tfos.watch.operator import Operator

    last = 0
    try:
        with Operator(_chosen(job)) as operator:
            while True:
                found = operator.ask(Ask("log", node, last))
                if "error" in found:
                    _fail(found["error"])
                if found["skipped"]:
                    _write(_line(f"({found['skipped']} lines skipped)", as_json))
                for line in found["lines"]:
                    _write(_line(line, as_json))
                last = found["last"]
                if not follow:
                    if not last:
                        sys.stderr.write(f"tfos: no output of {visible(node)} is here yet\n")
                    return
                time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return
    except TFOSError as error:
        _fail(str(error))


def save(job: JobOption = "", as_json: JsonOption = False) -> None:
    """Save a checkpoint now, and say where it is."""
    _act(job, "save", as_json)


def stop(job: JobOption = "", as_json: JsonOption = False) -> None:
    """Stop the training as `model.stop_training = True` does; main_fun and the program go on."""
    _act(job, "stop", as_json)


def page(job: JobOption = "") -> None:
    """Print the URL of a running job's page, with its token."""
    try:
        chosen = _chosen(job)
    except TFOSError as error:
        _fail(str(error))
    if not chosen.page_url:
        _fail(f"{chosen.name} has no page: pass page_port=0 to TFCluster.reserve()")
    _write(chosen.page_url)


def history(
    as_json: JsonOption = False,
    number: Annotated[int, typer.Option("-n", min=1, help="How many, the newest first.")] = 20,
) -> None:
    """Show the runs of this user on this host that have ended."""
    from tfos.watch import run_history

    records = run_history.read_all()[:number]
    if as_json:
        _write(json.dumps([msgspec.to_builtins(each) for each in records]))
        return
    if not records:
        _write(f"no run has ended yet, as far as {run_history.directory_of_runs()} knows")
        return
    table = _table("started", "lasted", "name", "cluster", "state", "epochs", "metrics", "failure")
    for each in records:
        metrics = {**({} if each.loss is None else {"loss": each.loss}), **each.metrics}
        shown = ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        lasted = _duration(each.ended_at - each.started_at)
        row = (_when(each.started_at), lasted, each.name, each.cluster_id, each.state)
        _add(table, (*row, str(each.epochs), shown, each.failure))
    Console().print(table)


def _chosen(job: str) -> Any:
    """Return the ticket of the job that is meant."""
    from tfos.watch import operator, ticket

    return operator.choose(ticket.read_all(), job)


def _ask(job: str, what: Any) -> Json:
    from tfos.control.messages import Ask
    from tfos.watch.operator import Operator

    try:
        with Operator(_chosen(job)) as operator:
            return operator.ask(Ask(what, after=-math.inf))
    except TFOSError as error:
        _fail(str(error))


def _act(job: str, what: str, as_json: bool) -> None:
    found = _ask(job, what)
    _write(json.dumps(found) if as_json else visible(found["text"]))
    if not found["is_done"]:
        raise typer.Exit(FAILED_STATUS)


def _show(found: Json) -> None:
    console = Console()
    stops = f", asked to stop: {found['stop']}" if found["stop"] else ""
    _write(
        f"{visible(found['name'])} ({found['application_id']}), cluster {found['cluster_id']}: "
        f"{found['phase']} for {_duration(found['running_s'])}{stops}"
    )
    for name, url in found["links"].items():
        _write(f"{name}: {visible(url)}")
    table = _table("node", "status", "phase", "host", "heard", "MiB", "steps/s", "rows/s", "loss")
    for each in found["nodes"]:
        heard = f"{each['silent_s']:.1f} s ago" if each["pid"] else "-"
        row = (each["name"], each["status"], each["phase"] or "-", each["host"] or "-", heard)
        rates = (_number(each["steps_per_s"]), _number(each["rows_per_s"]), _number(each["loss"]))
        _add(table, (*row, str(each["rss_mib"]), *rates))
    console.print(table)
    for note in found["notes"]:
        _write(visible(note))
    if found["epochs"]:
        _write(f"{found['num_epochs']} epochs; the last: {_metrics(found['epochs'][-1])}")
    if found["evaluations"]:
        last = found["evaluations"][-1]
        _write(f"the evaluated checkpoint of step {last['step']}: {_metrics(last)}")
    for failure in found["failures"]:
        _write(f"{failure['node']} failed: {failure['error']}: {visible(failure['message'])}")
    if found["failures"] and found["failures"][0]["traceback"]:
        _write(visible(found["failures"][0]["traceback"], keep="\n\t"))


def _metrics(record: Json) -> str:
    shown = ", ".join(f"{name} {_number(value)}" for name, value in record["metrics"].items())
    return shown or "no metrics"


def _table(*head: str) -> Table:
    table = Table(box=None)
    for name in head:
        table.add_column(name, overflow="fold")
    return table


def _add(table: Table, cells: tuple[str, ...]) -> None:
    """Add a row of plain text: what nodes and users name is no markup."""
    table.add_row(*(Text(visible(each)) for each in cells))


def _line(text: str, as_json: bool) -> str:
    return json.dumps(text) if as_json else visible(text)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _when(unix_s: float) -> str:
    local = datetime.datetime.fromtimestamp(unix_s, datetime.UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"tfos: {visible(text)}\n")
    raise typer.Exit(FAILED_STATUS)
