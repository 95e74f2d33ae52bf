"""What an ELF file says of itself: the libraries it needs, where it looks for them, its glibc.

Covers: reading one file, by pyelftools.      Does not: look for libraries (tfos.pack.libraries).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

_MAGIC = b"\x7fELF"
_GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Binary:
    """One ELF file."""

    needed: tuple[str, ...] = ()
    """Names of libraries, as the loader looks for them."""
    name: str = ""
    """Name under which others need it; empty: its file name."""
    has_runpath: bool = False
    """Whether it looks in places of its own, and then not in those of the program."""
    glibc: tuple[int, int] = (0, 0)
    """The oldest version that it runs with."""


def read(path: Path) -> Binary | None:
    """Return what a file says; None: it is not an ELF file, or a damaged one."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return None
        try:
            return _read(ELFFile(file))
        except (ELFError, ValueError):
            return None


def _read(elf: ELFFile) -> Binary:
    needed: list[str] = []
    name, has_runpath = "", False
    for segment in elf.iter_segments(type="PT_DYNAMIC"):
        for tag in segment.iter_tags():
            kind = tag.entry.d_tag
            if kind == "DT_NEEDED":
                needed.append(tag.needed)
            elif kind == "DT_SONAME":
                name = tag.soname
            has_runpath = has_runpath or kind == "DT_RUNPATH"
    versions = [
        (int(found[1]), int(found[2]))
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, each in section.iter_versions()
        for version in each
        if (found := _GLIBC.match(version.name))
    ]
    return Binary(tuple(needed), name, has_runpath, max(versions, default=(0, 0)))
