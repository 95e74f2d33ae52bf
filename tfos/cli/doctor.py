"""The command `tfos doctor`: its options, the table, JSON, the exit status.

Does not: examine (tfos.doctor.examination) or judge (tfos.doctor.findings).
Runs in: its own process.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rpc.errors import TFOSError
from rpc.printable import visible
from tfos.cli.failing import fail
from tfos.cli.jobs import JsonOption

if TYPE_CHECKING:
    from tfos.doctor.examination import PlaceReport
    from tfos.doctor.findings import Finding

PROBLEM_STATUS = 1
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    master: Annotated[
        str,
        typer.Option(metavar="URL", help="Spark's master, e.g. yarn: examine its executors, too."),
    ] = "",
    hdfs: Annotated[
        str,
        typer.Option(
            metavar="URL", help="An existing directory: every host writes and reads there."
        ),
    ] = "",
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; may be repeated."),
    ] = None,
    tensorflow: Annotated[
        bool, typer.Option(help="Import TensorFlow where nodes will run, and time it.")
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds, for each of: Spark's start, its executors, their answers."
        ),
    ] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Examine driver and executors before a job does; exits with 1 if there is a problem."""
    from tfos.doctor.examination import ExaminationRequest, examine

    try:
        wanted = ExaminationRequest(
            master=master,
            conf=_settings(conf or []),
            hdfs=hdfs,
            with_tensorflow=tensorflow,
            timeout_s=timeout,
        )
        reports = examine(wanted, say=_say)
    except TFOSError as error:
        fail(str(error))
    if as_json:
        sys.stdout.write(json.dumps([_as_json(each) for each in reports]) + "\n")
    else:
        _show(reports)
    if any(each.has_problem for each in reports):
        raise typer.Exit(PROBLEM_STATUS)


def _say(step: str) -> None:
    sys.stderr.write(f"tfos doctor | {visible(step)}\n")
    sys.stderr.flush()


def _settings(pairs: list[str]) -> dict[str, str]:
    from tfos.errors import SettingsError

    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"--conf {pair!r} is not KEY=VALUE, e.g. spark.executor.memory=2g.")
        found[key.strip()] = value
    return found


def _as_json(report: PlaceReport) -> dict[str, object]:
    found = [
        {
            "check": each.check,
            "level": each.level.value,
            "text": each.text,
            "next_step": each.next_step,
        }
        for each in report.findings
    ]
    return {"place": report.name, "host": report.host, "findings": found, "facts": report.facts}


def _show(reports: list[PlaceReport]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for name, most_chars in (("where", 26), ("check", None), ("", None), ("found", None)):
        table.add_column(name, overflow="fold", max_width=most_chars)
    merged = _merged(reports)
    for finding, places in merged.items():
        level = Text(finding.level.value, style=_COLOURS[finding.level.value])
        text = Text(visible(finding.text))
        if finding.next_step:
            text.append(f"\n→ {visible(finding.next_step)}", style="bold")
        table.add_row(Text(visible(_together(places))), finding.check, level, text)
    console.print(table)
    counts = dict.fromkeys(_COLOURS, 0)
    for finding in merged:
        counts[finding.level.value] += 1
    problems, warnings = (_count(counts[each], each) for each in ("problem", "warning"))
    console.print(f"{problems}, {warnings}", highlight=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _merged(reports: list[PlaceReport]) -> dict[Finding, list[str]]:
    """Return each finding once, with all places that it holds for."""
    found: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            found.setdefault(finding, []).append(report.name)
    return found


def _together(places: list[str]) -> str:
    """Return `driver, executor 0, 1` of `driver`, `executor 0`, `executor 1`."""
    shown = places[0]
    for before, place in itertools.pairwise(places):
        kind, _, name = place.rpartition(" ")
        shown += f", {name if before.startswith(f'{kind} ') else place}"
    return shown
