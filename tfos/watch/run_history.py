"""History of finished runs: a small record of each in the user's state directory.

Covers: what a record has, where it is, how many are kept.
Does not: show them (tfos.cli.jobs).
Runs in: the driver, which writes one; a command of the user, which reads them.      Threads: any.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from rpc.jit.cache_directory import made_private, real_path, why_unsafe
from tfos.control.members import GONE
from tfos.topology import EVALUATOR_ROLE, PS_ROLE
from tfos.watch.snapshot import Json

MOST_RUNS = 100
MOST_BYTES = 64 << 10
STATE_VARIABLE = "XDG_STATE_HOME"
_BESIDE = frozenset({PS_ROLE, EVALUATOR_ROLE})
"""Roles of nodes that train nothing; an evaluator's step is that of a checkpoint."""


Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
"""Unix seconds that are dates: others, of a damaged record, cannot be shown."""


class RunRecord(msgspec.Struct, frozen=True):
    """One finished run."""

    cluster_id: str
    name: str
    application_id: str
    started_at: Time
    ended_at: Time
    state: str
    """CLOSED, FAILED or INTERRUPTED: stopped by the driver while main_fun ran."""
    epochs: int
    """Epochs of all fits."""
    steps: float
    """Steps of all workers, lost attempts included."""
    loss: float | None
    """The mean of the last losses of the workers that were not lost."""
    metrics: dict[str, float | None]
    """Metrics of the last epoch."""
    failure: str
    """The first failure, in one line; empty: there was none."""


def record_of(last: Json) -> RunRecord:
    """Return the record of a run.

    Args:
        last: its last snapshot; see tfos.watch.snapshot.
    """
    trains = [each for each in last["nodes"] if each["name"].partition(":")[0] not in _BESIDE]
    gone = [status.value for status in GONE]
    stayed = [each for each in trains if each["status"] not in gone]
    losses = [each["loss"] for each in stayed if each["loss"] is not None]
    first = last["failures"][0] if last["failures"] else None
    message = str(first["message"]).partition("\n")[0][:500] if first else ""
    state = "INTERRUPTED" if last["is_interrupted"] else last["phase"]
    return RunRecord(
        cluster_id=last["cluster_id"],
        name=last["name"],
        application_id=last["application_id"],
        started_at=last["started_at"],
        ended_at=last["started_at"] + last["running_s"],
        state="FAILED" if last["is_failed"] else state,
        epochs=last["num_epochs"],
        steps=last["steps"] or 0.0,
        loss=sum(losses) / len(losses) if losses else None,
        metrics=last["epochs"][-1]["metrics"] if last["epochs"] else {},
        failure=f"{first['node']}: {first['error']}: {message}" if first else "",
    )


def add(record: RunRecord) -> None:
    """Keep a record, and the newest MOST_RUNS in all.

    Raises:
        OSError: the directory cannot be made or written, or is not the user's alone.
    """
    directory = directory_of_runs()
    if directory is None:
        return  # this user id has no home
    directory = made_private(directory)
    # By name they are in the order of their start.
    path = directory / f"{record.started_at:016.3f}-{record.cluster_id}.json"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        file.write(msgspec.json.encode(record))
    for old in sorted(directory.glob("*.json"))[:-MOST_RUNS]:
        with contextlib.suppress(OSError):  # another driver removed it
            old.unlink()


def read_all() -> list[RunRecord]:
    """Return the kept records, the newest first; files that are not records are left out."""
    directory = directory_of_runs()
    found = []
    for path in sorted(directory.glob("*.json"), reverse=True) if directory else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            found.append(msgspec.json.decode(file.read(MOST_BYTES), type=RunRecord))
    return found


def why_none() -> str:
    """Return why there is no record, in a sentence."""
    place = directory_of_runs()
    if place is None:
        return (
            f"this user has no home directory for a history; set {STATE_VARIABLE} here and at "
            "drivers"
        )
    reason = why_unsafe(real_path(place)) if os.path.exists(place) else ""
    if reason:
        return f"no run is kept in {place}: {reason}"
    return f"no run has ended yet, as far as {place} knows"


def directory_of_runs() -> Path | None:
    """Return the user's directory of records; None: this user id has no home directory."""
    try:
        state = Path(os.environ.get(STATE_VARIABLE) or Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return state.absolute() / "tfos" / "runs"
