"""Paths, names and patterns: what they mean, and which are refused."""

from __future__ import annotations

import pytest

from feeding.errors import PathError
from feeding.filesystem.globbing import alternatives, component, glob
from feeding.filesystem.interface import FileStatus, Path
from feeding.filesystem.local import LocalFileSystem
from feeding.filesystem.location import parse
from tests.support.hostile_names import NAMES_THAT_LEAD_ASTRAY, PATHS_THAT_LEAD_ASTRAY


@pytest.mark.attack("A18")
@pytest.mark.parametrize("root", ["/data", "hdfs://nn:8020/data", "s3://bucket/data", "data"])
def test_a_name_that_could_lead_out_of_a_directory_is_refused_escaped(root):
    assert len(set(NAMES_THAT_LEAD_ASTRAY)) >= 60
    for name in NAMES_THAT_LEAD_ASTRAY:
        with pytest.raises(PathError) as refused:
            parse(root).child(name)
        assert str(refused.value).isascii()
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "name", ["part-0.tfrecord", "a/b/c", "day=2026-01-01", "\u00e9\u00e8", "x" * 255, "a b", "..a"]
)
def test_ordinary_names_stay_below(name):
    assert str(parse("hdfs://nn:1/data").child(name)) == f"hdfs://nn:1/data/{name}"
    assert str(parse("/").child(name)) == f"/{name}"
    assert str(parse(".").child(name)) == name


@pytest.mark.parametrize(
    ("text", "parts", "back"),
    [
        ("a/b", ("file", "", "a/b"), "a/b"),
        ("/a/b/", ("file", "", "/a/b"), "/a/b"),
        ("/", ("file", "", "/"), "/"),
        ("../a", ("file", "", "../a"), "../a"),
        ("file:///a", ("file", "", "/a"), "/a"),
        ("file://localhost/a", ("file", "", "/a"), "/a"),
        ("HDFS://nn:8020/a/%2e", ("hdfs", "nn:8020", "/a/%2e"), "hdfs://nn:8020/a/%2e"),
        ("hdfs://nn", ("hdfs", "nn", "/"), "hdfs://nn/"),
        ("hdfs:///a", ("hdfs", "", "/a"), "hdfs:///a"),
        ("s3a://bucket/a/b", ("s3a", "bucket", "/a/b"), "s3a://bucket/a/b"),
        ("//a///b//", ("file", "", "/a/b"), "/a/b"),
        ("file:////a//b", ("file", "", "/a/b"), "/a/b"),
        ("./a/./b/.", ("file", "", "a/b"), "a/b"),
        ("/.", ("file", "", "/"), "/"),
        ("./", ("file", "", "."), "."),
        ("a/../b", ("file", "", "a/../b"), "a/../b"),
        ("hdfs://nn//a//b", ("hdfs", "nn", "/a/b"), "hdfs://nn/a/b"),
        ("s3://bucket//a//b", ("s3", "bucket", "//a//b"), "s3://bucket//a//b"),
    ],
)
def test_what_a_path_consists_of(text, parts, back):
    location = parse(text)
    assert (location.scheme, location.authority, location.path) == parts
    assert str(location) == back


@pytest.mark.attack("A18")
@pytest.mark.parametrize("text", PATHS_THAT_LEAD_ASTRAY, ids=lambda text: ascii(text)[:30])
def test_a_path_that_servers_could_read_otherwise_is_refused(text):
    with pytest.raises(PathError) as refused:
        parse(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("given", [None, b"bytes", 3])
def test_a_path_is_a_string(given):
    with pytest.raises((PathError, TypeError)):
        parse(given)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("a{b,c}d", ["abd", "acd"]),
        ("{a,b}{1,2}", ["a1", "a2", "b1", "b2"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("{a}", ["a"]),
        ("{a,}x", ["ax", "x"]),
        (r"\{a,b\}", [r"\{a,b\}"]),
        ("a}", ["a}"]),
    ],
)
def test_braces_are_written_out(pattern, expected):
    assert alternatives(pattern) == expected


@pytest.mark.parametrize("pattern", ["{a", "a{b,{c}", "{a,b}" * 10])
def test_braces_that_do_not_end_are_refused(pattern):
    with pytest.raises(PathError):
        alternatives(pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*", ["a", "a.b", "\n"], [".a"]),
        ("a?c", ["abc"], ["ac", "abbc"]),
        ("[a-c]x", ["bx"], ["dx", "-x"]),
        ("[!a-c]x", ["dx"], ["bx"]),
        ("[]]x", ["]x"], ["x"]),
        ("[x", ["[x"], ["x"]),
        (r"\*a", ["*a"], ["ba"]),
        (".*", [".a"], ["a"]),
        ("a.b+", ["a.b+"], ["aXb+", "a.bb"]),
        ("part-*.rec", ["part-1.rec"], ["part-1.rec.tmp"]),
    ],
)
def test_components(pattern, matching, other):
    wanted = component(pattern)
    assert all(wanted.fullmatch(name) for name in matching)
    assert not any(wanted.fullmatch(name) for name in other)


def test_a_bad_set_is_refused():
    with pytest.raises(PathError, match="bad set"):
        component("[z-a]")


def test_only_directories_on_the_way_are_listed():
    tree = {"/": ["data", "other"], "/data": ["a", "b"], "/data/a": ["1.rec"], "/data/b": []}
    listed = []

    class Tree(LocalFileSystem):
        def entries(self, directory: Path) -> list[FileStatus]:
            listed.append(directory)
            below = str(directory).rstrip("/")
            return [
                FileStatus(f"{below}/{name}", 0, f"{below}/{name}" in tree)
                for name in tree.get(str(directory), [])
            ]

    found = glob(Tree(), parse("/data/*/*.rec"))
    assert [status.path for status in found] == ["/data/a/1.rec"]
    assert listed == ["/data", "/data/a", "/data/b"]


def test_a_scheme_with_one_slash_is_no_directory_of_this_host():
    """A model for hdfs:/models was written below a local directory called "hdfs:"."""
    assert parse("file:/models/7") == parse("/models/7")
    assert parse("./run:/x").at("run:/x/y").path == "run:/x/y"
    with pytest.raises(PathError, match="'hdfs:/models/7' names no host; use hdfs://host/"):
        parse("hdfs:/models/7")
    with pytest.raises(PathError):
        parse("file:/models/\x00")
