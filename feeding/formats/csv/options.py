"""CSV options: CsvRequest, and the types that a CSV column may have.

Does not: read files (source).
Threads: any; frozen data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from feeding.arrow.arrays import DTYPES
from feeding.errors import FeedSettingsError

TYPES = {
    **{name: getattr(pa, "bool_" if name == "bool" else name)() for name in DTYPES.values()},
    "str": pa.string(),
    "bytes": pa.binary(),
}
"""Arrow types by dtype."""
del TYPES["float16"]  # pyarrow cannot parse it
_TAKEN = '"\r\n\0'


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRequest:
    """How to read CSV files.

    Args:
        columns: names, or names with dtypes ("int64", "float32", "bool", "str", "bytes", …); None:
            all. A type that is not given is guessed from the first lines of the first file.
        header: whether the first line of each file has the names; or the names, for files without
            that line; False: _c0, _c1, …
        delimiter: one character between values.
        quoted_newlines: whether quoted values may hold line ends; a file is then one piece.
        escape: one character before a quote within a quoted value, a backslash in files that
            Spark wrote; None: such a quote is doubled.
        nulls: value that replaces an empty one, by column. Other columns of numbers refuse empty
            values.
    """

    columns: Sequence[str] | Mapping[str, str] | None = None
    header: bool | Sequence[str] = True
    delimiter: str = ","
    quoted_newlines: bool = False
    escape: str | None = None
    nulls: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.columns
        if isinstance(given, str) or not all(isinstance(name, str) for name in given or ()):
            raise FeedSettingsError(f"columns must be names, or dtypes by name, got {given!r}")
        if given is not None and not len(given):
            raise FeedSettingsError("no columns were requested; name at least one")
        for name, dtype in given.items() if isinstance(given, Mapping) else ():
            if dtype not in TYPES:
                raise FeedSettingsError(
                    f"column {name!r}: dtype {dtype!r} is not one of {', '.join(sorted(TYPES))}"
                )
        if given is not None and len(set(given)) < len(given):
            raise FeedSettingsError(f"a column is requested twice: {list(given)}")
        delimiter: object = self.delimiter
        if not isinstance(delimiter, str) or len(delimiter.encode()) != 1 or delimiter in _TAKEN:
            raise FeedSettingsError(
                "delimiter must be one ASCII character, no quote and no line end, got "
                f"{delimiter!r}"
            )
        self._check_escape()
        self._check_header()

    def _check_escape(self) -> None:
        escape: object = self.escape
        if escape is None:
            return
        taken = _TAKEN + self.delimiter
        if not isinstance(escape, str) or len(escape.encode()) != 1 or escape in taken:
            raise FeedSettingsError(
                "escape must be one ASCII character, no quote, delimiter or line end, got "
                f"{escape!r}"
            )

    def _check_header(self) -> None:
        names = self.header
        if isinstance(names, bool):
            return
        if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
            raise FeedSettingsError(f"header must be True, False or names, got {names!r}")
        if len(set(names)) < len(names):
            raise FeedSettingsError(f"header names two columns alike: {list(names)}")
