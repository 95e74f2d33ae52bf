"""Found files: the first file that differs, many files, workers that read none."""

from __future__ import annotations

import msgspec
import pytest

from feeding.reading.found_files import FoundFiles, difference, summed_up
from feeding.reading.positions import versions
from feeding.reading.splits import SourceFile


def files_of(*numbers: int, size_bytes: int = 10) -> list[SourceFile]:
    return [SourceFile(f"part-{number:05d}", size_bytes) for number in numbers]


def test_equal_files_in_another_order_do_not_differ():
    found = {0: summed_up(files_of(2, 0, 1)), 1: None}
    assert not difference(files_of(0, 1, 2), 1, found)


def test_the_first_file_that_differs_is_named_by_both_workers():
    mine, other = files_of(0, 1, 2), files_of(0, 2)
    found = {0: summed_up(mine), 3: summed_up(other)}
    assert difference(mine, 0, found) == (
        "worker 3 has found 2 files of 20 bytes, worker 0 3 files of 30 bytes; "
        "the first that differs is here part-00001 of 10 bytes"
    )
    assert "the first that differs is here part-00002 of" in difference(other, 3, found)
    assert "; the further ones are not here" in difference(mine[:2], 1, found)


def test_a_file_of_another_size_or_other_rows_differs():
    mine = files_of(0, 1)
    grown = [mine[0], SourceFile("part-00001", 11)]
    counted = [SourceFile(each.path, 10, piece_rows=(1,)) for each in mine]
    assert "first that differs is here part-00001" in difference(mine, 0, {1: summed_up(grown)})
    assert "first that differs is here part-00000" in difference(mine, 0, {1: summed_up(counted)})


def test_the_summary_of_many_files_is_small_and_still_compared():
    mine = files_of(*range(20_000))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(summed_up(mine[1:])), type=FoundFiles)
    assert len(msgspec.msgpack.encode(summed_up(mine[:2048]))) < 17_000
    assert difference(mine, 0, {1: found}) == (
        "worker 1 has found 19999 files of 199990 bytes, worker 0 20000 files of 200000 bytes"
    )


def under(directory: str, *names: str, size_bytes: int = 10) -> list[SourceFile]:
    return [SourceFile(f"{directory}/{name}", size_bytes) for name in names]


def test_equal_files_in_a_directory_of_each_host_do_not_differ():
    names = ("a.csv", "b.csv", "day=1/c.csv")
    mine, other = under("/tmp/spark-1/files", *names), under("/data/2", *names)
    assert not difference(mine, 0, {1: summed_up(other)})
    one, another = under("/tmp/spark-1", "a.csv"), under("/tmp/spark-2", "a.csv")
    assert not difference(one, 0, {1: summed_up(another)})
    shared = [SourceFile("hdfs://n/z.csv", 10), SourceFile("here/z.csv", 10)]
    assert not difference([*mine, *shared], 0, {1: summed_up([*other, *shared])})


def test_files_that_differ_in_a_directory_of_each_host_are_named():
    mine, other = under("/d/1", "a.csv", "b.csv"), under("/d/2", "a.csv", "c.csv")
    text = difference(mine, 0, {1: summed_up(other)})
    assert text.endswith("the first that differs is here /d/1/b.csv of 10 bytes")
    grown = [*under("/d/2", "a.csv"), *under("/d/2", "b.csv", size_bytes=11)]
    assert "here /d/1/b.csv of 10" in difference(mine, 0, {1: summed_up(grown)})


def test_partitions_and_urls_of_other_names_still_differ():
    for one, other in (("/d/day=1", "/d/day=2"), ("hdfs://n/1", "hdfs://n/2"), ("a/1", "a/2")):
        assert difference(under(one, "a.csv"), 0, {1: summed_up(under(other, "a.csv"))})


def test_files_that_were_written_between_two_listings_differ_but_for_copies_of_a_host():
    mine, other = (
        [SourceFile("s3://b/a.csv", 10, version=each), SourceFile("/d/b.csv", 10, version=each)]
        for each in ("etag a", "etag b")
    )
    theirs = summed_up(other)
    assert difference(mine, 0, {1: theirs}) == (
        f"worker 1 has found {theirs}, worker 0 {theirs}; they have the same names and sizes, but "
        f"were written again between the two listings (versions {theirs.versions} there, "
        f"{versions(mine)} here); the first that differs is here s3://b/a.csv of 10 bytes, etag a"
    )
    assert not difference(mine[1:], 0, {1: summed_up(other[1:])})


@pytest.mark.parametrize("there", ["", "changed 5"])
def test_versions_that_one_worker_is_not_told_are_not_compared(there):
    mine = [SourceFile(f"http://h/{each}", 10, version=f"etag {each}") for each in "abc"]
    other = [*mine[:2], SourceFile("http://h/c", 10, version=there)]
    assert not difference(mine, 0, {1: summed_up(other)})
    assert not difference(other, 0, {1: summed_up(mine)})
    grown = [*mine[:2], SourceFile("http://h/c", 11, version=there)]
    assert "first that differs is here http://h/c of" in difference(mine, 0, {1: summed_up(grown)})


def test_the_first_file_of_another_version_is_named_behind_one_without():
    mine, other = (
        [SourceFile("s3://b/a", 10), SourceFile("s3://b/b", 10, version=f"etag {each}")]
        for each in "xy"
    )
    assert "is here s3://b/b of 10 bytes, etag x" in difference(mine, 0, {1: summed_up(other)})
