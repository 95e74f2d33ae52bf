"""What requests are made of: bounded numbers and names, and what makes a request unique.

Covers: the types, each with its bounds.      Does not: know a request (ps.protocol.messages).
Pure.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ps.manifest.table_spec import MAX_TABLES
from ps.record_cut import MAX_SEQUENCE

MAX_MANIFEST_BYTES = 16 << 20
"""100,000 parameters with names of 150 characters."""
MAX_WAIT_S = 86_400.0
MAX_PATH_LENGTH = 4096
MAX_REASON_LENGTH = 1024

Sequence = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCE)]
Session = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Rows = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
Digest = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
SaveId = Annotated[str, msgspec.Meta(pattern="^[0-9a-z-]{1,64}$")]
TableNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TABLES)]
TableNumbers = Annotated[tuple[TableNumber, ...], msgspec.Meta(max_length=MAX_TABLES)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_LENGTH)]
DirectoryName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]


class Number(msgspec.Struct, frozen=True, array_like=True):
    """What makes a changing request of one worker unique; see ps.exactly_once."""

    session: Session
    sequence: Sequence
    acknowledged: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """The last of this session's requests that this server has answered with success."""
    told_clock: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)] = 0
    """The worker's newest clock in those answers; a restored server learns by it how far it was."""


class BatchName(msgspec.Struct, frozen=True, array_like=True):
    """A batch whose rows were looked up to train on: the number of that lookup."""

    session: Session
    sequence: Sequence
