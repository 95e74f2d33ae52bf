"""A job file: what its keys are, what each may hold, and the refusal of anything else by name.

Covers: reading TOML, checking every value, paths relative to the file.
Does not: know spark-submit's options (tfos.submit.command_line).
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfos.errors import ConfigError, SettingsError
from tfos.files.inputs import InputFiles
from tfos.slots.resources import Resources, RoleResources
from tfos.spark import executor_memory
from tfos.submit import input_tables

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MASTER = re.compile(r"yarn|local|local-cluster|(local|local-cluster)\[.+\]|(spark|k8s)://.+")
_PATTERN = re.compile(r"[*?\[{]")
"""Spark lists what such a path matches."""


@dataclass(frozen=True, slots=True)
class JobResources:
    """What every executor, or the driver, is given; None: Spark's default."""

    cores: int | None = None
    memory: str | None = None
    overhead: str | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job, checked."""

    program: str
    master: str
    args: tuple[str, ...] = ()
    name: str = ""
    deploy_mode: str = "client"
    queue: str = ""
    retries: int = 0
    python: str = ""
    driver_python: str = ""
    packages: tuple[str, ...] = ()
    py_files: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()
    ps: int = 0
    workers: int = 1
    executor: JobResources = JobResources()
    driver: JobResources = JobResources()
    resources: RoleResources = field(default_factory=RoleResources)
    """Resources of parameter servers and workers, and their placement."""
    inputs: tuple[InputFiles, ...] = ()
    output: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """Parameter servers and workers."""
        return self.ps + self.workers


def read(path: Path) -> JobFile:
    """Read and check a job file.

    Raises:
        SettingsError: names the key, its value and what is allowed.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    try:
        return of_tables(tables, path.absolute().parent)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def of_tables(tables: Mapping[str, Any], directory: Path) -> JobFile:
    """Return the job of a file's content.

    Args:
        tables: tables as tomllib reads them.
        directory: the file's directory; relative paths start there.

    Raises:
        SettingsError: names the key, its value and what is allowed.
    """
    found: dict[str, Any] = dict(_checked(tables))
    for key in ("program", "master"):
        if key not in found:
            raise SettingsError(f"{key} is missing: {_KEYS[key].allowed}.")
    for role in ("executor", "driver"):
        names = [key for key in found if key.startswith(f"{role}.")]
        found[role] = JobResources(**{name.partition(".")[2]: found.pop(name) for name in names})
    found["resources"] = RoleResources(
        _resources("ps", found), _resources("workers", found), found.pop("roles.placement", None)
    )
    for name in ("ps", "workers"):
        if f"roles.{name}" in found:
            found[name] = found.pop(f"roles.{name}")
    if "output.path" in found:
        found["output"] = found.pop("output.path")
    for key in ("program", "py_files", "files", "archives"):
        if key in found:
            found[key] = _placed(key, found[key], directory)
    return JobFile(**found)


def _resources(role: str, found: dict[str, Any]) -> Resources | None:
    names = [key for key in found if key.startswith(f"{role}.")]
    stated = {name.partition(".")[2]: found.pop(name) for name in names}
    return Resources(**stated) if stated else None


@dataclass(frozen=True, slots=True)
class _Key:
    allowed: str
    accept: Callable[[Any], Any]
    """Returns the value as the job has it, or None if it is refused."""


def _checked(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in _flattened(tables):
        if name == "inputs":
            yield name, input_tables.inputs(value)
            continue
        key = _KEYS.get(name)
        if key is None:
            raise SettingsError(_unknown(name, value))
        accepted = key.accept(value)
        if accepted is None:
            raise SettingsError(f"{name} = {value!r}: allowed is {key.allowed}.")
        yield name, accepted


def _flattened(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield `executor.cores` for cores of the table executor; tables of free keys stay whole."""
    for name, value in tables.items():
        if name in _TABLES and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        elif name in _TABLES:
            raise SettingsError(f"{name} = {value!r}: allowed is a table [{name}].")
        else:
            yield name, value


def _unknown(name: str, value: Any) -> str:
    """Return the refusal of a key, with the one that was meant if that can be told."""
    if isinstance(value, Mapping):
        near = difflib.get_close_matches(name, _TABLES, n=1)
    else:  # the right key in no table, or in a wrong one
        endings = {key.rpartition(".")[2]: key for key in reversed(_KEYS)}
        close = difflib.get_close_matches(name.rpartition(".")[2], endings, n=1, cutoff=0.9)
        near = difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.7 if close else 0.5)
        near = near or [endings[each] for each in close]
    if near:
        return f"unknown key {name}; did you mean {near[0]}?"
    return f"unknown key {name}; known are {', '.join(sorted([*_KEYS, 'inputs']))}."


def _placed(key: str, value: Any, directory: Path) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(key, each, directory) for each in value)
    text = str(value)
    if "," in text:
        raise SettingsError(f"{key}: {text!r} has a comma, at which Spark would split it.")
    if _URL.match(text):
        return text
    path, hash_sign, alias = text.partition("#")
    whole = os.path.normpath(directory / path)
    if not _PATTERN.search(path) and not os.path.exists(whole):
        raise SettingsError(f"{key}: {text!r} is not there: {whole} does not exist.")
    return f"{whole}{hash_sign}{alias}"


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() and "\0" not in value else None


def _texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or any(_text(each) is None for each in value):
        return None
    return tuple(value)


def _words(value: Any) -> tuple[str, ...] | None:
    """Accept the arguments of a program: any text, also an empty one, and numbers."""
    if not isinstance(value, list) or any(_word(each) is None for each in value):
        return None
    return tuple(str(each) for each in value)


def _word(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return None if "\0" in str(value) else str(value)


def _count_from(least: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and value >= least else None


def _size(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        return value if executor_memory.mib(value) >= 1 else None
    except ConfigError:
        return None


def _matching(pattern: re.Pattern[str]) -> Callable[[Any], str | None]:
    return lambda value: value if isinstance(value, str) and pattern.fullmatch(value) else None


def _variables(value: Any) -> dict[str, str] | None:
    return _pairs(value, lambda name: _VARIABLE.fullmatch(name) is not None)


def _settings(value: Any) -> dict[str, str] | None:
    return _pairs(value, lambda name: name.startswith("spark.") and "=" not in name)


def _pairs(value: Any, is_name: Callable[[str], bool]) -> dict[str, str] | None:
    if not isinstance(value, Mapping):
        return None
    found = {}
    for name, each in value.items():
        word = str(each).lower() if isinstance(each, bool) else _word(each)
        if word is None or not is_name(name) or any(space in name for space in " \n\t"):
            return None
        found[name] = word
    return found


_PATHS = "a list of paths (relative to this file) or URLs"
_CORES = _Key("an int >= 1", _count_from(1))
_GPUS = _Key("an int >= 0", _count_from(0))
_MEMORY = _Key("a size such as '2g' or '512m'", _size)
_KEYS: dict[str, _Key] = {
    "program": _Key("the path (relative to this file) or URL of a Python program", _text),
    "args": _Key("a list of strings and numbers; {nodes}, {ps}, {workers} are filled in", _words),
    "name": _Key("a non-empty string", _text),
    "master": _Key(
        "yarn, spark://HOST:PORT, k8s://URL, local[N], local-cluster (or with [N,CORES,MIB])",
        _matching(_MASTER),
    ),
    "deploy_mode": _Key("'client' or 'cluster'", _matching(re.compile("client|cluster"))),
    "queue": _Key("the name of a queue of YARN", _text),
    "retries": _Key("an int >= 0", _count_from(0)),
    "python": _Key("a Python for driver and executors, as each host names it", _text),
    "driver_python": _Key("a Python for the driver alone", _text),
    "packages": _Key("a list of Maven coordinates GROUP:ARTIFACT:VERSION", _texts),
    "py_files": _Key(_PATHS, _texts),
    "files": _Key(_PATHS, _texts),
    "archives": _Key(f"{_PATHS}, each followed by #NAME if wanted", _texts),
    "roles.ps": _Key("an int >= 0", _count_from(0)),
    "roles.workers": _CORES,
    "roles.placement": _Key("'spread' or 'pack'", _matching(re.compile("spread|pack"))),
    "ps.cores": _CORES,
    "ps.memory": _MEMORY,
    "workers.cores": _CORES,
    "workers.memory": _MEMORY,
    "workers.gpus": _GPUS,
    "output.path": _Key(input_tables.PLACE, input_tables.place),
    "executor.cores": _CORES,
    "executor.memory": _MEMORY,
    "executor.overhead": _MEMORY,
    "executor.gpus": _GPUS,
    "driver.cores": _CORES,
    "driver.memory": _MEMORY,
    "driver.overhead": _MEMORY,
    "env": _Key("a table of variables: names of letters, digits and _, with texts", _variables),
    "conf": _Key('a table of settings of Spark: "spark.…" = a text, number or boolean', _settings),
}
_TABLES = {name.partition(".")[0] for name in _KEYS if "." in name}
"""Tables with keys of their own; inputs, env and conf have the user's."""
