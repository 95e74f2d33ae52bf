"""Versions of this environment against the driver's: equal, worth a warning, or refused.

Covers: collecting versions without importing the packages, comparing, the table.
Does not: decide when to compare (tfos.node.task does, before it starts anything).
Runs in: the driver and node tasks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tfos.version import __version__

SOURCE = "source of tfos"
"""Digest of the source, among the versions: two commits may have one version number."""
DIRECTORY = "directory of tfos"
"""Where it is imported from: told where the source differs, and no difference by itself."""
_ROOMS = ("feeding", "ps", "rpc", "tfos")

_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
}
"""Packages compared before each start of a node."""
OTHER_DISTRIBUTIONS = {
    name: (name,)
    for name in (
        *("cloudpickle", "cryptography", "grpcio", "hdfs-native", "msgspec", "numba", "pandas"),
        *("psutil", "pyarrow", "pyspark", "tensorboard"),
    )
}
"""Further packages that tfos works with; each costs a start a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that both sides have, in different versions."""

    name: str
    driver: str
    here: str

    @property
    def is_fatal(self) -> bool:
        """Whether nodes of these versions cannot work together.

        The wire formats and pickled classes of tfos match between equal sources only, and a pickled
        function is bytecode of one minor version of Python.
        """
        if self.name == "python":
            return self.driver.split(".")[:2] != self.here.split(".")[:2]
        return self.name in ("tfos", SOURCE)


def installed(more: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, str]:
    """Return name and version of tfos, Python and the numeric packages that are installed.

    Args:
        more: distributions that may have a package, by its name.
    """
    found = {"tfos": __version__, "python": platform.python_version()}
    root = Path(__file__).parents[2]
    if source := source_digest(root):
        found[SOURCE] = source
    found[DIRECTORY] = str(root / "tfos")
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


@functools.cache
def source_digest(root: Path) -> str:
    """Return a digest of the source of all rooms; about 15 ms, once per process.

    Args:
        root: directory of the rooms.

    Returns:
        Hexadecimal; empty where the source is not in files of its own, as in a zip.
    """
    digest = hashlib.blake2b(digest_size=6)
    found = False
    for room in _ROOMS:
        for directory, _, names in sorted(os.walk(root / room)):
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(directory, name)
                    digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
                    found = True
    return digest.hexdigest() if found else ""


def compare(driver: Mapping[str, str], here: Mapping[str, str]) -> list[Difference]:
    """Return the differences; a package that only one side has is not one, nor DIRECTORY alone.

    Args:
        driver: versions by package.
        here: versions by package.
    """
    found = {
        name: version for name, version in driver.items() if here.get(name, version) != version
    }
    if SOURCE not in found:
        found.pop(DIRECTORY, None)
    return [Difference(name, version, here[name]) for name, version in found.items()]


def table(differences: Sequence[Difference]) -> str:
    """Return the differences as lines of three columns, without blank lines."""
    rows = [("", "driver", "executor"), *((d.name, d.driver, d.here) for d in differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=True))])
        .rstrip()
        for row in rows
    )  # fmt: skip


def note(differences: Sequence[Difference]) -> str:
    """Return what to do first where only the source of tfos differs, or nothing."""
    names = {difference.name for difference in differences}
    if SOURCE not in names or "tfos" in names:
        return ""
    text = (
        f"They are two commits of tfos {__version__}: if it has changed on disk since the driver "
        "started, restart the driver (in a notebook: its kernel). "
    )
    if DIRECTORY in names:
        text += "Spark's workers and notebooks import that of their working directory, if any. "
    return text


def sentence(differences: Sequence[Difference]) -> str:
    """Return the differences in one line."""
    return ", ".join(f"{d.name} {d.here} (driver: {d.driver})" for d in differences)
