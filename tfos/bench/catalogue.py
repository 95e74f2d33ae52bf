"""The benchmarks that `tfos bench` knows; each is the module of its name beside this one.

Covers: names, the questions they answer, running one.
Does not: import any of them before it is run.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

from ps.errors import PSSettingsError
from tfos.bench.harness import Bench

ON_GIVEN_SERVERS = frozenset({"dense", "small", "sparse"})
"""Benchmarks that can also measure servers that run elsewhere."""
NAMES = (
    *("dense", "compression", "small", "sparse", "apply", "peers", "scaling", "load", "driver"),
    *("checkpoint", "memory"),
)


def question(name: str) -> str:
    """Return the question that a benchmark answers, its module's first line."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def run(name: str, bench: Bench) -> None:
    """Run one benchmark; its figures go to `bench`.

    Args:
        name: the benchmark's name.
        bench: takes its figures.

    Raises:
        PSSettingsError: there is none of this name, or it cannot measure given servers.
        ModuleNotFoundError: the benchmark compares with a package that is not installed.
    """
    if name not in NAMES:
        raise PSSettingsError(f"no benchmark named {name!r}; there are {', '.join(NAMES)}")
    if bench.given_servers is not None and name not in ON_GIVEN_SERVERS:
        able = ", ".join(sorted(ON_GIVEN_SERVERS))
        raise PSSettingsError(f"{name} starts its own servers; with --servers there are {able}")
    importlib.import_module(f"tfos.bench.{name}").run(bench)
