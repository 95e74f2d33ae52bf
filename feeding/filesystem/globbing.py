"""Glob patterns with one meaning on every file system, and the lookup of a path that may not exist.

Covers: `*` and `?` within one component, `[a-c]`, `[!a-c]`, `{this,that}` anywhere, `**` as a
component for any number of directories. A backslash escapes the next character. As in a shell, no
wildcard matches a dot at the beginning of a name: hidden files are unfinished files.
Does not: list directories (the file systems do).
Threads: any.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from feeding.errors import PathError
from feeding.filesystem.interface import FileStatus, FileSystem
from feeding.filesystem.location import Location, parse, shown

MAX_ALTERNATIVES = 1000
_MAGIC = re.compile(r"[*?\[{\\]")


def glob(filesystem: FileSystem, pattern: Location) -> list[FileStatus]:
    """Return the files on a file system that a pattern matches, sorted by path, each once.

    Args:
        filesystem: the pattern's file system.
        pattern: a location whose path may hold wildcards.
    """
    found: dict[str, FileStatus] = {}
    for path in alternatives(pattern.path):
        parts = path.split("/")
        fixed = next((i for i, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
        base = "/".join(parts[:fixed]) or ("/" if path.startswith("/") else ".")
        start = replace(pattern, path=base)
        for status in _walk(filesystem, start, parts[fixed:]):
            found[status.path] = status
    return [found[path] for path in sorted(found)]


def alternatives(pattern: str) -> list[str]:
    """Expand a pattern's braces: `a{b,c}` is `ab` and `ac`.

    Raises:
        PathError: a brace is not closed, or there are more than MAX_ALTERNATIVES.
    """
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        text = waiting.pop()
        braces = _first_braces(text)
        if braces is None:
            done.append(text)
        else:
            begin, end, choices = braces
            waiting += [text[:begin] + choice + text[end:] for choice in reversed(choices)]
        if len(done) + len(waiting) > MAX_ALTERNATIVES:
            raise PathError(f"{shown(pattern)} has more than {MAX_ALTERNATIVES} alternatives")
    return done


def component(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of one component of a pattern."""
    out = [] if pattern.startswith((".", "\\.")) else [r"(?!\.)"]
    position = 0
    while position < len(pattern):
        letter = pattern[position]
        position += 1
        if letter == "*":
            out.append(".*")
        elif letter == "?":
            out.append(".")
        elif letter == "\\" and position < len(pattern):
            out.append(re.escape(pattern[position]))
            position += 1
        elif letter == "[":
            text, position = _set(pattern, position)
            out.append(text)
        else:
            out.append(re.escape(letter))
    return re.compile("".join(out), re.DOTALL)


def _walk(filesystem: FileSystem, directory: Location, parts: list[str]) -> Iterator[FileStatus]:
    if not parts:
        status = find(filesystem, directory)
        if status is not None:
            yield status
        return
    part, rest = parts[0], parts[1:]
    if not _MAGIC.search(part):
        yield from _walk(filesystem, _below(directory, part), rest)
        return
    entries = _entries(filesystem, directory)
    if part == "**":
        yield from _walk(filesystem, directory, rest or ["*"])
        deeper = [entry for entry in entries if entry.is_directory and entry.name[:1] != "."]
        rest = parts
    else:
        wanted = component(part)
        matching = [entry for entry in entries if wanted.fullmatch(entry.name)]
        if not rest:
            yield from matching
        deeper = [entry for entry in matching if rest and entry.is_directory]
    for entry in deeper:
        yield from _walk(filesystem, parse(entry.path), rest)


def _entries(filesystem: FileSystem, directory: Location) -> list[FileStatus]:
    """Return the entries of a directory; none if it does not exist or is a file."""
    try:
        return filesystem.entries(str(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _below(directory: Location, name: str) -> Location:
    if directory.path == ".":
        return replace(directory, path=name)
    return replace(directory, path=f"{directory.path.rstrip('/')}/{name}")


def _first_braces(text: str) -> tuple[int, int, list[str]] | None:
    """Return where the first braces begin and end, and what they hold, split at their commas."""
    depth = begin = 0
    commas: list[int] = []
    position = 0
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter == "{":
            depth += 1
            if depth == 1:
                begin, commas = position, [position]
        elif letter == "," and depth == 1:
            commas.append(position)
        elif letter == "}" and depth:
            depth -= 1
            if not depth:
                commas.append(position)
                choices = [text[a + 1 : b] for a, b in itertools.pairwise(commas)]
                return begin, position + 1, choices
        position += 1
    if depth:
        raise PathError(f"{shown(text)} has a brace that is not closed")
    return None


def _set(pattern: str, position: int) -> tuple[str, int]:
    """Translate `[…]`, from the character after the bracket; an open bracket is literal."""
    end = pattern.find("]", position + (2 if pattern.startswith("!", position) else 1))
    if end < 0:
        return r"\[", position
    inside = pattern[position:end]
    negated = inside.startswith(("!", "^"))
    letters = inside[negated:]
    body = "".join(letter if letter == "-" else re.escape(letter) for letter in letters)
    try:
        re.compile(f"[{body}]")
    except re.error as error:
        raise PathError(f"{shown(pattern)} has a bad set: {error}") from error
    return f"[{'^' if negated else ''}{body}]", end + 1


def find(filesystem: FileSystem, location: Location) -> FileStatus | None:
    """Return a path's status, None if the path does not exist.

    Args:
        filesystem: filesystem of the path.
        location: the path.
    """
    try:
        return filesystem.status(str(location))
    except (FileNotFoundError, NotADirectoryError):
        return None
