"""inference(df) looks at the DataFrame before it makes anything of it."""

from typing import Any

import pytest

from feeding.config import FeedConfig
from feeding.sender.task import InferenceTask
from tfos.errors import SettingsError
from tfos.feed.dataframe_inference import answered
from tfos.feed.request import FeedRequest
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
