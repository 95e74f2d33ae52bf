"""Where a user's path points, by default file system."""

import logging

import pytest

from feeding.errors import PathError
from feeding.filesystem.location import parse
from tfos.config import Checkpoints
from tfos.errors import SettingsError
from tfos.files.inputs import InputFiles
from tfos.files.paths import (
    OutputPlace,
    absolute_path,
    input_path,
    one_host_note,
    output_directory,
    refuse_container,
)

HDFS = "hdfs://nn:8020"
CONTAINER = "container_1_0002_01_000001"
DISK = OutputPlace("file:///", "/work/dir")


@pytest.mark.parametrize(
    ("path", "default_fs", "expected"),
    [
        ("hdfs://other/x", "file:///", "hdfs://other/x"),
        ("s3a://bucket/x", HDFS, "s3a://bucket/x"),
        ("gs://bucket/x", HDFS, "gs://bucket/x"),
        ("abfss://c@a.net/x", "file:///", "abfss://c@a.net/x"),
        ("viewfs://c/x", HDFS, "viewfs://c/x"),
        ("file:///x", HDFS, "file:///x"),
        ("file:/x", HDFS, "file:///x"),
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


@pytest.mark.parametrize(
    ("path", "default_fs", "expected"),
    [
        ("./x", "file:///", "/work/dir/x"),
        (".", "file:///", "/work/dir"),
        ("./", "file://", "/work/dir"),
        ("x/./y", "file:///", "/work/dir/x/y"),
        ("../x", "file:///", "/work/x"),
        ("./../../../x/*", "file:///", "/x/*"),
        ("..", "file:///", "/work"),
        ("/data/./x", "file:///", "/data/x"),
        ("/.", "file:///", "/"),
        ("./x", HDFS, f"{HDFS}/user/ann/x"),
        ("./x", "viewfs://c", "viewfs://c/user/ann/x"),
        ("/./x", HDFS, f"{HDFS}/x"),
    ],
)
def test_a_path_of_the_working_directory_becomes_a_url_that_is_read(path, default_fs, expected):
    found = absolute_path(path, default_fs=default_fs, working_dir="/work/dir/", user="ann")
    assert str(parse(found)) == expected


def test_a_parent_behind_a_name_is_refused_as_the_name_may_be_a_link():
    found = absolute_path("x/../y", default_fs="file:///", working_dir="/work/dir")
    with pytest.raises(PathError, match=r"must not hold '\.' or '\.\.'"):
        parse(found)


def test_a_relative_path_on_an_unknown_file_system_warns(caplog):
    with caplog.at_level(logging.WARNING):
        found = absolute_path("x", default_fs="abfs://c", working_dir="/w", user="ann")
    assert found == "abfs://c/x"
    assert "'abfs://c'" in caplog.text


def test_a_relative_path_on_hdfs_is_in_the_home_of_the_user_whom_hdfs_sees(monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "eve")
    assert absolute_path("x", default_fs=HDFS, working_dir="/w") == f"{HDFS}/user/eve/x"


@pytest.mark.parametrize(
    ("path", "place", "expected"),
    [
        ("/runs/7", DISK, "/runs/7"),
        ("runs/7", DISK, "/work/dir/runs/7"),
        ("file:///mnt/7", DISK, "file:///mnt/7"),
        ("file://localhost/mnt/7", DISK, "file:///mnt/7"),
        ("FILE:///mnt//7/", DISK, "file:///mnt/7"),
        ("file:/mnt/7", OutputPlace(HDFS, "/", driver_in_container=True), "file:///mnt/7"),
        ("/runs/7", OutputPlace(HDFS, "/work/dir"), "hdfs://nn:8020/runs/7"),
        ("/runs/7", OutputPlace(HDFS, "/", driver_in_container=True), "hdfs://nn:8020/runs/7"),
        ("hdfs:///runs/7", OutputPlace(HDFS, "/", driver_in_container=True), "hdfs:///runs/7"),
        ("file:///mnt/7", OutputPlace(HDFS, "/", driver_in_container=True), "file:///mnt/7"),
    ],
)
def test_an_output_has_one_meaning_in_every_process(path, place, expected):
    assert output_directory(path, "checkpoints", place) == expected


def test_an_empty_path_is_not_the_working_directory():
    with pytest.raises(SettingsError, match=r"^checkpoints: a path must be a non-empty str"):
        output_directory("", "checkpoints", DISK)


def test_a_scheme_with_one_slash_is_no_relative_name():
    with pytest.raises(SettingsError, match="'hdfs:/x' names no host; use hdfs://host"):
        absolute_path("hdfs:/x", default_fs="file:///", working_dir="/w")
    with pytest.raises(SettingsError, match="'s3:/b/x' names no host; use s3://host"):
        output_directory("s3:/b/x", "checkpoints", DISK)
    with pytest.raises(SettingsError, match="'hdfs:/x' names no host"):
        input_path("hdfs:/x", DISK)
    assert input_path("file:/x", OutputPlace(HDFS, "/")) == "file:///x"
    with pytest.raises(SettingsError, match="checkpoints: 'hdfs:/x' names no host"):
        Checkpoints(directory="hdfs:/x")
    with pytest.raises(SettingsError, match="input 'x': 'hdfs:/x' names no host"):
        InputFiles(name="x", path="hdfs:/x")
    Checkpoints(directory="file:/x")


def test_a_path_with_a_password_is_refused_whether_it_is_read_or_written():
    text = r"^input 'x': a URL with a user or a password is refused \(host 'h'\)"
    with pytest.raises(SettingsError, match=text):
        InputFiles(name="x", path="s3://u:p@h/x")
    with pytest.raises(SettingsError, match=r"^checkpoints: a URL with a user"):
        output_directory("s3://u:p@h/x", "checkpoints", DISK)


@pytest.mark.parametrize("path", ["/runs/7", "runs/7"])
def test_a_local_output_of_a_driver_in_a_container_is_refused_with_what_to_write(path):
    place = OutputPlace("file:///", "/local/c1", driver_in_container=True)
    with pytest.raises(SettingsError) as refused:
        output_directory(path, "checkpoints", place)
    where = "/runs/7" if path.startswith("/") else "/local/c1/runs/7"
    assert (
        f"checkpoints cannot go to '{path}' in cluster deploy mode: that is '{where}' on the host"
        in (str(refused.value))
    )
    assert "hdfs:///runs/7, or file:///mnt/runs/7" in str(refused.value)


def test_a_relative_output_on_hdfs_of_a_driver_in_a_container_is_refused_with_its_home(monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "eve")
    place = OutputPlace(HDFS, "/local/c1", driver_in_container=True)
    with pytest.raises(
        SettingsError, match=r"that is 'hdfs://nn:8020/user/eve/runs', and .* Write this URL"
    ):
        output_directory("runs", "checkpoints", place)


@pytest.mark.parametrize("default_fs", ["file:///", HDFS])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_nothing_is_written_to_the_directory_of_a_container(default_fs, scheme, monkeypatch):
    monkeypatch.setenv("CONTAINER_ID", CONTAINER)
    path = f"{scheme}/nm/appcache/application_1_0002/{CONTAINER}/mnist_model"
    with pytest.raises(SettingsError, match=f"{CONTAINER}/mnist_model': .*YARN removes when"):
        output_directory(path, "checkpoints", OutputPlace(default_fs, "/"))


def test_a_place_beside_the_container_or_outside_of_yarn_is_accepted():
    refuse_container(parse(f"/data/{CONTAINER}x"), "the model", {"CONTAINER_ID": CONTAINER})
    refuse_container(parse(f"/data/{CONTAINER}"), "the model", {})


def test_disks_of_several_hosts_are_warned_of_unless_the_user_says_that_all_mount_it():
    outputs = {"checkpoints": "/runs/7", "TensorBoard's files": "hdfs://nn/logs"}
    note = one_host_note(outputs, ["b", "a", "b"])
    assert note.startswith("checkpoints go to '/runs/7' on the disk of each host")
    assert "2 hosts (a, b)" in note
    assert "TensorBoard" not in note
    assert one_host_note(outputs, ["a", "a"]) == ""
    assert one_host_note(outputs, ["a", ""]) == ""  # a new executor's host comes later
    assert one_host_note({"checkpoints": "file:///runs/7"}, ["a", "b"]) == ""
