"""Ids of strings, without TensorFlow; tests/system/keras/test_string_hash.py compares with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps.string_ids import fingerprint
from ps.string_ids.ids import hashed, ids_of, with_hashed_strings
from ps.tables.ids import as_bits
from tests.support.tables import table

OF_BYTES_COUNTING_UP = {
    0: 1936946117179621456,
    1: 4494688008148699989,
    3: 1486536572171691163,
    4: 198155675784242497,
    7: 2513219638405408418,
    8: 3267946340606884761,
    16: 1080060857502750420,
    17: 4302810082142134045,
    32: 1917831512995979081,
    33: 7527044130840859215,
    64: 8468179876952591436,
    65: 5089956174350597567,
    128: 2037963038260878803,
    129: 5659797075620071487,
    200: 525935771297148851,
}
"""By length; TensorFlow's numbers."""


def test_what_is_no_string_is_left_to_others():
    for ids in ([1, 2], np.array([3]), [None], [1, "a"], [[1], [2, 3]]):
        assert with_hashed_strings(ids) is ids


def test_strings_of_each_length_have_their_number():
    texts = [bytes(range(length)) for length in OF_BYTES_COUNTING_UP]
    assert hashed(texts).tolist() == list(OF_BYTES_COUNTING_UP.values())
    assert [int(with_hashed_strings(text)) for text in texts] == hashed(texts).tolist()
    assert hashed([]).shape == (0,)


@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_strings_in_parts_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch, at_once: int):
    random = np.random.default_rng(1)
    texts = [random.bytes(int(length)) for length in random.integers(0, 150, 40)]
    alone = [int(hashed([text])[0]) for text in texts]
    monkeypatch.setattr(fingerprint, "_AT_ONCE_BYTES", at_once)
    assert hashed(texts).tolist() == alone


def test_text_is_utf_8_and_keeps_its_shape():
    found = with_hashed_strings([["Zürich", ""], ["a", "é"]])
    assert found.shape == (2, 2)
    assert found[0, 0] == hashed(["Zürich".encode()])[0]
    assert found.dtype == np.int64
    assert found.min() >= 0


@pytest.mark.parametrize("id_source", ["any", "integers", "strings"])
def test_no_ids_are_no_text_whatever_the_table_takes(id_source: str):
    spec = table(id_source=id_source)
    arrays = [np.empty(0, "U1"), np.empty((0, 3), object), np.empty(0, np.int64)]
    given: list[Any] = [*arrays, [], [[], []]]
    for ids in given:
        found = ids_of(spec, ids)
        assert as_bits(spec, found).shape == np.shape(ids)
