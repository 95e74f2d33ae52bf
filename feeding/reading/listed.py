"""Files of a data set, opened as they were listed.

Covers: refusing a file that has changed since.
Does not: list (feeding.reading.discover), read (feeding.formats).
Threads: any.
"""

from __future__ import annotations

from feeding.errors import FileChanged
from feeding.filesystem.interface import RangeReader
from feeding.filesystem.registry import filesystem_for


def open_listed(path: str, size_bytes: int) -> RangeReader:
    """Open a file that was listed.

    Args:
        path: of the file.
        size_bytes: that it had when it was listed.

    Raises:
        FileChanged: the file has another size now.
        OSError: it cannot be read.
    """
    opened = filesystem_for(path).open(path)
    if opened.size_bytes != size_bytes:
        opened.close()
        raise FileChanged(
            f"{path} had {size_bytes} bytes when it was listed, now {opened.size_bytes}; read "
            "files that are not written to any more"
        )
    return opened
