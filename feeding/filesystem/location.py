"""Locations: parsing and joining of paths and URLs, and the refusal of unsafe ones.

Does not: touch a file system.
Threads: any; pure.

A location is any path that a user names. A name below a location comes from a listing, a manifest
or a partition, and is checked more strictly.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, replace

from feeding.errors import PathError

LOCAL = "file"
HADOOP = frozenset({"hdfs", "viewfs"})
MAX_PATH_BYTES = 8000
"""HDFS's limit in characters; Linux allows 4096 bytes."""
MAX_NAME_BYTES = 255
"""Limit of one component, on Linux and by default on HDFS."""

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/(?!/).*)", re.DOTALL)
"""Hadoop's short form of a scheme without a host."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:]*)(:[0-9]{1,5})?")
_SHOWN = 60
_SEPARATORS = frozenset("/\\:")
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode's control, format, surrogate, private and line-separating characters."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path with the file system that it is on."""

    scheme: str
    """Lower case; `file` for a plain path."""
    authority: str
    """Host and port, name service or bucket; empty on this host."""
    path: str
    """Begins with `/`, except for a relative path of this host; ends without one. Of this host and
    HDFS, it has no empty component and no `.`, as in what they list."""

    def __str__(self) -> str:
        return self.path if self.scheme == LOCAL else f"{self.root}{self.path}"

    @property
    def root(self) -> str:
        """`scheme://authority`."""
        return f"{self.scheme}://{self.authority}"

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]

    def child(self, name: str) -> Location:
        """Return the location of a name below this one, of one or more components, after a check.

        Raises:
            PathError: it could leave this location, or is illegal on some file system.
        """
        for part in name.split("/"):
            reason = _wrong_with(part)
            if reason:
                raise PathError(f"{shown(name)} cannot name a file below {self}: {reason}")
        return self._with_path(f"{self.path.rstrip('/')}/{name}" if self.path != "." else name)

    def sibling(self, name: str) -> Location:
        """Return another name in the same directory."""
        head, slash, _ = self.path.rpartition("/")
        return self._with_path(f"{head}{slash}{name}")

    def at(self, path: str) -> Location:
        """Return the location of another path that the same file system listed."""
        return _local(path) if self.scheme == LOCAL else parse(f"{self.root}{path}")

    def _with_path(self, path: str) -> Location:
        _check_length(path)
        return replace(self, path=path)


def parse(text: str | os.PathLike[str]) -> Location:
    """Parse a user's path or URL.

    Nothing is decoded: `%2e` is three characters. A path of this host may hold `..`; a URL may not,
    because servers differ in its meaning.

    Raises:
        PathError: no path, or one that servers could read in several ways.
    """
    given: object = os.fspath(text)
    if not isinstance(given, str) or not given:
        raise PathError(f"a path must be a non-empty str, got {given!r}")
    if "\0" in given:
        raise PathError(f"{shown(given)} is not a path: it holds a NUL")
    given = two_slashes(given)
    match = _SCHEME.match(given)
    if match is None:
        return _local(given)
    scheme = match[1].lower()
    authority, slash, path = given[match.end() :].partition("/")
    path = slash + path
    if scheme == LOCAL:
        if authority not in ("", "localhost"):
            raise PathError(f"{shown(given)} names the host {authority!r}; file:// is this host")
        _check_components(given, path)
        return _local(path or "/")
    _check_remote(given, authority, path)
    path = _plain(path or "/") if scheme in HADOOP else path.rstrip("/")
    return Location(scheme, authority, path or "/")


def shown(text: str) -> str:
    """Return a path or name for a message: escaped and shortened."""
    return ascii(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def two_slashes(text: str) -> str:
    """Return a path with Hadoop's short form of a local URL, `file:/x`, written out.

    Raises:
        PathError: it has another scheme, and no host.
    """
    short = _ONE_SLASH.fullmatch(text)
    if short is None:
        return text
    if short[1].lower() != LOCAL:
        raise PathError(f"{shown(text)} names no host; use {short[1]}://host/..., or a path alone")
    return f"file://{short[2]}"


def _local(path: str) -> Location:
    _check_length(path)
    return Location(LOCAL, "", _plain(path))


def _plain(path: str) -> str:
    """Return a path with one name only: without empty components and `.`."""
    parts = "/".join(part for part in path.split("/") if part not in ("", "."))
    return f"/{parts}" if path.startswith("/") else parts or "."


def _check_remote(given: str, authority: str, path: str) -> None:
    if "@" in authority:
        raise PathError(
            f"a URL with a user or a password is refused (host {authority.rpartition('@')[2]!r}); "
            "give them to the file system's own configuration"
        )
    if any(unicodedata.category(letter) in _INVISIBLE for letter in given):
        raise PathError(f"{shown(given)} is refused: it holds characters that cannot be seen")
    if "\\" in authority:
        raise PathError(f"{shown(given)} is refused: a backslash in the name of a host")
    if not _AUTHORITY.fullmatch(authority):
        raise PathError(f"{shown(given)} is refused: a port number must follow the host and ':'")
    _check_components(given, path)
    _check_length(path)


def _check_components(given: str, path: str) -> None:
    parts = path.strip("/").split("/")
    if ".." in parts or "." in parts:
        raise PathError(f"{shown(given)} is refused: a URL must not hold '.' or '..'")


def _check_length(path: str) -> None:
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > MAX_PATH_BYTES:
        raise PathError(f"{shown(path)} has {length} bytes, the limit is {MAX_PATH_BYTES}")


def _wrong_with(part: str) -> str:
    """Return why a component is refused; empty if it is legal."""
    if not part:
        return "an empty component"
    if any(unicodedata.category(letter) in _INVISIBLE for letter in part):
        return "characters that cannot be seen"
    plain = unicodedata.normalize("NFKC", part)
    if not plain.strip(". "):
        return "nothing but dots"
    if _SEPARATORS & set(part) or (_SEPARATORS & set(plain)):
        return "a separator of some system"
    if re.search(r"%(2e|2f|5c|00)", part, re.IGNORECASE):
        return "an encoded dot or separator"
    if len(part.encode("utf-8")) > MAX_NAME_BYTES:
        return f"more than {MAX_NAME_BYTES} bytes"
    return ""
