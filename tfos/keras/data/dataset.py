"""Datasets of `ctx`: batches that `model.fit` takes directly, from whatever reader.

Covers: a Keras data adapter: one epoch of `fit` per epoch of the rows, prefetched batches, epochs
of different lengths, empty epochs.
Does not: know feeds or files (tfos.keras.data.feed_dataset, file_dataset), read rows (feeding).
Threads: the thread that runs `fit`; see prefetch.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from feeding.columnar.batch import Batch, EpochEnd, FeedEnd, check_batch_size
from feeding.columnar.ops import num_rows
from feeding.reading.positions import Position
from feeding.reading.splits import SourceFile
from feeding.receiver.epoch_rows import Receipt, RowSpan
from tfos.errors import (
    FeedEndedWarning,
    SettingsError,
    SortedRowsWarning,
    UnsupportedError,
    UnsupportedModel,
)
from tfos.keras.data import tensors
from tfos.keras.data.class_weights import ClassWeights
from tfos.keras.data.columns import AS_FED, ColumnRoles, RowMapper, has_length
from tfos.keras.data.epoch_length import AllEpochs, EpochLength
from tfos.keras.data.label_order import LabelOrder
from tfos.keras.data.label_shapes import check_has_labels, check_labels
from tfos.keras.data.lists import has_lists, refusal_of_lists
from tfos.keras.data.lone_progress import LoneProgress
from tfos.keras.data.prefetch import Failure, Prefetcher
from tfos.keras.data.running_fit import KerasLoop, RunningFit, loop_over, running_fit
from tfos.keras.input_order import check_inputs
from tfos.keras.protocols import RowsContext

logger = logging.getLogger(__name__)

PREFETCHED_BATCHES = 3
"""Number of batches read ahead; enough to hide a short gap in the feed. More only use memory."""


@dataclass(slots=True)
class Ready:
    """A batch that was read ahead."""

    values: Any
    receipt: Receipt
    position: Position | None
    """Position of a reader of files after the batch."""
    tensors: Any = None
    """`values` as tensors, with class weights, once they were requested."""


class Reader(Protocol):
    """Source of batches."""

    def next_batch(self, batch_size: int) -> Batch | EpochEnd | FeedEnd:
        """Return the next batch, EpochEnd once after each epoch, FeedEnd when there are no more."""


class MappedReader:
    """Batches as x, y and weights. It knows no dataset: its thread would keep that alive.

    Args:
        reader: gives the batches.
        batch_size: rows per batch.
        mapper: makes x, y and weights of them.

    Attributes:
        names: of the rows' values; empty: they have none.
        left_out: rows behind the epoch's last batch, of which map_fn has kept none.
    """

    def __init__(self, reader: Reader, batch_size: int, mapper: RowMapper) -> None:
        self._reader = reader
        self._batch_size = batch_size
        self._mapper = mapper
        self.names: list[str] = []
        self.left_out: Receipt = ()

    def read(self) -> Ready | EpochEnd | FeedEnd:
        """Wait for the next batch of which map_fn keeps a row, or the end."""
        spans: list[RowSpan] = []
        while isinstance(found := self._reader.next_batch(self._batch_size), Batch):
            rows = found.nest()
            self.names = list(rows) if isinstance(rows, Mapping) else []
            values = self._mapper(rows)
            spans += found.receipt
            if _has_rows(values):
                return Ready(values, tuple(spans), found.position)
        self.left_out = tuple(spans)
        return found


class BatchDataset(DataAdapter):  # type: ignore[misc]  # Keras has no types
    """One worker's share of some rows, epoch by epoch.

    Args:
        reader: source of the batches.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        columns: which values of a row are x, y and the sample weight; `map_fn` runs in the thread
            that reads ahead. A batch of which it keeps no row is none.
        name: of the rows, for that thread's name.
        ctx: the node's context; it refuses a training without the cluster's servers, and takes the
            progress of a model that is not distributed. None: there is no cluster.

    Raises:
        SettingsError: an argument that cannot work.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        columns: ColumnRoles = AS_FED,
        *,
        name: str = "files",
        ctx: RowsContext | None = None,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        mapper = RowMapper(columns, keras.config.floatx())
        self._mapped = MappedReader(reader, self._batch_size, mapper)
        self._prefetcher = Prefetcher(
            self._mapped.read, is_end, depth=PREFETCHED_BATCHES, name=f"tfos-read-{name}"
        )
        self._ctx = ctx
        self._lone: LoneProgress | None = None
        """Progress of the running `fit`, if its model is not distributed."""
        self._class_weights: ClassWeights | None = None
        self._unmatched: KerasLoop | None = None
        """The running loop, until its batches are compared with the model's inputs and outputs."""
        self._refusal_of_lists = ""
        """Why the model of the running fit takes no rows of differing lengths; empty: it may."""
        self._label_order: LabelOrder | None = None
        """Label order of the first epoch that is trained."""
        self._was_checked = False
        self._heads: deque[Any] = deque()
        """Items read but not handed out: batches, and the end or the error after them."""
        self._in_loop = self._in_own_loop = self._trains = self._was_left = False
        self._looked_at: Ready | None = None
        """The single batch that was taken outside of Keras' loops: the next loop begins with it. If
        more are taken, the program has its own loop, which trains them."""
        self.over = False
        """Whether the end of the running epoch has been seen."""
        self.batches = self.rows = 0
        """Number of batches and rows handed out since the epoch's loop began."""
        self._warned = False
        self.feed = ""
        """Name of the feed; empty: files."""
        self.ended_epoch = -1
        """Newest epoch whose batches were all handed out; -1: none yet."""
        weakref.finalize(self, self._prefetcher.close)
        self.batches_under_way: Callable[[], int] = int
        """Returns for how many last batches the servers may lack gradients; see PSTrainer."""

    # -- the epoch

    def start_epoch(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Go on to the next epoch if the last one is over; wait until it has a batch or an end.

        Args:
            on_wait: called again and again meanwhile.

        Returns:
            False when the feed has ended: there is no further epoch.
        """
        self._begin()
        return not isinstance(self._peek(on_wait), FeedEnd)

    def next_tensors(self) -> Any:
        """Wait for the batch that the next loop begins with; return its nested tensors.

        None: the next epoch has no rows, or there is none.
        """
        return self.upcoming(0) if self.start_epoch() else None

    @property
    def next_epoch(self) -> int:
        """First epoch whose batches were not all handed out."""
        return max(self.ended_epoch + 1, self.first_epoch)

    def at_end(self) -> bool:
        """Wait for the next batch or the end of the epoch; return whether it is the end.

        The caller has trained the previous batch; its rows count as trained.
        """
        if self._lone is not None and self.batches:  # before its rows count as trained
            self._lone.trained(self.batches, self.rows, is_over=False)
        self._came_back()
        head = self._peek()
        self.over = is_end(head)
        if self.over and self._mapped.left_out:
            self._pass_over(self._mapped.left_out)
            self._mapped.left_out = ()
        if self._lone is not None:
            self._lone.trained(self.batches, self.rows, is_over=self.over)
        if self.over and self.batches and self._label_order is not None:
            self._check_order(self._label_order.looks_sorted_at_end())
            self._label_order = None
        if isinstance(head, EpochEnd):
            self._came_back(head)
            self.ended_epoch = head.epoch
        if isinstance(head, FeedEnd) and not self.batches:
            self.warn_of_end()
        return self.over

    def warn_of_end(self) -> None:
        """Warn, once, that the feed has ended."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the feed has ended: it has no further epoch; feed as many epochs as are fitted: "
                "cluster.train(rdd, num_epochs=n), or fit(epochs=ctx.all_epochs)",
                FeedEndedWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the running epoch, or of the next one if the last one is over.

        It begins with the batch that was only looked at. Within Keras' loop it has no other: they
        are that loop's.
        """
        if self._in_loop and loop_over(self) is not None:
            return self._look()
        self.leave_loop()  # an error may have broken it off
        self._begin()
        self._in_own_loop = False
        return iter(self.__next__, None)  # `iter` of it, as in a loop over the rest, begins nothing

    def __next__(self) -> Any:
        if self._looked_at is not None:
            self._hand(self._looked_at)
            self._looked_at, self._in_own_loop = None, True
        if self.at_end():
            raise StopIteration
        ready = self._heads.popleft()
        self.batches += 1
        self.rows += _num_rows(ready.values)
        loop, self._unmatched = self._unmatched, None  # a loop that is refused is over
        if loop is not None and not self._matches(loop, ready.values):
            self._unmatched = loop
        if self._in_loop or self._in_own_loop:
            self._hand(ready)
        else:
            self._looked_at = ready
        if self._label_order is not None and len(ready.values) > 1:
            self._check_order(self._label_order.looks_sorted(ready.values[1]))
        return self._tensors(ready)

    def _matches(self, loop: KerasLoop, values: tuple[Any, ...]) -> bool:
        """Refuse a batch that does not fit the model of a loop; return whether all is compared."""
        check_inputs(loop.model, values[0], loop.step)
        if loop.step == "predict_step":
            return True
        if len(values) > 1:
            return check_labels(loop.model, values[1], loop.step)
        check_has_labels(loop.model, self._mapped.names, loop.step)
        return True

    def _look(self) -> Iterator[Any]:
        """Yield the batch that Keras' loop takes next, for a callback that inspects it."""
        head = self._peek()
        if is_end(head):
            return
        yield self._tensors(head)
        raise SettingsError(
            "the running fit, evaluate or predict takes the batches of this dataset, and has taken "
            f"{self.batches} in this epoch, so a loop inside of it sees only the next one. Give "
            "that loop a dataset of its own: rows.dataset(...), or another feed"
        )

    def upcoming(self, place: int) -> Any:
        """Return the batch `place` batches after the next one, if it was already read.

        It waits for nothing; the batch is the object that `next` returns later.

        Args:
            place: number of batches between, from 0.

        Returns:
            Nested tensors; None: the batch was not read yet, failed, or is not in the epoch.
        """
        while len(self._heads) <= place:
            if self._heads and not isinstance(self._heads[-1], Ready):
                return None
            if (ready := self._prefetcher.take_ready()) is None:
                return None
            self._heads.append(ready)
        ready = self._heads[place]
        return self._tensors(ready) if isinstance(ready, Ready) else None

    def _tensors(self, ready: Ready) -> Any:
        if ready.tensors is None:
            values = ready.values
            if self._refusal_of_lists and has_lists(values):
                raise UnsupportedModel(self._refusal_of_lists)
            if self._class_weights is not None:
                values = self._class_weights(values)
            ready.tensors = tensors.constant(values)
        return ready.tensors

    def all_acknowledged(self) -> None:
        """Note that no push of a batch is in flight any more."""

    @property
    def others_train(self) -> bool:
        """Whether others train lost rows of the epoch that this worker has ended."""
        return False

    # -- the order of the rows

    def _mixing(self) -> str:
        """Return what mixes the rows, for a warning."""
        return "shuffle the rows"

    def _sorted_by(self) -> str:
        """Return what the rows are known to be sorted by; empty: nothing."""
        return ""

    def _check_order(self, looks_sorted: bool) -> None:
        if looks_sorted:
            self._label_order = None
            self._warn("the labels look sorted: neighbouring rows have similar labels")

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"{what}, which trains a worse model; {self._mixing()}",
            SortedRowsWarning,
            stacklevel=3,
        )

    def _hand(self, ready: Ready) -> None:
        """Note that the trainer gets a batch."""

    def _pass_over(self, receipt: Receipt) -> None:
        """Count rows that no batch has."""

    def _came_back(self, end: EpochEnd | None = None) -> None:
        """Record that the trainer has finished the previous batch and has read this end."""

    # -- where the rows are

    first_epoch = 0
    """Epoch that the rows begin with; above 0 if they go on from a saved run."""

    files: Sequence[SourceFile] = ()
    """All files of which this dataset is a share; empty: the rows come from elsewhere."""

    def begin_at(self, epoch: int) -> None:
        """Go on with the beginning of an epoch, unless the rows are already at or past it.

        Args:
            epoch: epoch of files, from 0; a feed's epochs come as they are fed.
        """

    def place(self) -> tuple[str, Any] | None:
        """Return name and value of the position after the last batch; None: it is not kept."""
        return None

    def first_metadata(self) -> dict[str, Any]:
        """Return the metadata that the chief sets before the first push."""
        return {}

    def _loop_ended(self) -> None:
        """Note that Keras has left the loop of an epoch, perhaps before the epoch's end."""

    def _begin_reading(self) -> None:
        """Note that the next batch is about to be read."""

    def _begin(self) -> None:
        if self.over and self._heads and not isinstance(self._heads[0], FeedEnd):
            self._heads.popleft()
        self.over = False
        self.batches = self.rows = 0
        if self._looked_at is not None:
            self._heads.appendleft(self._looked_at)
            self._looked_at = None

    def _peek(self, on_wait: Callable[[], None] | None = None) -> Any:
        if not self._heads:
            self._begin_reading()
            self._prefetcher.start()
            self._heads.append(self._prefetcher.take(on_wait))
        if isinstance(self._heads[0], Failure):
            raise self._heads.popleft().error
        return self._heads[0]

    # -- what Keras asks of an adapter

    def get_tf_dataset(self) -> LoopBatches:
        """Return what a loop of Keras takes: the batches of one epoch after another.

        Raises:
            NotDistributed: `fit` trains a model that does not use the cluster's servers.
            SettingsError: class_weight of `fit` cannot work; or the running `fit` trains these
                rows, and they cannot be measured now.
        """
        fit = running_fit()
        if fit is not None and fit.x is self:
            self._check_measured(fit)
            if not self.feed and isinstance(fit.epochs, AllEpochs):
                logger.warning(
                    "fit(epochs=ctx.all_epochs) ends with its feed, and rows of files have no end: "
                    "it trains them until a callback sets stop_training. Give it a number of "
                    "epochs, fit(epochs=n)"
                )
        self.leave_loop()
        was_left, self._was_left = self._was_left, False
        self._lone = self._progress_of(fit)
        self._refusal_of_lists = "" if fit is None else refusal_of_lists(fit.model)
        self._trains = trains = fit is not None and fit.x is self
        if was_left and not trains:
            self._loop_ended()
        self._unmatched = loop_over(self)
        if self._unmatched is None and fit is not None and fit.validation_data is self:
            self._unmatched = KerasLoop(fit.model, "test_step")  # fit asks before it evaluates
        given = fit.class_weight if fit is not None and trains else None
        self._class_weights = None if given is None else ClassWeights(given)
        for ready in (*self._heads, self._looked_at):
            if isinstance(ready, Ready):
                ready.tensors = None  # they may have the class weights of another fit
        if trains and not self._was_checked:
            self._was_checked, self._label_order = True, LabelOrder()
            if sorted_by := self._sorted_by():
                self._warn(f"the rows are trained sorted by {sorted_by}")
        return LoopBatches(self)

    def _progress_of(self, fit: RunningFit | None) -> LoneProgress | None:
        """Return the progress of a `fit` of these rows whose model is not distributed."""
        if fit is None or not fit.is_lone or self._ctx is None:
            return None
        self._ctx.check_servers_used("fit() trains this model")
        if fit.x is not self:
            return None
        return self._lone if fit.measures else LoneProgress(fit, self, self._ctx.seen_progress)

    def _check_measured(self, fit: RunningFit) -> None:
        """Refuse to measure rows of a running `fit` with its weights, or instead of training."""
        measures = fit.has_batches or fit.validation_data is self
        is_behind = fit.is_last_epoch and (self.over or not fit.has_batches)
        is_stopped = fit.has_batches and fit.model.stop_training
        steps = fit.measured_steps if fit.has_batches else fit.validation_steps
        weighs = fit.class_weight is not None and not fit.predicts
        if not measures or ((is_behind or is_stopped) and not weighs):
            return  # it trains no further row
        if weighs:
            why = "fit has class_weight, which would weight the measured rows, too"
        elif self.feed:
            why = "an epoch of a feed comes only once, so a measured epoch is not trained"
        elif steps is not None:
            why = f"after {steps} steps of a pass the next epoch may have only the other rows"
        elif fit.has_batches and (self._in_loop or (self.batches > 0 and not self.over)):
            why = (
                f"its rows are in the middle of an epoch ({self.batches} batches so far), so the "
                "other rows of it would not be trained"
            )
        else:
            return
        raise SettingsError(
            "evaluate, predict or validation_data inside fit has the dataset that this fit "
            f"trains, but {why}. Give it its own dataset: rows.dataset(...), or for a feed "
            'ctx.dataset(n, feed="validation")'
        )

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return the batches of the running epoch."""
        return LoopBatches(self)

    def get_jax_iterator(self) -> Iterator[Any]:
        """Refuse: TensorFlow's is the only backend that works.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"Keras runs on the backend {keras.backend.backend()!r}, but datasets of ctx need "
            "TensorFlow's; set KERAS_BACKEND=tensorflow before the first import of keras"
        )

    get_torch_dataloader = get_jax_iterator

    def on_epoch_begin(self) -> None:
        """Note that Keras starts the loop of an epoch.

        It begins with the batch that was only looked at, as in `next(iter(dataset))`.
        """
        self._begin()
        self._in_loop, self._in_own_loop = True, False
        if self._lone is not None:
            self._lone.epoch_begins()

    def leave_loop(self) -> None:
        """Note that a loop is over, even if aborted; code that only reads then starts again."""
        self._was_left |= self._in_loop
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        """Note that Keras has left the loop; Keras also calls this before the loop."""
        if self._in_loop:
            self._in_loop = False
            self._loop_ended()

    @property
    def num_batches(self) -> EpochLength:
        """Unknown before the epoch ends: compares as larger until then."""
        return EpochLength(self)

    @property
    def batch_size(self) -> int:
        """Number of rows in a full batch."""
        return self._batch_size

    @property
    def has_partial_batch(self) -> None:
        """Unknown before the epoch ends."""

    @property
    def partial_batch_size(self) -> None:
        """Unknown before the epoch ends."""


class LoopBatches:
    """Batches of a dataset for a loop of Keras, which calls `iter` on them at each step.

    Args:
        dataset: the dataset; its own `iter` is for the program.
    """

    def __init__(self, dataset: BatchDataset) -> None:
        self._dataset = dataset
        self.upcoming = dataset.upcoming

    def __iter__(self) -> LoopBatches:
        return self

    def __next__(self) -> Any:
        return next(self._dataset)


def _has_rows(values: Any) -> bool:
    """Whether one of the arrays has a row: others may be empty, as all values of empty lists."""
    return any(num_rows((leaf,)) for leaf in keras.tree.flatten(values) if has_length(leaf))


def _num_rows(values: Any) -> int:
    return num_rows(tuple(keras.tree.flatten(values)[:1]))


def is_end(item: Any) -> bool:
    """Whether it is the end of an epoch or of the feed."""
    return isinstance(item, EpochEnd | FeedEnd)
