"""A worker's refusal reaches a feeder as the class that its code names."""

from __future__ import annotations

import pytest

from feeding import errors
from rpc.errors import RemoteError

KINDS = errors.FeedError.__subclasses__()
ROOM = [kind for kind in KINDS if kind.__module__ == errors.__name__]


def test_each_code_names_one_class():
    assert len({kind.code for kind in ROOM}) == len(ROOM)


@pytest.mark.parametrize("kind", ROOM)
def test_a_refusal_is_of_the_class_that_its_code_names(kind: type[errors.FeedError]):
    found = errors.from_remote(RemoteError(kind.code, "damaged"), "worker:1")
    assert type(found) is kind
    assert str(found) == "worker:1: damaged"


def test_an_unknown_code_is_a_feed_error():
    found = errors.from_remote(RemoteError("newer", "worker:1: odd"), "worker:1")
    assert type(found) is errors.FeedError
    assert str(found) == "worker:1: odd"
