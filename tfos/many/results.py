"""Results of a run in files: they survive the driver, and let the next run continue.

Covers: the directory's mark (which function, which items), one file per item that is done.
Does not: unpickle values (tfos.many.trainings, when the user asks for one).
Runs in: slots (`write`) and the driver.      Threads: any; every call is independent.

    results_dir/run.json                   the function's and the items' digests
    results_dir/item-NAME-DIGEST.result    a line of JSON (ResultHead), then the pickle
Only the item's name determines its file: a run of more items, or of others in between, finds the
existing results. A file is written atomically, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from feeding.filesystem.ordered_reads import AheadLimits, read_in_order
from feeding.filesystem.registry import filesystem_for
from tfos.errors import SettingsError

_MARK = "run.json"
_FORMAT = 1
"""Higher where digests of the same function or item are other ones."""
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")
_SHOWN_CHARS = 40
"""Number of characters of an item's name in its file's name, which ends with a digest."""
AHEAD = AheadLimits(num_threads=8, num_files=32, num_bytes=256 << 20)
"""Limits of files that are read ahead."""
_HEAD_BYTES = 64 * 1024


class RunMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory's results belong to."""

    format: int
    function: str
    function_digest: str
    items_digest: str


class ResultHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an item's file."""

    item: str
    seconds: float
    metrics: dict[str, float]
    digest: str = ""
    """Digest of the trained item; for a group, of its rows."""


class _HeadLine(msgspec.Struct, frozen=True, kw_only=True):
    """A ResultHead as JSON, which has no NaN: metrics that are not finite become texts."""

    item: str
    seconds: float
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    digest: str = ""


class ResultsDirectory:
    """A directory of results.

    Args:
        path: complete path or URL, visible to the driver and all executors.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        """The path as given, without a trailing slash."""
        self._fs = filesystem_for(self.path)

    @property
    def mark_path(self) -> str:
        """Path of the mark."""
        return f"{self.path}/{_MARK}"

    def claim(self, function: str, function_digest: str, items_digest: str) -> bool:
        """Write the mark, or compare the existing one; return whether the items are the same.

        Args:
            function: name of the function, for messages.
            function_digest: digest of its code.
            items_digest: digest of the items.

        Raises:
            SettingsError: the results belong to another function, or nothing can be written there.
        """
        mark = RunMark(
            format=_FORMAT,
            function=function,
            function_digest=function_digest,
            items_digest=items_digest,
        )
        try:
            found = self._put_mark(mark)
        except OSError as error:
            raise SettingsError(
                f"results_dir={self.path} takes no results: {error}. Pass a directory in which "
                "driver and executors may write"
            ) from error
        if found.format != _FORMAT:
            raise SettingsError(
                f"results_dir={self.path} holds results in format {found.format}, this release of "
                f"tfos has format {_FORMAT}. Pass another results_dir, or delete that one."
            )
        if found.function_digest != function_digest:
            raise SettingsError(
                f"results_dir={self.path} holds results of another function or another version of "
                f"it ({found.function}). Pass another results_dir, or delete that one; to keep its "
                f"results of items that have not changed, delete only {self.mark_path}."
            )
        return found.items_digest == items_digest

    def done(self, names: Sequence[str]) -> Iterator[tuple[int, ResultHead]]:
        """Yield position and head of each item that an earlier run has done.

        Args:
            names: names of the items.
        """
        there = {status.name for status in self._fs.entries(self.path)}
        found = [number for number, name in enumerate(names) if _file_name(name) in there]
        paths = [self.path_of(names[number]) for number in found]
        yield from zip(found, read_in_order(self._read_head, paths, AHEAD), strict=True)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each item's file; 0: there is none.

        Args:
            names: names of the items.
        """
        there: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):  # a later read reports it
            there = {status.name: status.size_bytes for status in self._fs.entries(self.path)}
        return [there.get(_file_name(name), 0) for name in names]

    def write(self, head: ResultHead, value: bytes) -> None:
        """Write an item's file.

        Args:
            head: the part that is readable without the value.
            value: the pickled value.
        """
        metrics: Any = {
            name: number if math.isfinite(number) else str(number)
            for name, number in head.metrics.items()
        }
        line = _HeadLine(item=head.item, seconds=head.seconds, metrics=metrics, digest=head.digest)
        self._fs.write(self.path_of(head.item), msgspec.json.encode(line) + b"\n" + value)

    def value(self, item: str) -> tuple[ResultHead, bytes]:
        """Return the head of an item's file and the pickled value, from the same file."""
        path = self.path_of(item)
        with self._fs.open(path) as file:
            line, _, value = file.read_range(0, file.size_bytes).partition(b"\n")
        return _decoded_head(path, line), value

    def head(self, item: str) -> ResultHead | None:
        """Return the head of an item's file; None: no file is visible here."""
        try:
            return self._read_head(self.path_of(item))
        except FileNotFoundError:
            return None

    def path_of(self, item: str) -> str:
        """Return the path of an item's file."""
        return f"{self.path}/{_file_name(item)}"

    def _read_head(self, path: str) -> ResultHead:
        with self._fs.open(path) as file:
            line = b""
            while b"\n" not in line and len(line) < file.size_bytes:
                line += file.read_range(len(line), _HEAD_BYTES)
        return _decoded_head(path, line.partition(b"\n")[0])

    def _put_mark(self, mark: RunMark) -> RunMark:
        """Write the mark; return the mark that is then there, which may be an earlier run's."""
        try:
            self._fs.write(self.mark_path, msgspec.json.encode(mark), overwrite=False)
        except FileExistsError:
            return self._read_mark()
        return mark

    def _read_mark(self) -> RunMark:
        with self._fs.open(self.mark_path) as file:
            data = file.read_range(0, file.size_bytes)
        try:
            return msgspec.json.decode(data, type=RunMark)
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{self.mark_path} is no mark of map_train ({error}); pass another results_dir"
            ) from error


@dataclass(frozen=True, slots=True)
class ClaimedResults:
    """A directory that a run has claimed."""

    directory: ResultsDirectory
    has_same_items: bool
    """Whether the run of the existing mark had the same items with the same values."""


def _file_name(item: str) -> str:
    shown = _OTHER_CHARS.sub("_", item)[:_SHOWN_CHARS]
    digest = hashlib.sha256(item.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"item-{shown}-{digest}.result"


def _decoded_head(path: str, line: bytes) -> ResultHead:
    try:
        found = msgspec.json.decode(line, type=_HeadLine)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{path} is no result of map_train: {error}; delete it") from error
    metrics = {name: float(number) for name, number in found.metrics.items()}
    return ResultHead(item=found.item, seconds=found.seconds, metrics=metrics, digest=found.digest)
