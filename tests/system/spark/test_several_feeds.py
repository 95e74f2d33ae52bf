"""Several feeds of one cluster: one that nobody reads, rows that validate another feed's epochs."""

import pytest

from tfos import InputMode, TFCluster
from tfos.config import ClusterConfig
from tfos.errors import FeedTimeout, SettingsError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),  # not of Spark, which starts first
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]

CONFIG = ClusterConfig(max_inflight_bytes=1000)


def read_one(args, ctx):
    """Read one feed and leave the others alone."""
    from feeding.columnar.batch import FeedEnd
    from feeding.receiver.batch_reader import BatchReader

    reader = BatchReader(ctx.feed_channel, args["feed"])
    while not isinstance(reader.next_batch(16), FeedEnd):
        pass


def read_and_validate(args, ctx):
    """Worker 0 reads the validation of each epoch; worker 1 goes on to the next epoch without."""
    from feeding.columnar.batch import EpochEnd, FeedEnd
    from feeding.receiver.batch_reader import BatchReader

    trained, validated = (BatchReader(ctx.feed_channel, feed) for feed in ("input", "validation"))
    seen = set()
    while not isinstance(item := trained.next_batch(16), FeedEnd):
        if isinstance(item, EpochEnd) and ctx.worker_rank == 0:
            while not isinstance(rows := validated.next_batch(16), EpochEnd | FeedEnd):
                seen.update(rows.nest().tolist())
            if not seen <= set(range(1000, 1500)):
                raise ValueError(f"rows of another feed: {seen}")


def rows_of(spark, first, count):
    return spark.parallelize(range(first, first + count), 3).map(lambda row: row)


@pytest.mark.long
def test_a_feed_that_nobody_reads_is_named_and_the_other_goes_on(spark):
    with TFCluster.reserve(
        spark, 2, num_ps=0, input_mode=InputMode.SPARK, queues=("input", "unread"), config=CONFIG
    ) as cluster:
        cluster.start(read_one, {"feed": "input"})
        with pytest.raises(FeedTimeout, match="'unread'"):
            cluster.train(rows_of(spark, 0, 10), 1, feed_timeout=3, qname="unread")
        report = cluster.train(rows_of(spark, 0, 500), 2)
        assert report is not None
        assert report.trained_rows == 1000


def test_validation_is_fed_after_each_epoch_and_dropped_where_nobody_reads_it(spark):
    with TFCluster.reserve(
        spark, 2, num_ps=0, input_mode=InputMode.SPARK, config=CONFIG
    ) as cluster:
        cluster.start(read_and_validate)
        with pytest.raises(SettingsError, match="which is this call's qname"):
            cluster.train(rows_of(spark, 0, 10), 1, qname="validation", validation=[1])
        report = cluster.train(rows_of(spark, 0, 400), 2, validation=rows_of(spark, 1000, 500))
        assert report is not None
        assert [each.trained_rows for each in report.epochs] == [400, 400]
        assert [(each.feed, each.epoch, each.fed_rows) for each in report.validation] == [
            ("validation", 0, 500),
            ("validation", 1, 500),
        ]
        for each in report.validation[:1]:
            assert each.trained_rows == each.per_worker["worker:0"]
            assert each.trained_rows + each.dropped_rows == 500
            assert 0 < each.trained_rows < 500
        without = cluster.train(rows_of(spark, 0, 100), 1)
        assert without is not None
        assert without.validation == ()
