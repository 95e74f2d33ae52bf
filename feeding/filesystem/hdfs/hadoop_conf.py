"""Hadoop client configuration: the NameNode of a path, the user of its requests, the umask.

hdfs-native reads the same files itself for everything else.
Threads: any.
"""

from __future__ import annotations

import getpass
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from feeding.errors import PathError
from feeding.filesystem.location import Location

DEFAULT_PORT = 8020
_FILES = ("core-site.xml", "hdfs-site.xml")
_UMASK = "fs.permissions.umask-mode"
_CLAUSE = r"([ugoa]*)([=+-])([rwx]*)"
_BITS = {"u": 0o700, "g": 0o070, "o": 0o007}
_RIGHTS = {"r": 0o444, "w": 0o222, "x": 0o111}


@dataclass(frozen=True, slots=True)
class NameNode:
    """The NameNode, name service or mount table of a path, and the origin of its address."""

    url: str
    """`hdfs://host:port`, `hdfs://service` or `viewfs://table`."""
    origin: str
    """Half a sentence, for messages: "from the path"."""
    is_kerberos: bool = False
    """Whether the configuration says that users prove themselves."""


def configuration_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of Hadoop's site files, found as Hadoop's own programs do."""
    if environ.get("HADOOP_CONF_DIR"):
        return Path(environ["HADOOP_CONF_DIR"])
    if environ.get("HADOOP_HOME"):
        return Path(environ["HADOOP_HOME"]) / "etc" / "hadoop"
    return None


def read_configuration(directory: Path | None) -> dict[str, str]:
    """Return the settings in a directory's site files; files that are absent hold none.

    Raises:
        PathError: a file is not XML.
    """
    values: dict[str, str] = {}
    for name in _FILES if directory is not None else ():
        path = Path(directory or "", name)
        try:
            root = ET.parse(path).getroot()
        except FileNotFoundError:
            continue
        except ET.ParseError as error:
            raise PathError(f"{path} is not XML: {error}") from error
        for item in root.iter("property"):
            key, value = item.findtext("name"), item.findtext("value")
            if key and value is not None:
                values[key.strip()] = value.strip()
    return values


def namenode_of(location: Location, environ: Mapping[str, str]) -> NameNode:
    """Return the NameNode of a path.

    Without a host in the path it is that of `fs.defaultFS`. A host without a port is a name service
    if the configuration defines one of that name, else a NameNode at the default port.

    Args:
        location: the path.
        environ: has HADOOP_CONF_DIR or HADOOP_HOME.

    Raises:
        PathError: neither the path nor the configuration names one.
    """
    directory = configuration_directory(environ)
    values = read_configuration(directory)
    authority, origin = location.authority, "from the path"
    if not authority:
        default = values.get("fs.defaultFS", "")
        scheme, _, authority = default.partition("://")
        authority = authority.partition("/")[0]
        if scheme != location.scheme or not authority:
            where = f"fs.defaultFS is {default!r} in {directory}" if directory else _UNSET
            raise PathError(
                f"{location} names no NameNode, and {where}; write {location.scheme}://host:port/…"
            )
        origin = f"from fs.defaultFS in {directory}"
    is_service = location.scheme == "viewfs" or f"dfs.ha.namenodes.{authority}" in values
    if not is_service and ":" not in authority.rpartition("]")[2]:
        authority, origin = f"{authority}:{DEFAULT_PORT}", f"{origin}, with the default port"
    is_kerberos = values.get("hadoop.security.authentication", "").lower() == "kerberos"
    return NameNode(f"{location.scheme}://{authority}", origin, is_kerberos)


def umask_of(environ: Mapping[str, str]) -> int:
    """Return the permissions that new files and directories don't get; hdfs-native ignores them.

    Args:
        environ: has HADOOP_CONF_DIR or HADOOP_HOME.

    Raises:
        PathError: the configuration's umask is neither octal nor symbolic.
    """
    directory = configuration_directory(environ)
    value = read_configuration(directory).get(_UMASK, "022")
    if re.fullmatch(r"0*[0-7]{3}", value):
        return int(value, 8)
    given = 0  # unlike the octal form, the symbolic one says what they do get
    for clause in value.split(","):
        match = re.fullmatch(_CLAUSE, clause.strip())
        if match is None:
            raise PathError(
                f"{_UMASK} is {value!r} in {directory}; write it as 027 or u=rwx,g=rx,o="
            )
        who, sign, rights = match.groups()
        everyone = not who or "a" in who
        whose = 0o777 if everyone else sum(_BITS[each] for each in set(who))
        bits = sum(_RIGHTS[each] for each in set(rights))
        if sign == "=":
            given &= ~whose
        given = given & ~(whose & bits) if sign == "-" else given | (whose & bits)
    return 0o777 & ~given


def user_name(environ: Mapping[str, str]) -> str:
    """Return the user of the requests, without Kerberos.

    YARN may run all containers as one user; Spark reads and writes there as SPARK_USER.
    """
    named = environ.get("HADOOP_USER_NAME") or environ.get("SPARK_USER")
    if named:
        return named
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        return str(os.getuid())


_UNSET = "neither HADOOP_CONF_DIR nor HADOOP_HOME is set"
