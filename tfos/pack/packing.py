"""The environment as a list of files, and the archive made of it.

Covers: what comes from where: interpreter, standard library, packages, tfos's own source, shared
libraries of this host, bytecode of what nodes import, compiled kernels.
Does not: decide what stays behind (tfos.pack.contents), write tar (tfos.pack.archive), show
progress (tfos.cli.packing).
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tfos.errors import UnsupportedError
from tfos.pack import archive, binaries, contents, warming
from tfos.pack.binaries import Binary
from tfos.pack.contents import Entry, Rules
from tfos.pack.libraries import HostLibraries, Relinker, host_libraries
from tfos.pack.python_home import OWN_PACKAGES, PythonHome
from tfos.pack.warming import Warmed

GZIP_LEVEL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a user says about the contents; patterns of paths below site-packages."""

    kept: tuple[str, ...] = ()
    """Patterns to pack although the rules leave them out, such as `pyspark/jars`."""
    left_out: tuple[str, ...] = ()
    level: int = GZIP_LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What was packed."""

    num_files: int
    before_bytes: int
    """Size of the environment, its standard library and interpreter, with what stayed behind."""
    files_bytes: int
    """Size of the archive's files."""
    archive_bytes: int
    num_modules: int
    """Modules with bytecode."""
    num_kernels: int
    libraries: HostLibraries
    given_up: tuple[str, ...] = ()
    """Packages that nodes import, of which the user has left files out."""
    unmatched: tuple[str, ...] = ()
    """The user's patterns that match nothing."""


@dataclass
class PackProgress:
    """Callbacks for progress; by default they do nothing."""

    on_step: Callable[[str], None] = field(default=lambda _: None)
    on_size: Callable[[int], None] = field(default=lambda _: None)
    """The bytes that will be written, before compression."""
    on_bytes: Callable[[int], None] = field(default=lambda _: None)


def pack(target: Path, choices: Choices, progress: PackProgress) -> Packed:
    """Pack the running environment.

    Args:
        target: archive to write; an older one is replaced when the new one is whole.
        choices: changes to the rules.
        progress: gets the steps and bytes.

    Raises:
        SettingsError: the name of the archive.
        UnsupportedError: the environment cannot be packed; with the next step.
    """
    archive.check_target(target)
    home = PythonHome.running()
    with tempfile.TemporaryDirectory(prefix="tfos-pack-") as scratch:
        Relinker(Path(scratch))  # so that a missing program is reported before minutes of work
        progress.on_step("compiling kernels, and importing what nodes import")
        (Path(scratch) / "warm").mkdir()
        warmed = warming.warmed(Path(scratch) / "warm")
        return pack_home(home, warmed, target, choices, progress)


def pack_home(
    home: PythonHome, warmed: Warmed, target: Path, choices: Choices, progress: PackProgress
) -> Packed:
    """Pack an environment; see `pack`.

    Args:
        home: where its parts are.
        warmed: what a node of it loads.
        target: archive to write.
        choices: changes to the rules.
        progress: gets the steps and bytes.

    Raises:
        UnsupportedError: a node imports what lies elsewhere.
    """
    check_places(home, warmed)
    with tempfile.TemporaryDirectory(prefix="tfos-pack-") as scratch:
        progress.on_step("looking for files and shared libraries")
        entries = {each.name: each for each in _files(home, warmed, choices)}
        found = {
            entry.source: binary
            for entry in entries.values()
            if entry.source and (binary := binaries.read(entry.source))
        }
        libraries = _relinked(home, entries, found, Path(scratch))
        modules = _bytecode(entries, warmed.modules, Path(scratch))
        entries |= {each.name: each for each in modules}
        for name, path in warmed.kernels:
            entries[f"{home.site_name}/{name}"] = Entry(f"{home.site_name}/{name}", path)
        sizes = [each.source.stat().st_size for each in entries.values() if each.source]
        progress.on_step("writing the archive")
        progress.on_size(sum(sizes))
        archive.write(target, entries.values(), choices.level, progress.on_bytes)
        return Packed(
            num_files=len(entries),
            before_bytes=_size_of(home),
            files_bytes=sum(sizes),
            archive_bytes=target.stat().st_size,
            num_modules=len(modules),
            num_kernels=sum(name.endswith(".nbi") for name, _ in warmed.kernels),
            libraries=libraries,
            given_up=tuple(sorted(_given_up(home, warmed, choices))),
            unmatched=_unmatched(home, choices),
        )


def check_places(home: PythonHome, warmed: Warmed) -> None:
    """Refuse an environment whose nodes import what is not packed, as from PYTHONPATH.

    Args:
        home: where its parts are.
        warmed: what a node of it loads.

    Raises:
        UnsupportedError: nodes import such a module; with the first one.
    """
    roots = (home.stdlib, *home.packages, *(home.own_root / name for name in _elsewhere(home)))
    outside = [
        path
        for path in warmed.modules
        if path not in warmed.of_spark and not any(path.is_relative_to(root) for root in roots)
    ]
    if outside:
        others = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UnsupportedError(
            f"{outside[0]}{others} is imported by what a node runs, but lies in no directory that "
            f"is packed: neither in {home.packages[0]} nor in {home.stdlib}. Install it there "
            "with pip, or take its directory from PYTHONPATH and run tfos pack elsewhere if nodes "
            "do without it"
        )


def _files(home: PythonHome, warmed: Warmed, choices: Choices) -> Iterator[Entry]:
    """Yield what the environment has; for equal names the last one counts."""
    python = f"python{home.version}"
    yield Entry(f"bin/{python}", home.executable, is_executable=True)
    yield from (Entry(f"bin/{name}", link=python) for name in ("python", "python3"))
    stdlib_name = os.path.relpath(home.stdlib, home.base)
    needed = _below(home.stdlib, warmed.modules)
    rules = Rules(contents.OF_STDLIB, needed=needed)
    yield from contents.files_below(home.stdlib, stdlib_name, rules)
    elsewhere = _elsewhere(home)
    for directory in home.packages:
        rules = _rules(home, directory, warmed, choices)
        yield from contents.files_below(directory, home.site_name, rules)
    for name in elsewhere:
        yield from contents.files_below(home.own_root / name, f"{home.site_name}/{name}", Rules())


def _rules(home: PythonHome, directory: Path, warmed: Warmed, choices: Choices) -> Rules:
    left_out = (*contents.OF_PACKAGES, *_elsewhere(home))
    needed = _below(directory, warmed.modules)
    return Rules(left_out, choices.kept, needed, choices.left_out)


def _given_up(home: PythonHome, warmed: Warmed, choices: Choices) -> set[str]:
    """Return the packages that nodes import and the user leaves out."""
    rules = (_rules(home, directory, warmed, choices) for directory in home.packages)
    return {name for each in rules for name in each.given_up()}


def _unmatched(home: PythonHome, choices: Choices) -> tuple[str, ...]:
    patterns = (*choices.kept, *choices.left_out)
    return tuple(contents.unmatched(patterns, home.packages)) if patterns else ()


def _elsewhere(home: PythonHome) -> tuple[str, ...]:
    """Return the packages of tfos that are not among the installed ones, but in a checkout."""
    return () if home.own_root in home.packages else OWN_PACKAGES


def _below(directory: Path, modules: Iterable[Path]) -> frozenset[str]:
    inside = (path for path in modules if path.is_relative_to(directory))
    return frozenset(path.relative_to(directory).as_posix() for path in inside)


def _relinked(
    home: PythonHome, entries: dict[str, Entry], found: Mapping[Path, Binary], scratch: Path
) -> HostLibraries:
    """Add the host's libraries to the entries, and replace files by changed copies."""
    modules = {
        name: entry.source
        for name, entry in entries.items()
        if entry.source
        and _is_of_stdlib(home, entry)
        and (binary := found.get(entry.source))
        and binary.has_runpath
    }
    libraries = host_libraries(found, [home.executable, *modules.values()])
    relinker = Relinker(scratch)
    for name, source in modules.items():
        entries[name] = replace(entries[name], source=relinker.module(source))
    interpreter = f"bin/python{home.version}"
    changed = relinker.interpreter(home.executable, libraries.linked)
    entries[interpreter] = replace(entries[interpreter], source=changed)
    for name, path in libraries.files.items():
        binary = binaries.read(path)
        has_runpath = binary is not None and binary.has_runpath
        source = relinker.module(path) if has_runpath else path
        entries[f"lib/{name}"] = Entry(f"lib/{name}", source)
    return libraries


def _is_of_stdlib(home: PythonHome, entry: Entry) -> bool:
    """Say where a file is from; without a virtual environment packages lie below the library."""
    stdlib_name = os.path.relpath(home.stdlib, home.base)
    of_package = entry.name.startswith(f"{home.site_name}/")
    return entry.name.startswith(f"{stdlib_name}/") and not of_package


def _bytecode(entries: Mapping[str, Entry], modules: Iterable[Path], scratch: Path) -> list[Entry]:
    """Compile what nodes import: in a tree that cannot be written each process would do it.

    With unchecked hashes instead of times: unpacking may change a file's time, but not its text.
    """
    wanted = set(modules)
    compiled: list[Entry] = []
    tag = importlib.util.cache_from_source("x.py").rpartition("/x.")[2]
    for number, entry in enumerate(entries.values()):
        if entry.source not in wanted:
            continue
        target = scratch / f"{number}.pyc"
        py_compile.compile(
            str(entry.source),
            str(target),
            dfile=entry.name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        directory, _, file = entry.name.rpartition("/")
        name = f"{directory}/{contents.CACHE}/{file.removesuffix('py')}{tag}"
        compiled.append(Entry(name, target))
    return compiled


def _size_of(home: PythonHome) -> int:
    total = home.executable.stat().st_size
    for root in (home.stdlib, *home.packages, *(home.own_root / name for name in _elsewhere(home))):
        for directory, below, names in os.walk(root):
            if root == home.stdlib:  # packages are counted once, and those of the base never
                below[:] = [name for name in below if not name.endswith("-packages")]
            total += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
    return total
