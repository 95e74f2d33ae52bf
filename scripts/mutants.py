"""Removes each listed defence in a copy of the checkout and says whether an assertion finds it.

Covers: the list's form, the copy, one pytest process per defence, what its end means.
Does not: the list (scripts/mutants.toml), how a failed test ended (scripts.mutant_verdict).

    scripts/test --mutants              all of them; minutes
    scripts/test --mutants MAC lease    those with one of these words in their name

A defence that no assertion misses is either not needed or not tested. A test that hangs, cannot
be imported or fails with another exception proves nothing: any damage does that.
"""

from __future__ import annotations

import argparse
import ast
import enum
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "scripts" / "mutants.toml"
PARTS = ("rpc", "ps", "feeding", "tfos", "pyspark_tfrecord", "tests", "scripts", "pyproject.toml")
LONGEST_S = 180.0
"""Limit of the pytest process of one defence, whose tests take seconds."""
LONGEST_TEST_S = 3.0
"""Average limit over all tests of the list, which one process runs with all defences."""
RESULT = "verdict.json"


@dataclass(frozen=True)
class Mutant:
    """One defence: its text in a file, the text without it, and the tests that must miss it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    times: int = 1
    """How often its text is in the file; all of them are removed."""

    def why_stale(self, root: Path = ROOT) -> str:
        """Return why the list no longer matches the checkout; empty if it does."""
        path = root / self.file
        whole = path.read_text() if path.exists() else ""
        found = whole.count(self.old)
        if found != self.times:
            return (
                f"its text is {found} times in {self.file}, expected {self.times}: update the list"
            )
        if self.old == self.new:
            return "it changes nothing: update the list"
        try:
            ast.parse(whole.replace(self.old, self.new))
        except SyntaxError as error:
            return f"without it {self.file} is no Python, {error}: update the list"
        for test in self.tests:
            file, _, name = test.partition("::")
            function = name.rpartition("::")[2].partition("[")[0]
            path = root / file
            if not path.exists() or f"def {function}(" not in path.read_text():
                return f"there is no test {test}: update the list"
        return "" if self.tests else "it names no test: update the list"


class End(enum.Enum):
    """What became of a mutant."""

    FOUND = "found"
    ERROR_ONLY = "found by an error only"
    NOT_FOUND = "NOT FOUND"
    STALE = "STALE"
    BROKEN = "its tests fail without it"


@dataclass(frozen=True)
class Verdict:
    """The end of one mutant, what shows it, and the seconds it took."""

    mutant: Mutant
    end: End
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.end.value} ({self.seconds:.1f} s): {self.mutant.name}: {self.text}"


def load(path: Path = LIST) -> list[Mutant]:
    """Read the list."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class Copy:
    """A copy of the checkout in which the defences are removed one at a time.

    Args:
        root: the checkout; it is only read.
        directory: an empty one, which becomes the copy.
        parts: files and directories to copy; compiled kernels come with them.
    """

    def __init__(self, root: Path, directory: Path, parts: Sequence[str] = PARTS) -> None:
        self.root = directory
        for part in parts:
            source, target = root / part, directory / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc"))
            else:
                shutil.copy2(source, target)

    @contextmanager
    def without(self, mutant: Mutant) -> Iterator[None]:
        """Remove one defence."""
        path = self.root / mutant.file
        whole = path.read_text()
        try:
            self._write(path, whole.replace(mutant.old, mutant.new))
            yield
        finally:
            self._write(path, whole)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # A changed text of the same length and second would be taken for the compiled one.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Sequence[str], longest_s: float = LONGEST_S) -> dict[str, list[str]]:
        """Run tests in the copy; returns their ids, or other texts, by how they ended.

        Args:
            tests: their ids and options of pytest.
            longest_s: seconds until they are ended.
        """
        result = self.root / RESULT
        result.unlink(missing_ok=True)
        options = ("-p", "no:cacheprovider", "-p", "scripts.mutant_verdict", "-q", "--no-header")
        log = self.root / "pytest.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(longest_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # of its own session
                    process.wait()
        ended: dict[str, list[str]] = json.loads(result.read_text()) if result.exists() else {}
        if status is None:
            ended.setdefault("errors", []).append(f"no end within {longest_s:g} s")
        elif status and not (ended.get("assertions") or ended.get("errors")):
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            ended.setdefault("errors", []).append(f"pytest ended with {status}: {''.join(last)}")
        return ended


def judge(copy: Copy, mutant: Mutant) -> tuple[End, str]:
    """Remove a defence, run its tests, and say what that showed."""
    with copy.without(mutant):
        ended = copy.run(mutant.tests)
    if ended.get("assertions"):
        return End.FOUND, ended["assertions"][0]
    if ended.get("errors"):
        return End.ERROR_ONLY, ended["errors"][0]
    return End.NOT_FOUND, f"{len(ended.get('passed', []))} tests pass: strengthen one of them"


def run(
    mutants: Sequence[Mutant], root: Path = ROOT, parts: Sequence[str] = PARTS
) -> list[Verdict]:
    """Judge all of them, and print each.

    Args:
        mutants: what to remove.
        root: the checkout.
        parts: parts of it that are copied.
    """
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="tfos-mutants-") as directory:
        copy = Copy(root, Path(directory), parts)
        sound = [each for each in mutants if not each.why_stale(root)]
        broken = failing_without(copy, sound) if sound else {}
        for number, mutant in enumerate(mutants, start=1):
            begun_s = time.monotonic()
            stale = mutant.why_stale(root)
            failing = [text for test in mutant.tests for text in broken.get(test, ())]
            if stale:
                end, text = End.STALE, stale
            elif failing:
                end, text = End.BROKEN, failing[0]
            else:
                end, text = judge(copy, mutant)
            verdicts.append(Verdict(mutant, end, text, time.monotonic() - begun_s))
            print(f"{number} of {len(mutants)}: {verdicts[-1]}", flush=True)
    return verdicts


def failing_without(copy: Copy, mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """Run all tests with all defences; returns what failed, by the name in the list."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    begun_s = time.monotonic()
    longest_s = max(LONGEST_S, LONGEST_TEST_S * len(tests))
    ended = copy.run([*tests, "--mutant-run-all"], longest_s)
    print(f"with all defences: {len(ended.get('passed', []))} tests passed", end="")
    print(f" ({time.monotonic() - begun_s:.1f} s)", flush=True)
    failed = [*ended.get("assertions", []), *ended.get("errors", [])]
    by_test = {test: [text for text in failed if text.startswith(test)] for test in tests}
    told = {text for texts in by_test.values() for text in texts}
    others = [text for text in failed if text not in told]
    return {test: [*texts, *others] for test, texts in by_test.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --mutants")
    parser.add_argument("words", nargs="*", help="of the names of those to run; none: all")
    words = [word.lower() for word in parser.parse_args().words]
    mutants = [
        each for each in load() if not words or any(word in each.name.lower() for word in words)
    ]
    if not mutants:
        print(f"no name in {LIST.relative_to(ROOT)} has one of {words}", file=sys.stderr)
        return 2
    begun_s = time.monotonic()
    verdicts = run(mutants)
    rest = [each for each in verdicts if each.end is not End.FOUND]
    print()
    for each in rest:
        print(each)
    found = len(verdicts) - len(rest)
    print(f"{found} of {len(verdicts)} found, {time.monotonic() - begun_s:.0f} s")
    return 1 if rest else 0


if __name__ == "__main__":
    sys.exit(main())
