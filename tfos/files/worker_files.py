"""Worker files: the files of a job's inputs that one worker has, and its output directory.

Covers: listing, local copies when they are first asked for, sending the output at the end.
Does not: say which files are whose (tfos.files.inputs), know one file system (feeding.filesystem).
Runs in: workers.      Threads: main_fun's.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from feeding.filesystem.location import Location, parse
from feeding.reading.discover import data_files
from feeding.reading.splits import SourceFile
from tfos.errors import SettingsError
from tfos.files import transfer
from tfos.files.inputs import InputFiles

_logger = logging.getLogger(__name__)


class WorkerInputs(Mapping[str, tuple[str, ...]]):
    """The files of each input that this worker has, found when they are first asked for.

    Args:
        inputs: the job's inputs.
        rank: this worker's rank.
        num_workers: number of workers that train together.
        directory: directory for local copies; need not exist.
        absolute_path: adds scheme and directory to a path.
    """

    def __init__(
        self,
        inputs: Sequence[InputFiles],
        rank: int,
        num_workers: int,
        directory: Path,
        absolute_path: Callable[[str], str],
    ) -> None:
        self._inputs = {each.name: each for each in inputs}
        self._rank, self._num_workers = rank, num_workers
        self._directory = directory
        self._absolute_path = absolute_path
        self._found: dict[str, tuple[str, ...]] = {}

    def __getitem__(self, name: str) -> tuple[str, ...]:
        """Return the paths of this worker's files of an input, sorted.

        Raises:
            SettingsError: the job has no such input.
            OSError: the input has no file, or one cannot be read.
        """
        if name not in self._inputs:
            known = ", ".join(map(repr, self._inputs)) or "none"
            raise SettingsError(
                f"ctx.inputs[{name!r}]: the job's inputs are {known}. Name it in [inputs] of the "
                "job file or in ClusterConfig(inputs=...)"
            )
        if name not in self._found:
            self._found[name] = self._find(self._inputs[name])
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the job's inputs."""
        return iter(self._inputs)

    def __len__(self) -> int:
        """Return the number of the job's inputs."""
        return len(self._inputs)

    def __contains__(self, name: object) -> bool:
        """Return whether the job has an input of this name."""
        return name in self._inputs

    def _find(self, of: InputFiles) -> tuple[str, ...]:
        path = self._absolute_path(of.path)
        files = data_files(path, is_splittable=lambda _: False)
        mine = of.share_of(files, self._rank, self._num_workers)
        if not mine:
            _logger.warning(
                "input %r has %d files for %d workers: none is this one's; write more files, or "
                "give all to each worker: share='all'",
                *(of.name, len(files), self._num_workers),
            )
        if of.mode == "list":
            return tuple(each.path for each in mine)
        _logger.info("copying %d of %d files of input %r", len(mine), len(files), of.name)
        names = local_names(files)
        directory = self._directory / of.name
        shutil.rmtree(directory, ignore_errors=True)  # the copies of an attempt that broke off
        return tuple(_copied(parse(each.path), directory / names[each.path]) for each in mine)


def local_names(files: Sequence[SourceFile]) -> dict[str, str]:
    """Return where the copy of each file goes, by its path: below the input, or its own name.

    Args:
        files: files of one input.

    Raises:
        PathError: a name could lead out of the directory of the copies.
    """
    names = {}
    for each in files:
        base = parse(each.base)
        below = parse(each.path).path.removeprefix(base.path).strip("/")
        # A check: the listing came from a server.
        found = base.child(below) if below else base
        names[each.path] = below or found.name
    counts = Counter(names.values())
    if len(counts) == len(names):
        return names
    return {path: f"{number:05d}/{name}" for number, (path, name) in enumerate(names.items())}


def _copied(source: Location, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    transfer.download(source, target)
    return str(target)


class WorkerOutput:
    """The directory whose files are sent to the job's output when main_fun has returned.

    Args:
        target: directory or URL of all workers' outputs; empty: the job has none.
        name: this worker's name, such as "worker-1".
        directory: directory on this host; need not exist.
    """

    def __init__(self, target: str, name: str, directory: Path) -> None:
        self._target = target
        self._name = name
        self._directory = directory

    @property
    def directory(self) -> str:
        """The directory on this host.

        Raises:
            SettingsError: the job has no output.
        """
        if not self._target:
            raise SettingsError(
                "ctx.output_dir: the job has no output. Name a directory or URL in [output] of the "
                "job file or in ClusterConfig(output=...)"
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        return str(self._directory)

    def send(self) -> str:
        """Copy the directory to `target/name`, replacing what is there; return the copy's place.

        A directory that main_fun did not ask for, or left empty, is not sent: the result is empty.

        Raises:
            OSError: the file system failed; what was there is unchanged, or, in a store without
                renames, may be partly replaced.
        """
        if not self._target or not self._directory.is_dir() or not os.listdir(self._directory):
            return ""
        place = parse(self._target).child(self._name)
        transfer.upload(self._directory, place)
        _logger.info("the output is at %s", place)
        return str(place)
