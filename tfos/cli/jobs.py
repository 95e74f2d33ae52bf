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
import textwrap
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rpc.errors import TFOSError
from rpc.printable import visible
from tfos.cli import columns
from tfos.cli.failing import FAILED_STATUS, fail
from tfos.watch.snapshot import Json

if TYPE_CHECKING:
    from tfos.watch.run_history import RunRecord
    from tfos.watch.ticket import DriverTicket

FOLLOW_S = 2.0
"""Seconds between two looks at a log: with the size of an answer it bounds the traffic."""
_NUMBERS = ("MiB", "steps/s", "rows/s", "loss")
_MOST_WHOLE = 1e9
"""Numbers from here on are shown with a power of ten."""
_INDENT = " " * 4
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
    node: Annotated[str, typer.Argument(help="The node: worker:2, ps:0, chief:0.")],
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job ends, or Ctrl-C.")
    ] = False,
    job: JobOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON text per line.")] = False,
) -> None:
    """Print the newest lines of a node's output."""
    from tfos.control.messages import Ask
    from tfos.errors import ControlUnavailable
    from tfos.watch.operator import Operator

    last, followed = 0, None
    try:
        with Operator(chosen := _chosen(job)) as operator:
            while followed is None or _runs(followed):
                found = operator.ask(Ask("log", node, last))
                if "error" in found:
                    fail(found["error"])
                if found["skipped"]:
                    _write(_line(f"({found['skipped']} lines skipped)", as_json))
                for line in found["lines"]:
                    _write(_line(line, as_json))
                last = found["last"]
                if not follow:
                    if not last:
                        sys.stderr.write(f"tfos: no output of {visible(node)} is here yet\n")
                    return
                followed = chosen
                time.sleep(FOLLOW_S)
    except KeyboardInterrupt:
        return
    except TFOSError as error:
        if followed is None or not isinstance(error, ControlUnavailable) or _runs(followed):
            fail(str(error))
    sys.stderr.write("tfos: the job has ended\n")


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
        fail(str(error))
    if not chosen.page_url:
        fail(f"{chosen.name} has no page: pass page_port=0 to TFCluster.reserve()")
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
        _write(run_history.why_none())
        return
    _show_history(records)


def _runs(job: DriverTicket) -> bool:
    from tfos.watch import ticket

    return any(each.cluster_id == job.cluster_id for each in ticket.read_all())


def _chosen(job: str) -> DriverTicket:
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
        fail(str(error))


def _act(job: str, what: str, as_json: bool) -> None:
    found = _ask(job, what)
    _write(json.dumps(found) if as_json else visible(found["text"]))
    if not found["is_done"]:
        raise typer.Exit(FAILED_STATUS)


def _show(found: Json) -> None:
    stops = f", asked to stop: {found['stop']}" if found["stop"] else ""
    _write(
        f"{visible(found['name'])} ({found['application_id']}), cluster {found['cluster_id']}: "
        f"{found['phase']} for {_duration(found['running_s'])}{stops}"
    )
    for name, url in found["links"].items():
        _write(f"{name}: {visible(url)}")
    for line in _node_lines(found["nodes"]):
        _write(line)
    for node in found["nodes"]:
        if node["metrics"]:
            _write(f"{node['name']}: {_metrics(node)}")
    for note in found["notes"]:
        _write(visible(note))
    if found["epochs"]:
        _write(f"{found['num_epochs']} epochs; the last: {_metrics(found['epochs'][-1])}")
    if found["evaluations"]:
        last = found["evaluations"][-1]
        _write(f"the evaluated checkpoint of step {last['step']}: {_metrics(last)}")
    _show_checkpoints(found["checkpoints"] or {})
    for failure in found["failures"]:
        _write(f"{failure['node']} failed: {failure['error']}: {visible(failure['message'])}")
    if found["failures"] and found["failures"][0]["traceback"]:
        _write(visible(found["failures"][0]["traceback"], keep="\n\t"))


def _show_checkpoints(checkpoints: Json) -> None:
    if saved := checkpoints.get("saved"):
        what = f"nothing was saved: {saved['error']}" if saved["error"] else saved["path"]
        _write(f"the last requested save: {visible(what)}")
    if best := checkpoints.get("best"):
        by = f"{best['metric']} {_number(best['value'])}"
        _write(visible(f"the best checkpoint, {by}: {best['path']}"))


def _metrics(record: Json) -> str:
    shown = ", ".join(f"{name} {_number(value)}" for name, value in record["metrics"].items())
    return shown or "no metrics"


def _node_lines(nodes: list[Json]) -> list[str]:
    """Return one line for each node; hosts lose their domain, then their middle, if needed."""
    width = columns.width_of_output()
    head = ("node", "status", "phase", "host", "heard ago", *_NUMBERS)
    hosts = [visible(each["host"] or "-") for each in nodes]

    def table(hosts: list[str], width: int | None) -> list[str]:
        rows = [_node_row(each, host) for each, host in zip(nodes, hosts, strict=True)]
        return columns.lines(
            head, rows, width=width, numbers=("heard ago", *_NUMBERS), shrinks="host"
        )

    whole = table(hosts, None)
    if width is None or max(map(len, whole)) <= width:
        return whole
    return table(columns.without_domain(hosts), width)


def _node_row(node: Json, host: str) -> tuple[str, ...]:
    heard = f"{node['silent_s']:.1f} s" if node["pid"] else "-"
    rates = (_number(node["steps_per_s"]), _number(node["rows_per_s"]), _number(node["loss"]))
    place = (node["name"], node["status"], node["phase"] or "-")
    return (*map(visible, place), host, heard, str(node["rss_mib"]), *rates)


def _show_history(records: list[RunRecord]) -> None:
    """Print a line for each run; at a terminal what it has measured and why it failed below it."""
    width = columns.width_of_output()
    head = ["started", "lasted", "state", "epochs", "cluster", "name"]
    rows, below = [], []
    for each in records:
        metrics = {**({} if each.loss is None else {"loss": each.loss}), **each.metrics}
        shown = ", ".join(f"{visible(name)} {_number(value)}" for name, value in metrics.items())
        row = [_when(each.started_at), _duration(each.ended_at - each.started_at), each.state]
        rows.append([*row, str(each.epochs), each.cluster_id, visible(each.name)])
        below.append([shown, visible(each.failure)])
    if width is None:  # one line for each run, as `grep` wants it
        head += ["metrics", "failure"]
        rows = [[*row, *more] for row, more in zip(rows, below, strict=True)]
        below = [[] for _ in rows]
    numbers = ("lasted", "epochs")
    first, *others = columns.lines(head, rows, width=width, numbers=numbers, shrinks="name")
    _write(first)
    for line, more in zip(others, below, strict=True):
        _write(line)
        for text in filter(None, more):
            _write(
                textwrap.fill(
                    text, width or 0, initial_indent=_INDENT, subsequent_indent=_INDENT + "  "
                )
            )


def _line(text: str, as_json: bool) -> str:
    return json.dumps(text) if as_json else visible(text)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < _MOST_WHOLE else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _when(unix_s: float) -> str:
    local = datetime.datetime.fromtimestamp(unix_s, datetime.UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
