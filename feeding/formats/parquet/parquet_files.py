"""All files of a Parquet data set before the first row is read: their footers.

Covers: read_footers (many at a time), FooterShelf, open_listed.
Does not: decode (parquet_pages), choose columns (parquet_plan).
Threads: footers are read on threads of their own, which end with the call.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from feeding.config import MIB
from feeding.errors import DataError, FileChanged
from feeding.filesystem.interface import RangeReader
from feeding.filesystem.registry import filesystem_for
from feeding.formats.parquet.footer import Footer, ParquetLimits, read_footer
from feeding.reading.bad_records import BadData
from feeding.reading.splits import SourceFile

_logger = logging.getLogger(__name__)
_AT_ONCE = 16
_TOLD_EACH = 1000
_SHELF_BYTES = 16 * MIB


class FooterShelf:
    """Footers that were read, the last used ones; the same file is opened for each of its pieces.

    Args:
        limits: what a file may ask for.
    """

    def __init__(self, limits: ParquetLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[str, Footer] = collections.OrderedDict()
        self._bytes = 0

    def footer(self, file: RangeReader) -> Footer:
        """Return the footer of an open file; see read_footer."""
        with self._lock:
            if footer := self._held.get(file.path):
                self._held.move_to_end(file.path)
                return footer
        footer = read_footer(file, self._limits)
        with self._lock:
            if file.path not in self._held:
                self._held[file.path] = footer
                self._bytes += len(footer.tail)
            while self._bytes > _SHELF_BYTES and len(self._held) > 1:
                self._bytes -= len(self._held.popitem(last=False)[1].tail)
        return footer


def open_listed(file: SourceFile) -> RangeReader:
    """Open a file that was listed.

    Raises:
        FileChanged: it has another size now.
    """
    opened = filesystem_for(file.path).open(file.path)
    if opened.size_bytes != file.size_bytes:
        opened.close()
        raise FileChanged(
            f"{file.path} had {file.size_bytes} bytes when it was listed, now "
            f"{opened.size_bytes}; train on files that are not written to any more"
        )
    return opened


def read_footers(
    files: Sequence[SourceFile], shelf: FooterShelf, bad: BadData
) -> Iterator[tuple[SourceFile, Footer]]:
    """Yield the files with their footers; damaged ones are left out if the policy says so.

    Raises:
        DataError: a file is damaged, and the policy is to fail.
        OSError: a file cannot be read.
    """

    def look(file: SourceFile) -> Footer | DataError:
        with contextlib.closing(open_listed(file)) as opened:
            try:
                return shelf.footer(opened)
            except DataError as error:
                return error

    with ThreadPoolExecutor(min(_AT_ONCE, len(files)), thread_name_prefix="footers") as pool:
        try:
            for number, (file, footer) in enumerate(
                zip(files, pool.map(look, files), strict=True), 1
            ):
                if isinstance(footer, Footer):
                    yield file, footer
                else:
                    bad.skip(file.path, 0, footer)
                if not number % _TOLD_EACH:
                    _logger.info("looked into %d of %d Parquet files", number, len(files))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
