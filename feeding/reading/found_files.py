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

from feeding.reading.host_paths import without_directory
from feeding.reading.positions import fingerprint, versions
from feeding.reading.splits import SourceFile

_DIGEST_BYTES = 4
_MOST_DIGESTS = 4096
"""16 KiB per worker; of more files only the numbers are told."""


class FoundFiles(msgspec.Struct, frozen=True):
    """The files that one worker has found."""

    files: str
    """Their `fingerprint`, and their `versions`."""
    num_files: int
    num_bytes: int
    digests: bytes = b""
    """4 bytes for each file, by path; empty: there are too many files."""

    def __str__(self) -> str:
        return f"{self.num_files} files of {self.num_bytes} bytes"


def summed_up(files: Sequence[SourceFile]) -> FoundFiles:
    """Return the summary of all files of one data set."""
    named = without_directory(files) if len(files) <= _MOST_DIGESTS else []
    num_bytes = sum(file.size_bytes for file in files)
    found = f"{fingerprint(files)} {versions(files)}"
    return FoundFiles(found, len(files), num_bytes, b"".join(map(_digest, named)))


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
        if other is not None and other.files != own.files:
            return f"worker {rank} has found {other}, worker {worker} {own}{_first(files, other)}"
    return ""


def _digest(file: SourceFile) -> bytes:
    text = msgspec.json.encode((file.path, file.size_bytes, file.piece_rows, file.version))
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _first(files: Sequence[SourceFile], other: FoundFiles) -> str:
    if not other.digests:
        return ""
    for number, (file, named) in enumerate(
        zip(sorted(files), without_directory(files), strict=True)
    ):
        at = number * _DIGEST_BYTES
        if other.digests[at : at + _DIGEST_BYTES] != _digest(named):
            version = f", {named.version}" if named.version else ""
            first = f"{file.path} of {file.size_bytes} bytes{version}"
            return f"; the first that differs is here {first}"
    return "; the further ones are not here"
