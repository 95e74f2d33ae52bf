"""A type is learned by one thread at a time: two at once could end the process."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import msgspec
import pytest

from ps import codec as decoding
from rpc.errors import UNREADABLE
from tests.support.ps_cluster import run_all, succeeded


class Inner(msgspec.Struct):
    """In both of the others."""

    number: int


class One(msgspec.Struct):
    inner: Inner


class Other(msgspec.Struct):
    inner: Inner


@pytest.mark.attack("A12")
@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_no_two_threads_learn_types_at_once(codec: str, monkeypatch: pytest.MonkeyPatch):
    make = getattr(msgspec, codec).Decoder
    both = threading.Barrier(2)

    def slow_decoder(kind: type) -> Any:
        with pytest.raises(threading.BrokenBarrierError):  # nobody else comes while this one is in
            both.wait(0.05)
        both.reset()
        return make(kind)

    monkeypatch.setattr(getattr(msgspec, codec), "Decoder", slow_decoder)
    decode = getattr(decoding, codec)
    data = getattr(msgspec, codec).encode({"inner": {"number": 7}})
    kinds = (One, Other, One)
    found = succeeded(run_all(*(partial(decode, data, kind) for kind in kinds)))
    assert [(type(each), each.inner.number) for each in found] == [(kind, 7) for kind in kinds]


def test_what_cannot_be_read_is_one_of_the_named_errors():
    for data in (b"", b"\xc1", b"\x81\xa5inner\x01"):
        with pytest.raises(UNREADABLE):
            decoding.msgpack(data, One)
        with pytest.raises(UNREADABLE):
            decoding.json(data, One)
