"""Files of a data set, opened as they were listed.

Covers: refusing a file that has changed since.
Does not: list (feeding.reading.discover), read (feeding.formats).
Threads: any.
"""

from __future__ import annotations

from feeding.errors import FileChanged
from feeding.filesystem.interface import RangeReader, is_other
from feeding.filesystem.registry import filesystem_for
from feeding.reading.splits import SourceFile


def open_listed(file: SourceFile) -> RangeReader:
    """Open a file that was listed.

    Raises:
        FileChanged: the file has another size or version now.
        OSError: it cannot be read.
    """
    opened = filesystem_for(file.path).open(file.path)
    if opened.size_bytes == file.size_bytes and not is_other(file.version, opened.version):
        return opened
    opened.close()
    then, now = f"had {file.size_bytes} bytes", f"{opened.size_bytes}"
    if opened.size_bytes == file.size_bytes:
        then, now = f"was {file.version}", opened.version
    raise FileChanged(
        f"{file.path} {then} when it was listed, now {now}; read only files that are no longer "
        "written"
    )
