"""Dataset of a feed, `ctx.dataset(batch_size)`: the rows that arrive here, as batches for `fit`.

Covers: which rows count as trained, the end of an epoch that Keras leaves early.
Does not: read ahead or hand out batches (tfos.keras.data.dataset), queue rows (feeding.receiver):
their queue belongs to the process's channel, so none is lost when Keras creates new iterators.
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import warnings

from feeding.columnar.batch import EpochEnd
from feeding.receiver.batch_reader import BatchReader
from feeding.receiver.epoch_rows import Receipt
from tfos.errors import RowsReadAheadWarning
from tfos.keras.data.columns import AS_FED, ColumnRoles
from tfos.keras.data.dataset import BatchDataset, Ready
from tfos.keras.protocols import DataContext


class FeedDataset(BatchDataset):
    """One worker's share of a feed, for `model.fit`; made by `ctx.dataset`.

    Args:
        ctx: the node's context.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        columns: which values of a row are x, y and the sample weight.
        feed: the name of the feed.
    """

    def __init__(
        self,
        ctx: DataContext,
        batch_size: int,
        columns: ColumnRoles = AS_FED,
        *,
        feed: str = "input",
    ) -> None:
        self._feed = BatchReader(ctx.feed_channel, feed)
        self._feed.reads_ahead = True
        super().__init__(self._feed, batch_size, columns, name=feed, ctx=ctx)
        self.feed = feed
        self._channel = ctx.feed_channel

    def _loop_ended(self) -> None:
        """Handle the end of a loop; with `validation_steps`, it may come before the epoch's end."""
        if self._channel.validates(self.feed):
            while not self.at_end():
                self._heads.popleft()

    @property
    def has_rows(self) -> bool:
        """Whether rows of the feed are here: unread, read ahead, or in a step."""
        return bool(self._channel.stats(self.feed).in_flight_rows)

    @property
    def is_validated(self) -> bool:
        """Whether the driver feeds rows that validate the newest epoch that has ended."""
        return bool(self._channel.is_validated(self.feed, self.ended_epoch))

    @property
    def others_train(self) -> bool:
        """Whether others train lost rows of the epoch that this worker has ended."""
        return bool(self._channel.others_train(self.feed))

    def _mixing(self) -> str:
        return (
            "feed mixed rows: mixed = df.orderBy(rand(7)).repartition(n).cache(), then "
            "cluster.train(mixed, …, seed=1) for another order in each epoch. Without a seed in "
            "rand() or without cache(), rows that are fed again may be different ones"
        )

    def _begin_reading(self) -> None:
        if elsewhere := self._feed.begin():
            warnings.warn(
                f"another dataset of the feed {self.feed!r} has read at least {elsewhere} rows "
                "ahead of its last batch, so this one does not get them. They are dropped, unless "
                "a fit on that dataset trains them first. Make one dataset for the feed and give "
                "it to every fit; a fit after a stopped one goes on after its last batch",
                RowsReadAheadWarning,
                stacklevel=3,
            )

    def all_acknowledged(self) -> None:
        """Note that no push is in flight any more: all batches handed out are trained."""
        self._feed.settle()

    def _hand(self, ready: Ready) -> None:
        self._feed.hand(ready.receipt)

    def _pass_over(self, receipt: Receipt) -> None:
        self._feed.hand(receipt, with_last=True)

    def _came_back(self, end: EpochEnd | None = None) -> None:
        self._feed.settle(self.batches_under_way(), ended=end)
