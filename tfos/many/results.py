"""Results of a run in files: what survives the driver, and how the next run goes on.

Covers: the directory's mark (which function, which items), one file per item that is done.
Does not: unpickle values (tfos.many.trainings, when the user asks for one).
Runs in: slots (`write`) and the driver.      Threads: any; every call stands alone.

    results_dir/run.json             the function's and the items' digests
    results_dir/item-0000017.result  a line of JSON (ResultHead), then the pickle
A file is written atomically, so it is whole or absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from feeding.filesystem.registry import filesystem_for
from tfos.errors import SettingsError

_MARK = "run.json"
_FORMAT = 2
_NAME = re.compile(r"item-(\d{7,})\.result")
_THREADS = 8
"""Files that are read at the same time when a run goes on."""
_HEAD_BYTES = 64 * 1024


class RunMark(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory's results are of."""

    format: int
    function: str
    function_digest: str
    num_items: int
    items_digest: str


class ResultHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an item's file."""

    item: str
    seconds: float
    metrics: dict[str, float]
    digest: str = ""
    """Of the item that was trained: of a group its rows."""


class _HeadLine(msgspec.Struct, frozen=True, kw_only=True):
    """A ResultHead as JSON, which has no NaN: metrics that are not finite are texts."""

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
        """As it was given, without a slash at the end."""
        self._fs = filesystem_for(self.path)

    def claim(self, function: str, function_digest: str, items_digest: str, num_items: int) -> None:
        """Write the mark, or compare the one that is there.

        Args:
            function: its name, for messages.
            function_digest: of its code.
            items_digest: of the items.
            num_items: their number.

        Raises:
            SettingsError: the results are of another function or of other items, or nothing can be
                written there.
        """
        mark = RunMark(
            format=_FORMAT,
            function=function,
            function_digest=function_digest,
            num_items=num_items,
            items_digest=items_digest,
        )
        path = f"{self.path}/{_MARK}"
        try:
            found = self._put_mark(path, mark)
        except OSError as error:
            raise SettingsError(
                f"results_dir={self.path} takes no results: {error}. Pass a directory in which "
                "driver and executors may write"
            ) from error
        if found.format != _FORMAT:
            reason = f"in format {found.format}, this release of tfos has format {_FORMAT}"
        elif found.function_digest != function_digest:
            reason = f"of another function or another version of it ({found.function})"
        elif found.items_digest != items_digest:
            reason = f"of other items ({found.num_items} then, {num_items} now)"
        else:
            return
        raise SettingsError(
            f"results_dir={self.path} holds results {reason}. Pass another results_dir, or "
            f"delete that one; to keep its results of items that have not changed, delete only "
            f"{path}."
        )

    def done(self) -> Iterator[tuple[int, ResultHead]]:
        """Yield position and head of each item that an earlier run has done."""
        found = [
            (int(match[1]), status.path)
            for status in self._fs.entries(self.path)
            if (match := _NAME.fullmatch(status.name))
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            heads = pool.map(self._read_head, [path for _, path in found])
            yield from zip([item for item, _ in found], heads, strict=True)

    def write(self, item: int, head: ResultHead, value: bytes) -> None:
        """Write an item's file.

        Args:
            item: its position.
            head: what is readable without its value.
            value: pickled.
        """
        metrics: Any = {
            name: number if math.isfinite(number) else str(number)
            for name, number in head.metrics.items()
        }
        line = _HeadLine(item=head.item, seconds=head.seconds, metrics=metrics, digest=head.digest)
        self._fs.write(self._file_of(item), msgspec.json.encode(line) + b"\n" + value)

    def value(self, item: int) -> bytes:
        """Return an item's pickled value."""
        with self._fs.open(self._file_of(item)) as file:
            return file.read_range(0, file.size_bytes).partition(b"\n")[2]

    def head(self, item: int) -> ResultHead | None:
        """Return the head of an item's file; None: no file is seen from here."""
        try:
            return self._read_head(self._file_of(item))
        except FileNotFoundError:
            return None

    def _file_of(self, item: int) -> str:
        return f"{self.path}/item-{item:07d}.result"

    def _read_head(self, path: str) -> ResultHead:
        with self._fs.open(path) as file:
            line = b""
            while b"\n" not in line and len(line) < file.size_bytes:
                line += file.read_range(len(line), _HEAD_BYTES)
        try:
            found = msgspec.json.decode(line.partition(b"\n")[0], type=_HeadLine)
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{path} is no result of map_train: {error}; delete it") from error
        metrics = {name: float(number) for name, number in found.metrics.items()}
        return ResultHead(
            item=found.item, seconds=found.seconds, metrics=metrics, digest=found.digest
        )

    def _put_mark(self, path: str, mark: RunMark) -> RunMark:
        """Write the mark; return the one that is there then, which may be an earlier run's."""
        try:
            self._fs.write(path, msgspec.json.encode(mark), overwrite=False)
        except FileExistsError:
            return self._read_mark(path)
        return mark

    def _read_mark(self, path: str) -> RunMark:
        with self._fs.open(path) as file:
            data = file.read_range(0, file.size_bytes)
        try:
            return msgspec.json.decode(data, type=RunMark)
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{path} is no mark of map_train ({error}); pass another results_dir"
            ) from error
