"""Found files: what one worker has found of the files, small enough for all workers to compare.

Each worker cuts its share from a list of its own. Where the lists differ, some rows are read twice
and others never. Each host may have its copies in a directory of its own.

Covers: the summary, the sentence about two that differ.
Does not: list files (discover), exchange summaries (tfos.reading, tfos.keras.fit).
Threads: any; pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from feeding.filesystem.interface import is_other
from feeding.reading.host_paths import without_directory
from feeding.reading.positions import fingerprint, versions
from feeding.reading.splits import SourceFile

_DIGEST_BYTES = 4
_MOST_DIGESTS = 2048
"""16 KiB per worker; of more files only the numbers are sent."""


class FoundFiles(msgspec.Struct, frozen=True):
    """The files that one worker has found."""

    files: str
    """Their `fingerprint`."""
    num_files: int
    num_bytes: int
    digests: bytes = b""
    """Two of 4 bytes for each file, by path: of name and size, and of the version, 0 if it is
    unknown. Empty: there are too many files."""
    versions: str = ""
    """See positions.versions."""

    def __str__(self) -> str:
        return f"{self.num_files} files of {self.num_bytes} bytes"


def summed_up(files: Sequence[SourceFile]) -> FoundFiles:
    """Return the summary of all files of one data set."""
    named = without_directory(files) if len(files) <= _MOST_DIGESTS else []
    num_bytes = sum(file.size_bytes for file in files)
    digests = b"".join(map(_digests, named))
    return FoundFiles(fingerprint(files), len(files), num_bytes, digests, versions(files))


def difference(
    files: Sequence[SourceFile], worker: int, found: Mapping[int, FoundFiles | None]
) -> str:
    """Return which worker has found other files than this one, and where; empty: none has.

    Args:
        files: those of this worker.
        worker: rank of this worker.
        found: by rank, also of this worker if it is known; None: the worker reads no files.
    """
    own = found.get(worker) or summed_up(files)
    for rank, other in sorted(found.items()):
        if other is None:
            continue
        found_text = f"worker {rank} has found {other}, worker {worker} {own}"
        if other.files != own.files:
            return found_text + _first(files, other)
        if is_other(other.versions, own.versions):
            return (
                f"{found_text}; they have the same names and sizes, but were written again between "
                f"the two listings (versions {other.versions} there, {own.versions} here)"
                f"{_first(files, other)}"
            )
    return ""


def _digests(file: SourceFile) -> bytes:
    named = _digest((file.path, file.size_bytes, file.piece_rows))
    return named + (_digest(file.version) if file.version else _UNKNOWN)


def _digest(of: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(of), digest_size=_DIGEST_BYTES).digest()


_UNKNOWN = bytes(_DIGEST_BYTES)


def _are_other(one: bytes, other: bytes) -> bool:
    if one[:_DIGEST_BYTES] != other[:_DIGEST_BYTES]:
        return True
    versions = (one[_DIGEST_BYTES:], other[_DIGEST_BYTES:])
    return versions[0] != versions[1] and _UNKNOWN not in versions


def _first(files: Sequence[SourceFile], other: FoundFiles) -> str:
    if not other.digests:
        return ""
    for number, (file, named) in enumerate(
        zip(sorted(files), without_directory(files), strict=True)
    ):
        at = number * 2 * _DIGEST_BYTES
        if _are_other(other.digests[at : at + 2 * _DIGEST_BYTES], _digests(named)):
            version = f", {named.version}" if named.version else ""
            first = f"{file.path} of {file.size_bytes} bytes{version}"
            return f"; the first that differs is here {first}"
    return "; the further ones are not here"
