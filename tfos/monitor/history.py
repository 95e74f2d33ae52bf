"""History of a training: each epoch of `fit` with its metrics, as records and as columns. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rpc.field_texts import with_field_texts
from tfos.console import html
from tfos.control.messages import EpochTrained

_NUMBERS = ("seconds", "steps", "rows")


@with_field_texts
@dataclass(frozen=True, slots=True)
class TrainedEpoch:
    """One epoch of `fit`; of a distributed model the numbers are those of all workers."""

    fit: int
    """Which `fit` of main_fun, from 1."""
    epoch: int
    """Of this fit, as Keras counts, from 0."""
    metrics: dict[str, float]
    """The epoch's logs after its callbacks, validation included."""
    seconds: float
    """From the epoch's first batch to the end of its callbacks."""
    steps: int
    """Steps of all workers."""
    rows: int
    """Rows of all workers; 0: unknown, of a model that is not distributed."""
    feed: str
    """The feed that it has read; empty: files, or a model that is not distributed."""

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return (
            f"fit {self.fit}, epoch {self.epoch + 1}: {shown or 'no metrics'}; "
            f"{self.steps} steps in {self.seconds:.1f} s"
        )


@with_field_texts
@dataclass(frozen=True, slots=True)
class Evaluation:
    """A checkpoint's metrics, by the evaluator (`eval_node=True`)."""

    step: int
    """Of the checkpoint: updates of the servers."""
    metrics: dict[str, float]
    """Named `val_…`, as `fit` names its validation's."""
    seconds: float
    """To read the checkpoint and to evaluate it."""


@with_field_texts
@dataclass(frozen=True, slots=True, repr=False)
class History(Mapping[str, list[float]]):
    """Epochs as columns, as of Keras' History: `history["val_loss"]`, `dict(history)`.

    Every column has one value per epoch: NaN where an epoch lacks the metric. Besides the metrics
    there are the columns seconds, steps and rows.
    """

    epochs: tuple[TrainedEpoch, ...] = field(default=())
    """In the order in which they ended."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of any epoch, in the order in which they came up."""
        return tuple(dict.fromkeys(name for each in self.epochs for name in each.metrics))

    def __getitem__(self, name: str) -> list[float]:
        if name in self.metrics:
            return [each.metrics.get(name, math.nan) for each in self.epochs]
        if name in _NUMBERS and self.epochs:
            return [getattr(each, name) for each in self.epochs]
        raise KeyError(f"{name!r} is none of {', '.join(self) or 'no columns: no epoch has ended'}")

    def __iter__(self) -> Iterator[str]:
        if self.epochs:
            yield from dict.fromkeys((*self.metrics, *_NUMBERS))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.epochs)) or "no epoch of fit has ended"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.epochs:
            return html.paragraph(str(self))
        head = ("", *self.metrics, "steps", "seconds")
        return html.table(head, [_cells(each, self.metrics) for each in self.epochs])


@with_field_texts
@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best checkpoint so far by `Checkpoints.keep_best`."""

    path: str
    """Of its directory, as the workers see it."""
    step: int
    """For `PSClient.restore(directory, step=…)` and `tfos export … --step`."""
    metric: str
    value: float


def _cells(epoch: TrainedEpoch, metrics: tuple[str, ...]) -> tuple[str, ...]:
    values = (epoch.metrics.get(name) for name in metrics)
    shown = ("-" if value is None else f"{value:.4g}" for value in values)
    title = f"fit {epoch.fit}, epoch {epoch.epoch + 1}"
    return (title, *shown, str(epoch.steps), f"{epoch.seconds:.1f}")


def history_of(epochs: Iterable[EpochTrained]) -> History:
    """Return what the chief has reported, for users."""
    return History(
        tuple(
            TrainedEpoch(
                fit=each.fit,
                epoch=each.epoch,
                metrics=dict(each.metrics),
                seconds=each.seconds,
                steps=each.steps,
                rows=each.rows,
                feed=each.feed,
            )
            for each in epochs
        )
    )
