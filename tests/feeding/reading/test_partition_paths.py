"""Names of `key=value` directories: nothing leads out of the root, and every value comes back."""

from __future__ import annotations

import datetime
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from feeding.errors import DataError, RowError
from feeding.reading.partition_paths import (
    directory_name,
    partition_kinds,
    partition_value,
    partition_values,
)

LETTERS = some.characters(exclude_categories=["Cs"], exclude_characters="\0")


@pytest.mark.attack("A18")
@settings(max_examples=50)
@given(some.text(LETTERS, min_size=1, max_size=25), some.text(LETTERS, min_size=1, max_size=25))
def test_any_value_makes_one_component_below_the_root_and_comes_back(column, value):
    name = directory_name(column, value)
    assert "/" not in name
    assert os.path.normpath(f"/root/{name}") == f"/root/{name}"
    assert partition_values(f"/root/{name}/part-0", "/root") == {column: value}


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("../../etc", "d=..%2F..%2Fetc"),
        ("..", "d=.."),
        ("%2e%2e%2f", "d=%252e%252e%252f"),
        ("C:\\x", "d=C%3A%5Cx"),
        ("a=b?c#d", "d=a%3Db%3Fc%23d"),
        ("\u20ac \uff0f", "d=\u20ac \uff0f"),
        ("\n\x7f", "d=%0A%7F"),
        ("", "d=__HIVE_DEFAULT_PARTITION__"),
        (None, "d=__HIVE_DEFAULT_PARTITION__"),
        (True, "d=true"),
        (-7, "d=-7"),
        (datetime.date(2026, 1, 2), "d=2026-01-02"),
    ],
)
def test_values_are_escaped_as_spark_escapes_them(value, name):
    assert directory_name("d", value) == name


@pytest.mark.parametrize(("value", "text"), [("x" * 300, "more than 255 bytes"), ("a\0", "NUL")])
def test_what_names_no_directory_is_refused(value, text):
    with pytest.raises(RowError, match=f"'d' holds .*{text}"):
        directory_name("d", value)


def test_directories_above_the_base_and_others_do_not_count():
    assert partition_values("/a=1/b/c=2/x/d=%2Fe/f=1", "/a=1/b") == {"c": "2", "d": "/e"}
    assert partition_values("/a=1/part-0", "/a=1/part-0") == {}


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-2", None], "int"),
        (["1", str(2**31)], "bigint"),
        (["1", str(2**63)], "string"),
        (["2026-02-28", "2024-02-29"], "date"),
        (["2026-02-29"], "string"),
        (["1_0"], "string"),
        ([None], "string"),
    ],
)
def test_a_column_has_the_type_of_all_its_values(texts, kind):
    files = {f"/{number}": {"d": text} for number, text in enumerate(texts)}
    assert partition_kinds(files) == {"d": kind}


def test_directories_of_different_columns_are_refused_with_both_files():
    with pytest.raises(DataError, match=r"/a has .*\['d'\], /b has \[\]"):
        partition_kinds({"/a": {"d": "1"}, "/b": {}})


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("7", "bigint", 7), ("true", "boolean", True), ("7", "string", "7"), (None, "int", None)],
)
def test_a_value_is_read_as_the_schema_says(text, kind, value):
    assert partition_value("d", text, kind) == value


@pytest.mark.parametrize(("text", "kind"), [("x", "int"), ("300", "tinyint"), ("yes", "boolean")])
def test_a_value_that_is_no_such_thing_is_named(text, kind):
    with pytest.raises(DataError, match=f"directory d='{text}' cannot be read as {kind}"):
        partition_value("d", text, kind)
