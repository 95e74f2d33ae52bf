"""inference(df) looks at the DataFrame before it makes anything of it."""

from typing import Any

import numpy as np
import pytest

from feeding.config import FeedConfig
from feeding.sender.task import InferenceTask
from tfos.errors import SettingsError
from tfos.feed.dataframe import check_fed
from tfos.feed.dataframe_inference import answered
from tfos.feed.request import FeedRequest
from tfos.feed.sources import source_of
from tfos.ml import KerasEstimator, KerasModel
from tfos.spark.task_secrets import TaskCredentials


class ConnectFrame:
    """A DataFrame of Spark Connect, as far as anyone may look at it."""

    def mapInArrow(self, *args: Any) -> None:
        raise AssertionError("used")


ConnectFrame.__module__ = "pyspark.sql.connect.dataframe"


def test_a_frame_of_spark_connect_is_refused():
    request = FeedRequest(data=ConnectFrame(), feed="input", feed_timeout_s=1.0)
    task = InferenceTask(targets=(), credentials=TaskCredentials("c"), config=FeedConfig())
    with pytest.raises(SettingsError, match="belongs to Spark Connect"):
        answered(request, task)


class OnSpark:
    """A pandas-on-Spark DataFrame, as far as anyone may look at it."""

    columns = ("features", "label")


OnSpark.__module__ = "pyspark.pandas.frame"


class Pandas:
    """A DataFrame of pandas, likewise."""

    columns = ("features", "label")


Pandas.__module__ = "pandas.core.frame"


class Rdd:
    """An RDD, likewise."""

    def mapPartitionsWithIndex(self, *args: Any) -> None:
        raise AssertionError("used")


class DStream(Rdd):
    """A DStream, which has no toDF."""

    def foreachRDD(self, *args: Any) -> None:
        raise AssertionError("used")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (OnSpark(), r"pyspark\.pandas\.frame\.OnSpark; use data\.to_spark\(\)"),
        (Pandas(), r"use spark\.createDataFrame\(data\)"),
        (Rdd(), r"use data\.toDF\(\[names\]\)"),
        (DStream(), r"use rdd\.toDF\(\[names\]\) in data\.foreachRDD"),
        ([{"x": 1}], r"got builtins\.list; use spark\.createDataFrame\(data, \[names\]\)"),
        (np.ones((2, 2)), r"got numpy\.ndarray; use spark\.createDataFrame\(data, \[names\]\)"),
    ],
)
def test_rows_that_are_no_spark_dataframe_are_refused_with_the_call_that_makes_one(
    rows: Any, text: str
):
    estimator = KerasEstimator(model_fn=list)
    for use in (estimator.fit, KerasModel(b"")._transform, KerasModel(b"").evaluate):
        with pytest.raises(SettingsError, match=text):
            use(rows)
    if not isinstance(rows, Rdd):
        request = FeedRequest(data=rows, feed="input", feed_timeout_s=1.0)
        with pytest.raises(SettingsError, match=r"must be an RDD or a Spark DataFrame.*Use"):
            source_of(request)


class Column:
    """A DataFrame of Spark, which answers the names of its columns."""

    isStreaming = False
    mapInArrow = None

    def __getattr__(self, name: str) -> Any:
        if name == "mapPartitionsWithIndex":
            return name
        raise AttributeError(name)


def test_a_column_may_be_named_like_a_method_of_rdds():
    check_fed(Column())
