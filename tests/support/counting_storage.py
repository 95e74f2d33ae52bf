"""A checkpoint root that counts what it is asked, by file and by kind of question."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import BinaryIO

from ps.checkpoint.storage import LocalStorage


class CountingStorage(LocalStorage):
    """A local root that counts its calls.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: Counter[tuple[str, str]] = Counter()
        """By (kind, name)."""
        self._lock = threading.Lock()

    def asked(self, kind: str, part: str = "") -> int:
        """Return how many calls of a kind had this in their file's name."""
        with self._lock:
            return sum(n for (each, name), n in self.calls.items() if each == kind and part in name)

    @property
    def num_calls(self) -> int:
        with self._lock:
            return self.calls.total()

    def _count(self, kind: str, name: str) -> None:
        with self._lock:
            self.calls[kind, name] += 1

    def names(self, directory: str = "") -> list[str]:
        self._count("names", directory)
        return super().names(directory)

    def sizes(self, directory: str) -> dict[str, int]:
        self._count("sizes", directory)
        return super().sizes(directory)

    def size(self, name: str) -> int:
        self._count("size", name)
        return super().size(name)

    def open(self, name: str) -> BinaryIO:
        self._count("open", name)
        return super().open(name)

    def is_directory(self, name: str) -> bool:
        self._count("is_directory", name)
        return super().is_directory(name)
