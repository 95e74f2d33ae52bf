"""A setting that no other process could read is refused where it is written."""

import re
from typing import Any

import numpy as np
import pytest

from ps import rules
from ps.errors import PSSettingsError
from ps.manifest.initializer_spec import RandomNormal
from ps.manifest.table_spec import Admission, TableSpec


def spec(**settings: Any) -> TableSpec:
    return TableSpec(**{"name": "user", "dim": 4, "rule": rules.Adam(), **settings})


def made(kind: Any, **settings: Any) -> Any:
    return kind(**settings)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: spec(when_full="LRU"), "table 'user': when_full must be 'refuse' or 'lru', got"),
        (lambda: spec(id_kind="uint32"), "id_kind must be 'int64' or 'uint64', got 'uint32' (str)"),
        (lambda: spec(dtype="float16"), "dtype must be 'float32' or 'float64', got 'float16'"),
        (lambda: spec(max_rows="5"), "max_rows must be int or None, got '5' (str)"),
        (lambda: spec(dim=True), "dim must be int, got True (bool)"),
        (lambda: spec(name=5), "table 5: name must be str, got 5 (int)"),
        (lambda: spec(name=np.str_("a")), "name must be str, got np.str_('a') (str_); pass x.tol"),
        (lambda: spec(admission={"min_count": 2}), "admission must be Admission, got {'min_count'"),
        (lambda: spec(row_steps="no"), "row_steps must be bool, got 'no' (str)"),
        (lambda: spec(unseen=0.5), "unseen must be tuple[float, ...], got 0.5 (float)"),
        (lambda: spec(admission=5), "admission must be Admission, got 5 (int)"),
        (lambda: spec(rule="adam"), "rule must be SGD or Adagrad or "),
        (
            lambda: made(Admission, unknown="first"),
            "Admission: unknown must be 'initial' or 'zeros', go",
        ),
        (lambda: made(Admission, min_count=2.5), "min_count must be int, got 2.5 (float)"),
        (lambda: made(rules.SGD, nesterov="yes"), "SGD: nesterov must be bool, got 'yes' (str)"),
        (lambda: made(rules.Adam, beta_1=None), "Adam: beta_1 must be float, got None (NoneType)"),
        (
            lambda: made(rules.Adagrad, epsilon=np.float32(1)),
            "epsilon must be float, got np.float32(1.0) (float32); pass x.tolist()",
        ),
        (
            lambda: made(RandomNormal, stddev="1"),
            "RandomNormal: stddev must be float, got '1' (str)",
        ),
    ],
)
def test_a_wrong_type_is_refused_with_the_field_its_value_and_what_is_allowed(make, text: str):
    with pytest.raises(PSSettingsError, match=re.escape(text)):
        make()


def test_whole_numbers_are_floats_and_lists_are_tuples():
    given = spec(ttl_s=60, unseen=[0.5, 1, 0, 0], learning_rate_multiplier=2)
    assert (given.ttl_s, given.learning_rate_multiplier) == (60, 2)
    assert rules.Adam(epsilon=1).epsilon == 1


def test_a_rule_tells_its_own_range_and_not_the_wider_one_of_others():
    with pytest.raises(PSSettingsError, match=r"Adam: beta_1 must be in \[0, 1\), got 2\.0"):
        rules.Adam(beta_1=2.0)
    assert rules.Lion(beta_1=1.0).beta_1 == 1.0
