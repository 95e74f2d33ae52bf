"""Rows of files: one worker's share, in an order, as batches for Keras, tf.data or numpy.

Covers: shuffling, equal shares, positions that are saved; the forms in which rows come.
Does not: know formats (tfos.reading.reading), read (feeding.reading).
Runs in: the worker's process.      Threads: main_fun's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from tfos.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from feeding.columnar.batch import BatchColumn
    from feeding.reading.positions import Course
    from feeding.reading.reader import DirectReader
    from feeding.reading.row_counts import Countable
    from feeding.reading.runs import Source
    from tfos.keras.data.columns import Dtypes, Selector
    from tfos.keras.data.file_dataset import FileDataset
    from tfos.reading.protocols import DatasetContext


class FileRows:
    """One worker's share of the rows of some files. Each method reads from `first_epoch` on.

    Together the workers get every row of every epoch once. Shares of Parquet files have equal
    numbers of rows, those of other formats equal numbers of bytes. Workers may then have different
    numbers of batches, and `fit` does not wait for a finished worker. `equal_steps` makes the
    shares of all formats equal in rows.

    Args:
        source: the files.
        ctx: rank of this worker, and the client of the servers that keep positions.
    """

    def __init__(self, source: Source, ctx: DatasetContext) -> None:
        self._source = source
        self._ctx = ctx
        self._shuffle: dict[str, int] = {}
        self._name = ""
        self._course: Course | None = None

    @property
    def first_epoch(self) -> int:
        """First epoch to read: 0, unless the run resumes where a saved one stopped."""
        return 0 if self._course is None else self._course.first_epoch

    @property
    def num_skipped(self) -> int:
        """Damaged records and files that this worker has skipped so far, with on_bad_data="skip".

        Each counts once, however many epochs read it.
        """
        return self._source.num_skipped

    def shuffled(
        self,
        seed: int,
        window_rows: int = 65_536,
        *,
        interleave: int = 32,
        most_bytes: int = 512 << 20,
    ) -> FileRows:
        """Return the same rows in another order in each epoch, a pure function of seed and epoch.

        Args:
            seed: shuffles the order of the files' pieces (32 MiB each; row groups of Parquet), and
                rows within windows.
            window_rows: rows of a window, which are held in memory; 1: rows are not shuffled.
            interleave: number of pieces that are read side by side, so that sorted data are mixed;
                1: one after the other.
            most_bytes: most bytes that pieces read side by side may hold, plus four windows. Beyond
                it, fewer pieces are read side by side, and a window ends early.

        Raises:
            SettingsError: a number below 1, or no seed.
        """
        if self._course is not None:
            raise SettingsError("call shuffled(...) before resumable(...): positions depend on it")
        if type(window_rows) is not int or window_rows < 1:
            raise SettingsError(f"window_rows must be an int >= 1, got {window_rows!r}")
        if seed is None:
            raise SettingsError("shuffled(None): pass a seed, the same on every worker")
        rows = FileRows(self._source, self._ctx)
        rows._shuffle = {
            "seed": seed,
            "shuffle_rows": window_rows,
            "interleave": interleave,
            "most_bytes": most_bytes,
        }
        rows._reader()  # raises for settings that cannot work
        return rows

    def equal_steps(self, *, timeout_s: float | None = None) -> FileRows:
        """Return the same rows in shares of equal size, so that all workers have the same steps.

        Every worker calls it, before `resumable`. It counts the rows immediately: together the
        workers read each file once; without parameter servers every worker reads all files.
        Parquet files store their row counts, so counting them costs nothing.

        Args:
            timeout_s: seconds that the slowest worker may take to count its share; None: an hour.

        Raises:
            SettingsError: another worker reads other files, or the rows are already resumable.
            RequestTimeout: a worker did not arrive; the text names it.
            DataError: a file is damaged, and the policy is to fail.
            OSError: a file cannot be read, or has changed since it was listed.
        """
        from tfos.reading.row_counts import RENDEZVOUS_TIMEOUT_S, counted

        if self._course is not None:
            raise SettingsError("call equal_steps() before resumable(...): positions depend on it")
        if all(file.piece_rows is not None for file in self._source.files()):
            return self
        limit_s = RENDEZVOUS_TIMEOUT_S if timeout_s is None else timeout_s
        source = cast("Countable", self._source)  # all but Parquet, which knows its rows
        rows = FileRows(counted(self._ctx, source, limit_s), self._ctx)
        rows._shuffle = self._shuffle
        return rows

    def resumable(self, name: str = "train") -> FileRows:
        """Return the same rows, with a position that is saved and restored with the parameters.

        Every worker calls it, after `shuffled` and `equal_steps`. A run that resumes from a
        checkpoint (`Checkpoints(resume=True)`) continues reading where the saved run's workers
        were, whatever their number, in the epoch `first_epoch`: pass
        `fit(initial_epoch=rows.first_epoch)`.

        `fit` on `dataset` moves the position. Checkpoints of a model distributed with "sync" hold
        the matching position: no row is trained twice or missed. In other modes, the batches that
        were in flight when a checkpoint was taken may be trained again.

        Args:
            name: name of the position; each set of rows in the training needs its own.

        Raises:
            SettingsError: an invalid name, or the rows were shuffled differently.
            FileChanged: the files have changed since the position was saved.
            NoServersError: the cluster has no parameter servers, which keep the position.
        """
        from tfos.reading.resume import course_of

        rows = FileRows(self._source, self._ctx)
        rows._shuffle, rows._name = self._shuffle, name
        rows._course = course_of(self._ctx, name, self._source.files(), self._reader().position)
        return rows

    def dataset(
        self,
        batch_size: int,
        *,
        feature_cols: Selector | None = None,
        label_cols: Selector | None = None,
        weight_col: Selector | None = None,
        dtypes: Dtypes = None,
        map_fn: Callable[..., Any] | None = None,
    ) -> FileDataset:
        """Return data for `model.fit`: each epoch of `fit` reads the files once.

        Args:
            batch_size: rows per batch, at least 1; only an epoch's last batch may be smaller.
            feature_cols: columns of x: a name, a list of names (numbers side by side as one matrix
                [batch, n]; arrays and text as several inputs), or a dict from the model's input
                names. None, without `label_cols`: rows are (x, y) or (x, y, weight).
            label_cols: columns of y, as for `feature_cols`.
            weight_col: column of the sample weights, float[batch].
            dtypes: numpy dtype names: one for x; one each for x, y and weight (None leaves a part
                as it is); or by column. An integer dtype cuts off fractions and refuses numbers
                that it cannot hold. None: float64 becomes Keras' floatx.
            map_fn: `map_fn(x, y) -> (x, y)` (and the weight, if there is one) on numpy arrays of a
                whole batch, [batch, …]; runs in the thread that reads ahead.

        Raises:
            SettingsError: a setting that cannot work.
        """
        from tfos.keras.data.columns import ColumnRoles
        from tfos.keras.data.file_dataset import FileDataset
        from tfos.reading.resume import files_metadata, position_name

        columns = ColumnRoles(
            feature_cols=feature_cols,
            label_cols=label_cols,
            weight_col=weight_col,
            dtypes=dtypes,
            map_fn=map_fn,
        )
        reader = self._reader()
        if self._course is None:
            return FileDataset(reader, batch_size, columns, ctx=self._ctx)
        return FileDataset(
            reader,
            batch_size,
            columns,
            ctx=self._ctx,
            position_name=position_name(self._name, self._ctx.rank),
            first_metadata=dict([files_metadata(self._name, self._source.files())]),
        )

    def batches(self, batch_size: int, epochs: int = 1) -> Iterator[dict[str, BatchColumn]]:
        """Yield batches as dicts of numpy arrays (Ragged: values and offsets), without TensorFlow.

        Args:
            batch_size: rows per batch, at least 1; only an epoch's last batch may be smaller.
            epochs: number of times that all files are read.

        Yields:
            An array [batch, *shape of the column], or a Ragged, by column name.
        """
        reader = self._reader()
        for _ in range(epochs):
            yield from _one_epoch(reader, batch_size)

    def tf_dataset(self, batch_size: int) -> Any:
        """Return a tf.data.Dataset of batches as dicts of tensors; one iteration is one epoch.

        Each iteration begins the next epoch, even if the previous one was not read to its end.

        Args:
            batch_size: rows per batch; only an epoch's last batch may be smaller.
        """
        from tfos.keras.data.file_dataset import tf_dataset

        if self._course is not None:
            raise UnsupportedError(
                "tf.data does not say how far it has read ahead, so its position cannot be saved. "
                "Use dataset(...), or tf_dataset(...) without resumable(...)"
            )
        epochs = itertools.count()

        def next_epoch() -> Iterator[dict[str, BatchColumn]]:
            reader = self._reader()
            reader.begin(next(epochs))
            return _one_epoch(reader, batch_size)

        return tf_dataset(next_epoch, self._source.schema)

    def _reader(self) -> DirectReader:
        from feeding.reading.positions import START
        from feeding.reading.reader import DirectReader

        course = self._course or START
        share = (self._ctx.rank, self._ctx.num_workers)
        return DirectReader(self._source, *share, **self._shuffle, course=course)


def _one_epoch(reader: DirectReader, batch_size: int) -> Iterator[dict[str, BatchColumn]]:
    from feeding.columnar.batch import Batch

    while isinstance(batch := reader.next_batch(batch_size), Batch):
        yield batch.columns
