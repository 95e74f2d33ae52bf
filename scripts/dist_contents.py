"""Check what is inside the sdists and wheels: every file of the packages, and nothing else.

    python -m scripts.dist_contents dist

Fails too where a folder with modules has no `__init__.py`, since packages.find passes over it, and
where a file names a directory of the machine that built it.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
PACKAGES = ("feeding", "ps", "pyspark_tfrecord", "rpc", "tfos")


@dataclass(frozen=True)
class Distribution:
    """One project of the checkout."""

    file_name: str
    """How its archives begin."""
    root: Path
    packages: tuple[str, ...]


DISTRIBUTIONS = (
    Distribution("tfos", ROOT, PACKAGES),
    Distribution(
        "tfos_tensorflowonspark", ROOT / "compat" / "tensorflowonspark", ("tensorflowonspark",)
    ),
)
BESIDE = {
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    *("pyproject.toml", "setup.cfg", "setup.py"),
}
"""Files of an sdist beside the packages; setuptools writes PKG-INFO and setup.cfg."""

Files = Mapping[str, bytes]
"""Path inside an archive to contents."""


def package_files(root: Path, packages: tuple[str, ...] = PACKAGES) -> set[str]:
    """Return the paths, from the root, of all files that a user of the packages needs."""
    return {
        path.relative_to(root).as_posix()
        for package in packages
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def without_init(paths: set[str]) -> set[str]:
    """Return the folders that hold modules and no `__init__.py`."""
    folders = {str(PurePosixPath(path).parent) for path in paths if path.endswith(".py")}
    return {folder for folder in folders if f"{folder}/__init__.py" not in paths}


def wheel_files(path: Path) -> Files:
    """Return what a wheel holds."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def sdist_files(path: Path) -> Files:
    """Return what an sdist holds, without its first folder."""
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        streams = {member.name: archive.extractfile(member) for member in members}
        return {name.partition("/")[2]: stream.read() for name, stream in streams.items() if stream}


def faults(held: Files, wanted: set[str], beside: set[str]) -> Iterator[str]:
    """Yield a sentence for each path that is missing, that does not belong, or names this machine.

    Args:
        held: the archive.
        wanted: what must be in it.
        beside: what else may be in it; a folder with its slash allows all that it holds.
    """
    yield from (f"{path} is missing" for path in sorted(wanted - set(held)))
    for path in sorted(set(held) - wanted):
        if path not in beside and not any(
            folder.endswith("/") and path.startswith(folder) for folder in beside
        ):
            yield f"{path} does not belong in it"
    for machine in sorted({str(ROOT), str(Path.home()), sys.prefix} - {"/"}):
        for path, data in sorted(held.items()):
            # A folder such as /root may be an ordinary word of a text; a path below it is not.
            if f"{machine}/".encode() in data:
                yield f"{path} names {machine}, a directory of the machine that built it"


def check(directory: Path, of: Distribution) -> list[str]:
    """Return what is wrong with the one sdist and the one wheel of a distribution.

    Args:
        directory: holds them.
        of: the distribution.
    """
    wanted = package_files(of.root, of.packages)
    wrong = [f"{folder} has no __init__.py" for folder in sorted(without_init(wanted))]
    (wheel,) = directory.glob(f"{of.file_name}-*.whl")
    (sdist,) = directory.glob(f"{of.file_name}-*.tar.gz")
    metadata = f"{wheel.name.rsplit('-', 3)[0]}.dist-info/"
    for path, held, beside in (
        (wheel, wheel_files(wheel), {metadata}),
        (sdist, sdist_files(sdist), BESIDE | {f"{of.file_name}.egg-info/"}),
    ):
        wrong += [f"{path.name}: {fault}" for fault in faults(held, wanted, beside)]
        print(f"{path.name}: {len(held)} files, {path.stat().st_size / 1e3:.0f} kB")
    return wrong


def main() -> int:
    """Check the directory that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="Where the sdists and wheels are.")
    directory = parser.parse_args().directory
    wrong = [fault for each in DISTRIBUTIONS for fault in check(directory, each)]
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
