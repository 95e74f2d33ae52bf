"""Users' paths: one rule for what a path means, and the refusal of those whose files would be lost.

Covers: the rule, for inputs (`absolute_path`, in the driver `input_path`) and for directories that
a cluster writes to (`output_directory`); places that YARN removes.
Does not: know Spark (tfos.spark.facts makes an OutputPlace); touch a file system.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from feeding.errors import FeedSettingsError, PathError
from feeding.filesystem import location
from feeding.filesystem.hdfs.hadoop_conf import user_name
from feeding.filesystem.location import LOCAL, Location, parse, shown
from tfos.errors import SettingsError

_logger = logging.getLogger(__name__)

_COMPLETE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""A path with a scheme is passed through, whatever serves it."""
_CONTAINER = "CONTAINER_ID"
"""YARN sets it in every container; the container's directory has this name."""

_ADVICE = (
    "Write a URL that every host reaches, such as hdfs:///runs/7, or file:///mnt/runs/7 for a "
    "directory that every host mounts."
)


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """What decides where a driver's path leads, and whether the files stay."""

    default_fs: str
    """Hadoop's `fs.defaultFS`."""
    working_dir: str
    """The driver's; the base of relative paths where the default file system is this host's."""
    driver_in_container: bool = False
    """Whether the cluster manager started the driver (cluster deploy mode)."""


def user_location(path: str | os.PathLike[str], what: str) -> Location:
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
        raise SettingsError(f"{what}: {error}") from error


def two_slashes(path: str) -> str:
    """Return a path with Hadoop's short form of a local URL, `file:/x`, written out.

    Raises:
        FeedSettingsError: the path has another scheme, and no host.
    """
    try:
        return location.two_slashes(path)
    except PathError as error:
        raise FeedSettingsError(f"{error}, which is on fs.defaultFS") from None


def absolute_path(path: str, *, default_fs: str, working_dir: str, user: str = "") -> str:
    """Return `path` with scheme and directory.

    Args:
        path: with a scheme (kept), absolute (on `default_fs`), or relative: to the user's home on
            hdfs and viewfs, to `working_dir` on file.
        default_fs: Hadoop's `fs.defaultFS`, for example `hdfs://nn:8020` or `file:///`.
        working_dir: the executor's working directory.
        user: owner of the home directory; default: HDFS's user.

    Raises:
        FeedSettingsError: the path has a scheme with one slash, as `hdfs:/x`, and so no host.
    """
    path = two_slashes(path)
    if _COMPLETE.match(path):
        return path
    scheme, separator, authority = default_fs.partition("://")
    root = f"{scheme}{separator}{authority.rstrip('/')}"
    is_absolute = path.startswith("/")
    parts = [part for part in path.split("/") if part != "."]  # which URLs must not hold
    path = "/".join(parts)
    if is_absolute:
        return f"{root}{path or '/'}"
    if scheme in ("hdfs", "viewfs"):
        owner = user or user_name(os.environ)
        return f"{root}/user/{owner}/{path}"
    if scheme == "file":
        base = working_dir.rstrip("/")
        while parts[:1] == [".."]:  # exact: a working directory holds no symbolic link
            base, parts = base.rpartition("/")[0], parts[1:]
        return f"{root}{base}/{'/'.join(parts)}"
    _logger.warning(
        "relative path %r on the default file system %r, where no user has a directory that tfos "
        "knows: taken below its root; write a whole URL to say where",
        path,
        default_fs,
    )
    return f"{root}/{path}"


def input_path(path: str, place: OutputPlace) -> str:
    """Return the path or URL that every executor reads, by the rule of `absolute_path`.

    Args:
        path: the user's string; a refused one stays as it is, for its reader to say so.
        place: the driver's place.

    Raises:
        FeedSettingsError: the path has a scheme with one slash, as `hdfs:/x`, and so no host.
    """
    path = two_slashes(path)
    if _COMPLETE.match(path):
        return path
    whole = absolute_path(path, default_fs=place.default_fs, working_dir=place.working_dir)
    try:
        return str(parse(whole))
    except PathError:
        return path


def output_directory(path: str, what: str, place: OutputPlace) -> str:
    """Return the path or URL of a directory to write to, the same for every process.

    A plain path means what Spark means by it: a place on `fs.defaultFS`. `file://` is the user's
    statement that every host mounts the directory.

    Args:
        path: the user's string.
        what: the files that belong there, for messages.
        place: the driver's place.

    Raises:
        SettingsError: the path is refused, or what is written there would be lost.
    """
    user_location(path, what)
    path = two_slashes(path)
    is_stated = bool(_COMPLETE.match(path))
    whole = absolute_path(path, default_fs=place.default_fs, working_dir=place.working_dir)
    found = user_location(whole, what)
    refuse_container(found, what, os.environ)
    if place.driver_in_container and not is_stated:
        refused = f"{what} cannot go to {shown(path)} in cluster deploy mode: that is"
        if found.scheme == LOCAL:
            raise SettingsError(
                f"{refused} {str(found)!a} on the host of each process, wherever the cluster "
                f"manager starts it. {_ADVICE}"
            )
        if not path.startswith("/"):
            raise SettingsError(
                f"{refused} {str(found)!a}, and the user of the driver's container decides whose "
                "home that is. Write this URL, or another one, if you mean it."
            )
    if is_stated and found.scheme == LOCAL:
        return f"file://{found.path}"  # one spelling for all, such as file://localhost/x
    return path if is_stated else str(found)


def refuse_container(location: Location, what: str, environ: Mapping[str, str]) -> None:
    """Refuse a place in the directory of this YARN container, which YARN removes at its end.

    Args:
        location: where files would be written; on any file system, since a path that was made
            absolute in a container means the container's directory.
        what: the files that belong there, for the message.
        environ: environment variables of this process.

    Raises:
        SettingsError: names the place and what to write instead.
    """
    container = environ.get(_CONTAINER)
    if container and container in location.path.split("/"):
        raise SettingsError(
            f"{what} cannot go to {str(location)!a}: it names the directory of this YARN "
            f"container, which YARN removes when the container ends. {_ADVICE}"
        )


def one_host_note(directories: Mapping[str, str], hosts: Iterable[str]) -> str:
    """Return a warning of plain local directories with executors on several hosts; "": none.

    Args:
        directories: what `output_directory` returned, by what is written there.
        hosts: hosts of the executors; empty: Spark does not know it yet.
    """
    local = [
        f"{what} go to {shown(path)}"
        for what, path in directories.items()
        if not _COMPLETE.match(path)
    ]
    names = sorted(set(hosts) - {""})
    if not local or len(names) < 2:
        return ""
    more = ", …" if len(names) > 3 else ""
    return (
        f"{' and '.join(local)} on the disk of each host, and executors are on {len(names)} hosts "
        f"({', '.join(names[:3])}{more}): each host would hold a part of them. {_ADVICE}"
    )
