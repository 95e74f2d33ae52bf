"""Where a user's path points, by default file system."""

import logging

import pytest

from tfos.files.paths import absolute_path

HDFS = "hdfs://nn:8020"


@pytest.mark.parametrize(
    ("path", "default_fs", "expected"),
    [
        ("hdfs://other/x", "file:///", "hdfs://other/x"),
        ("s3a://bucket/x", HDFS, "s3a://bucket/x"),
        ("gs://bucket/x", HDFS, "gs://bucket/x"),
        ("abfss://c@a.net/x", "file:///", "abfss://c@a.net/x"),
        ("viewfs://c/x", HDFS, "viewfs://c/x"),
        ("file:///x", HDFS, "file:///x"),
        ("/data/x", HDFS, "hdfs://nn:8020/data/x"),
        ("/data/x", HDFS + "/", "hdfs://nn:8020/data/x"),
        ("/data/x", "file://", "file:///data/x"),
        ("/data/x", "file:///", "file:///data/x"),
        ("x/y", HDFS, "hdfs://nn:8020/user/ann/x/y"),
        ("x", "viewfs://c/", "viewfs://c/user/ann/x"),
        ("x", "file:///", "file:///work/dir/x"),
        ("x", "file://", "file:///work/dir/x"),
    ],
)
def test_a_path_means_what_tensorflowonspark_said(path, default_fs, expected):
    found = absolute_path(path, default_fs=default_fs, working_dir="/work/dir/", user="ann")
    assert found == expected


def test_a_relative_path_on_an_unknown_file_system_warns(caplog):
    with caplog.at_level(logging.WARNING):
        found = absolute_path("x", default_fs="abfs://c", working_dir="/w", user="ann")
    assert found == "abfs://c/x"
    assert "'abfs://c'" in caplog.text
