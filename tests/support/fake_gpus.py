"""A program nvidia-smi for tests: it answers from two files, which may change at any time."""

from __future__ import annotations

from pathlib import Path

import pytest

_PROGRAM = """#!/bin/sh
case "$1" in
  --query-gpu=index,uuid,name,memory.used,memory.total) cat '{place}/gpus' ;;
  --query-compute-apps=pid,gpu_uuid,used_memory,process_name) cat '{place}/holders' ;;
  *) echo "unknown query $1"; exit 2 ;;
esac
"""


class FakeGpus:
    """GPUs of this host, as nvidia-smi tells of them.

    Args:
        place: an empty directory, which comes first on PATH.
        monkeypatch: undoes that.
    """

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = place
        monkeypatch.setenv("PATH", str(place), prepend=":")

    def have(self, count: int, *holders: tuple[int, int]) -> None:
        """Answer with so many GPUs of 81,559 MB.

        Args:
            count: of GPUs; the UUID of the first one begins with GPU-0.
            holders: pid and GPU of each process that computes.
        """
        self.answer(
            *(f"{number}, GPU-{number}aa-bb, NVIDIA H100, 512, 81559" for number in range(count)),
            holders=[f"{pid}, GPU-{gpu}aa-bb, 510, /usr/bin/python3" for pid, gpu in holders],
        )

    def answer(self, *lines: str, holders: list[str] | None = None) -> None:
        """Answer with these lines.

        Args:
            lines: about GPUs.
            holders: about processes.
        """
        (self._place / "gpus").write_text("".join(f"{line}\n" for line in lines))
        (self._place / "holders").write_text("".join(f"{line}\n" for line in holders or []))
        self.be(_PROGRAM.format(place=self._place))

    def be(self, program: str) -> None:
        """Be this shell script."""
        path = self._place / "nvidia-smi"
        new = path.with_suffix(".new")
        new.write_text(program)
        new.chmod(0o755)
        new.replace(path)
