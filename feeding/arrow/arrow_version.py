"""The oldest pyarrow that files are read with; every module that reads with it looks here first.

Does not: import anything of pyarrow but its version.      Pure.
"""

from __future__ import annotations

import pyarrow as pa

from feeding.errors import MissingPackage

PYARROW_FLOOR = (18, 0, 0)
"""pyproject's; below 14.0.1 a file can run code."""


def check_pyarrow(version: str = pa.__version__) -> None:
    """Refuse a pyarrow that may run code of a file's author.

    Raises:
        MissingPackage: names both versions.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < PYARROW_FLOOR[: len(numbers)]:
        floor = ".".join(map(str, PYARROW_FLOOR))
        raise MissingPackage(
            f"pyarrow {version} is installed, tfos needs {floor} or newer (old ones run code that "
            f"a file brings); pip install 'pyarrow>={floor}'"
        )
