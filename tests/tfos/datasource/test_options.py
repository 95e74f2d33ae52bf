"""What a user may say of a read or write, and what is said back."""

from __future__ import annotations

import pytest

from feeding.errors import FeedSettingsError
from feeding.reading.splits import SourceFile, Split
from tfos.datasource.options import parse_options


def test_names_know_no_case_and_codecs_may_be_classes():
    found = parse_options(
        {
            "path": "a",
            "RECORDTYPE": "bytearray",
            "codec": "org.apache.hadoop.io.compress.GzipCodec",
            "partitionby": "day, hour",
            "mode": "DropMalformed",
        }
    )
    assert (found.paths, found.record_type, found.gzip) == (("a",), "ByteArray", True)
    assert (found.partition_by, found.drop_malformed) == (("day", "hour"), True)
    assert found.bad_data().action == "skip"


def test_several_paths_come_as_spark_sends_them():
    assert parse_options({"paths": '["a","b"]'}).paths == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "recordtype",
            "SequenceExample",
            "read SequenceExample as ByteArray and decode it yourself",
        ),
        ("recordtype", "Avro", "recordType is 'Avro'; it must be Example"),
        ("compression", "zstd", "compression is 'zstd'; it must be gzip or none"),
        ("mode", "PERMISSIVE", "mode is 'PERMISSIVE'; it must be one of failfast, dropmalformed"),
        ("maxSkipped", "-1", "maxSkipped is '-1'; it must be a number >= 0"),
        ("partitionBy", "a,a", "names of different columns"),
        ("pattern", "x", "tfrecord has no option 'pattern'; it has basePath, binaryFeatures"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, value, text):
    with pytest.raises(FeedSettingsError, match=text):
        parse_options({"path": "a", name: value})


def test_a_read_needs_a_path():
    with pytest.raises(FeedSettingsError, match="no path"):
        parse_options({})


@pytest.mark.slow  # imports pyspark
def test_a_path_that_is_given_twice_is_refused(tmp_path):
    from tfos.datasource.listing import list_files

    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FeedSettingsError, match="is named twice"):
        list_files(parse_options({"paths": f'["{tmp_path}","{tmp_path}/"]'}))


@pytest.mark.slow  # imports pyspark
def test_every_byte_is_in_one_partition_of_about_the_same_size():
    from tfos.datasource.reader import FileRange, pack, split_file

    files = [SourceFile("a", 1000), SourceFile("b.gz", 700, False), SourceFile("c", 0)]
    files += [SourceFile(f"small-{number}", 5) for number in range(20)]
    ranges = [FileRange(split, file, ()) for file in files for split in split_file(file, 300)]
    packed = pack(ranges, 300)
    assert sorted(each.split for part in packed for each in part) == sorted(
        [
            *(Split("a", start, start + 250) for start in (0, 250, 500, 750)),
            Split("b.gz", 0, 700),
            *(Split(f"small-{number}", 0, 5) for number in range(20)),
        ]
    )
    assert [part for part in packed if len(part) > 1] == []  # opening costs more than 300 bytes
    together = pack(ranges, 50 << 20)
    assert len(together) == 2
    assert all(part == sorted(part, key=lambda each: each.split) for part in together)
