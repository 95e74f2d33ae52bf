"""Versions of this environment against the driver's: equal, worth a warning, or refused.

Covers: collecting versions without importing the packages, comparing, the table.
Does not: decide when to compare (tfos.node.task does, before it starts anything).
Runs in: the driver and node tasks.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from tfos.version import __version__

_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
}
"""Compared before each start of a node."""
OTHER_DISTRIBUTIONS = {
    name: (name,)
    for name in (
        *("cloudpickle", "cryptography", "grpcio", "hdfs-native", "msgspec", "numba", "pandas"),
        *("psutil", "pyarrow", "pyspark", "tensorboard"),
    )
}
"""What tfos works with besides; each costs a start a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that both sides have, in different versions."""

    name: str
    driver: str
    here: str

    @property
    def is_fatal(self) -> bool:
        """Whether nodes of these versions cannot work together.

        The wire formats of tfos match between equal releases only, and a pickled function is
        bytecode of one minor version of Python.
        """
        if self.name == "python":
            return self.driver.split(".")[:2] != self.here.split(".")[:2]
        return self.name == "tfos"


def installed(more: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, str]:
    """Return name and version of tfos, Python and the numeric packages that are installed.

    Args:
        more: distributions that may have a package, by its name.
    """
    found = {"tfos": __version__, "python": platform.python_version()}
    for name, distributions in {**_DISTRIBUTIONS, **(more or {})}.items():
        for distribution in distributions:
            try:
                package = metadata.distribution(distribution).metadata
                version = package["Version"] if "Version" in package else ""  # noqa: SIM401 - typed without get
            except metadata.PackageNotFoundError:
                continue
            if version:  # empty: a directory without metadata, as an interrupted pip leaves
                found[name] = version
                break
    return found


def compare(driver: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """Return the differences; a package that only one side has is none.

    Args:
        driver: versions by package.
        here: versions by package.
    """
    return [
        Difference(name, version, here[name])
        for name, version in driver.items()
        if here.get(name, version) != version
    ]


def table(differences: Sequence[Difference]) -> str:
    """Return the differences as lines of three columns, without blank lines."""
    rows = [("", "driver", "executor"), *((d.name, d.driver, d.here) for d in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=True))])
        .rstrip()
        for row in rows
    )  # fmt: skip


def sentence(differences: Sequence[Difference]) -> str:
    """Return the differences in one line."""
    return ", ".join(f"{d.name} {d.here} (driver: {d.driver})" for d in differences)
