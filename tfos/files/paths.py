"""Users' paths: refuses ambiguous ones, resolves the others as TensorFlowOnSpark does.

Pure: touches no file system.
"""

from __future__ import annotations

import getpass
import logging
import re

from feeding.errors import PathError
from feeding.filesystem.location import Location, parse
from tfos.errors import SettingsError

_logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""A path with a scheme is passed through, whatever serves it."""


def user_location(path: str, what: str) -> Location:
    """Parse the path or URL of a directory from a user.

    Args:
        path: the user's string.
        what: the files that belong there, for the message.

    Raises:
        SettingsError: the path is refused, and shown escaped.
    """
    try:
        return parse(path)
    except PathError as error:
        raise SettingsError(f"{what} cannot be written there: {error}") from error


def absolute_path(path: str, *, default_fs: str, working_dir: str, user: str = "") -> str:
    """Return `path` with scheme and directory.

    Args:
        path: with a scheme (kept), absolute (on `default_fs`), or relative: to the user's home on
            hdfs and viewfs, to `working_dir` on file.
        default_fs: Hadoop's `fs.defaultFS`, for example `hdfs://nn:8020` or `file:///`.
        working_dir: the executor's working directory.
        user: owner of the home directory; default: the user of this process.
    """
    if _COMPLETE.match(path):
        return path
    scheme, separator, authority = default_fs.partition("://")
    root = f"{scheme}{separator}{authority.rstrip('/')}"
    if path.startswith("/"):
        return root + path
    if scheme in ("hdfs", "viewfs"):
        return f"{root}/user/{user or getpass.getuser()}/{path}"
    if scheme == "file":
        return f"{root}{working_dir.rstrip('/')}/{path}"
    _logger.warning(
        "relative path %r on unknown default file system %r: taken below its root", path, default_fs
    )
    return f"{root}/{path}"
