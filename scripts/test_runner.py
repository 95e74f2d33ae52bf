"""Runs lint, types and all groups of tests; called by scripts/test.

Covers: what runs when, the log of each, and the seconds that each took.
Does not: the groups (scripts.test_groups), the closing lines (scripts/test_summary.py).

Most groups partly wait for their processes, so three steps run at a time: when one ends, the next
of the list starts. With four at a time no core is ever idle, each group takes longer for it, and
tests that count seconds fail. The idle group takes the processor time that the others leave.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.test_groups import GROUPS, IDLE, LONG, Group

AT_ONCE = 3
NOTHING_COLLECTED = 5  # pytest's exit status
NICE = ("nice", "-n", "19")
INTERRUPTIBLE = ("env", "--default-signal=INT")
"""The shell starts this program in the background, so with SIGINT ignored, and steps would inherit
that; tests of Ctrl-C need it. The shell ends this program by SIGTERM."""


@dataclass(frozen=True)
class Step:
    """One process: a group of tests, or a command that must succeed."""

    name: str
    command: tuple[str, ...]
    budget_s: int = 0


LINT = (
    Step("format", ("ruff", "format", "--check", ".")),
    Step("lint", ("ruff", "check", ".")),
)
TYPES = Step("types", ("mypy",))
DOCS = Step("docs", ("scripts/docs",))
CLASSES = Step(
    "classes",
    ("bash", "-c", ". scripts/java.sh && tfos_spark_classes || echo 'JVMs will start slower'"),
)
"""Spark's classes as one file: every JVM of the groups starts with it."""


@dataclass
class Running:
    """A step that has been started."""

    step: Step
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float


@dataclass
class Runner:
    """Runs steps in a scratch directory and keeps what they took, in seconds."""

    scratch: Path
    options: tuple[str, ...]
    running: list[Running] = field(default_factory=list)
    took: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def tests(self, group: Group) -> Step:
        """Make the pytest process of a group."""
        xml = f"--junitxml={self.scratch / group.name}.xml"
        command = ("pytest", xml, "-m", group.marks, *self.options, *group.paths)
        return Step(group.name, command, group.budget_s)

    def start(self, step: Step, prefix: Sequence[str] = ()) -> None:
        """Start a step, with a command in front of its own."""
        log = self.scratch / f"{step.name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*INTERRUPTIBLE, *prefix, *step.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(Running(step, process, log, time.monotonic()))

    def wait_for_one(self) -> None:
        """Wait until a step ends, and show what it said."""
        pid, status, usage = os.wait4(-1, 0)
        (ended,) = (each for each in self.running if each.process.pid == pid)
        self.running.remove(ended)
        step, code = ended.step, os.waitstatus_to_exitcode(status)
        ended.process.returncode = code
        seconds = time.monotonic() - ended.started_s
        self.took[step.name] = {
            "seconds": seconds,
            "processor_s": usage.ru_utime + usage.ru_stime,
            "budget_s": step.budget_s,
        }
        if code not in (0, NOTHING_COLLECTED):
            self.failed.append(step.name)
        print(f"\n== {step.name}: {' '.join(step.command)}")
        print(ended.log.read_text(errors="replace"), end="")
        print(f"== {step.name}: {seconds:.0f} s", flush=True)

    def run(self, steps: Sequence[Step]) -> None:
        """Run these steps, AT_ONCE at a time, in this order, beside those that run already."""
        waiting = list(steps)
        beside = {each.step.name for each in self.running}
        while waiting or {each.step.name for each in self.running} - beside:
            num_busy = sum(each.step.name not in beside for each in self.running)
            if waiting and num_busy < AT_ONCE:
                self.start(waiting.pop(0))
            else:
                self.wait_for_one()

    def close(self) -> None:
        """End what still runs."""
        for each in self.running:
            os.killpg(each.process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--shuffle")
    given = parser.parse_args()
    runner = Runner(given.scratch, ("--shuffle", given.shuffle) if given.shuffle else ())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # scripts/test ends: so do the groups
    unit, *others = (runner.tests(group) for group in GROUPS)
    try:
        runner.start(runner.tests(IDLE), prefix=NICE)
        # Types and Spark's classes end long before unit, so Spark's groups start behind both.
        runner.run([*LINT, unit, TYPES, CLASSES, *others, DOCS])
        while runner.running:
            runner.wait_for_one()
        if given.long:
            runner.run([runner.tests(LONG)])
    finally:
        runner.close()
        (given.scratch / "took.json").write_text(json.dumps(runner.took))
        (given.scratch / "failed").write_text("".join(f"{name}\n" for name in runner.failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
