"""Taking paths apart and putting them together, and refusing those that lead astray.

Pure: touches no file system. A location is whatever a user may name; a name below a location is
what a listing, a manifest or a partition calls one file, and is trusted less.
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
"""HDFS's own limit in characters; Linux takes 4096 bytes."""
MAX_NAME_BYTES = 255
"""Of one component, on Linux and by default on HDFS."""

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
    """Begins with `/`, except for a relative path of this host; ends without one."""

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
        """Return a name below this one, one or more components, after checking it.

        Raises:
            PathError: it could lead out of this location, or is no name on some file system.
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
        """Return another path of the same file system, as the file system itself named it."""
        return parse(path if self.scheme == LOCAL else f"{self.root}{path}")

    def _with_path(self, path: str) -> Location:
        _check_length(path)
        return replace(self, path=path)


def parse(text: str | os.PathLike[str]) -> Location:
    """Take a user's path or URL apart.

    Nothing is decoded: `%2e` is three characters. On this host `..` means what it always means; in
    a URL it is refused, because servers differ in what they make of it.

    Raises:
        PathError: no path, or one that servers would read differently than it looks.
    """
    given: object = os.fspath(text)
    if not isinstance(given, str) or not given:
        raise PathError(f"a path must be a non-empty str, got {given!r}")
    if "\0" in given:
        raise PathError(f"{shown(given)} is no path: it holds a NUL")
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
    return Location(scheme, authority, path.rstrip("/") or "/")


def shown(text: str) -> str:
    """Return a path or name as a message may show it: escaped and short."""
    return ascii(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _local(path: str) -> Location:
    _check_length(path)
    return Location(LOCAL, "", path.rstrip("/") or "/")


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
        raise PathError(f"{shown(given)} is refused: behind a host and ':' goes a port's number")
    _check_components(given, path)
    _check_length(path)


def _check_components(given: str, path: str) -> None:
    parts = path.strip("/").split("/")
    if ".." in parts or "." in parts:
        raise PathError(f"{shown(given)} is refused: a URL must not hold '.' or '..'")


def _check_length(path: str) -> None:
    length = len(path.encode("utf-8", "surrogateescape"))
    if length > MAX_PATH_BYTES:
        raise PathError(f"{shown(path)} has {length} bytes, at most {MAX_PATH_BYTES} work")


def _wrong_with(part: str) -> str:
    """Say why one component is refused; empty if it is fine."""
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
