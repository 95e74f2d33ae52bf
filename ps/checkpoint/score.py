"""Score: what a checkpoint's parameters were measured at, and which names a metric may have.

Covers: the record and its checks, comparing two of one kind.
Does not: keep the best checkpoint (ps.checkpoint.writer), know which metrics Keras has
(tfos.metric_direction).
Threads: none; every function stands alone. Imports no numpy: supervisors check names with it.
"""

from __future__ import annotations

import math

import msgspec

from ps.errors import PSSettingsError
from rpc.field_texts import with_field_texts

METRIC_NAME = "a name of 1 to 200 printable characters, such as 'val_loss'"
"""What `is_metric_name` asks for, for messages."""


def is_metric_name(name: object) -> bool:
    """Return whether a metric may have this name."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= 200


@with_field_texts
class Score(msgspec.Struct, frozen=True):
    """The value of a metric for a checkpoint's parameters, from the process that saved it.

    The best scored step of each metric in a directory is kept; see writer.keep_newest.
    """

    metric: str
    """Name of the metric, such as `val_loss`."""
    value: float
    """A finite number."""
    higher_is_better: bool
    """Whether a larger value is better, as for accuracy."""

    def __post_init__(self) -> None:
        if not is_metric_name(self.metric):
            raise PSSettingsError(f"metric must be {METRIC_NAME}, got {self.metric!r}")
        value: object = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(self.value):
            raise PSSettingsError(
                f"value of {self.metric!r} must be a finite number, got {value!r}; a checkpoint "
                "without a score needs none"
            )
        if not isinstance(self.higher_is_better, bool):
            raise PSSettingsError(
                f"higher_is_better must be True or False, got {self.higher_is_better!r}"
            )

    @property
    def kind(self) -> tuple[str, bool]:
        """Scores of one kind can be compared."""
        return self.metric, self.higher_is_better

    def beats(self, other: Score | None) -> bool:
        """Whether it is better than another of its kind; an equal one is not."""
        if other is None:
            return True
        return self.value > other.value if self.higher_is_better else self.value < other.value
