"""What a worker keeps of passed rendezvous: golden bytes, bounded memory, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from ps.errors import PSError, PSSettingsError, ShapeError
from ps.protocol import messages, passed
from ps.protocol.messages import BringAnswers, RendezvousValues
from ps.protocol.passed import PassedKey, PassedRendezvous, read_index


def added(kept: PassedRendezvous, key: str, *values: bytes) -> None:
    sizes = tuple(map(len, values))
    kept.add(key, RendezvousValues(tuple(range(len(values))), sizes), b"".join(values))


def brought(kept: PassedRendezvous) -> dict[str, dict[int, bytes] | None]:
    """What a server reads of the payload."""
    found = kept.request()
    if found is None:
        return {}
    request, buffers = found
    payload = b"".join(buffers)
    index, values = payload[: request.index_bytes], memoryview(payload)[request.index_bytes :]
    result: dict[str, dict[int, bytes] | None] = {}
    for each in read_index(index, len(values), num_workers=4):
        result[each.key] = each.values(values[: each.num_bytes])
        values = values[each.num_bytes :]
    return result


def test_the_wire_format_is_fixed():
    kept = PassedRendezvous()
    assert kept.request() is None
    added(kept, "a", b"\x01", b"\x02\x03")
    added(kept, "b#1", b"", b"")
    request, payload = kept.request() or (None, [])
    assert request == BringAnswers(22)
    assert messages.encode(request).hex() == "82a474797065a36d6574ab696e6465785f627974657316"
    assert b"".join(payload).hex() == (
        "91" + "92" + "93a161920001920102" + "93a3622331920001920000" + "010203"
    )
    assert brought(kept) == {"a": {0: b"\x01", 1: b"\x02\x03"}, "b#1": {0: b"", 1: b""}}


def test_beyond_the_limit_the_largest_answers_go_and_their_keys_stay(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(passed, "MAX_KEPT_BYTES", 100)
    kept = PassedRendezvous()
    added(kept, "build", b"b")
    for number in range(3):
        added(kept, f"{number}", bytes(40))
    assert brought(kept) == {"build": {0: b"b"}, "0": None, "1": None, "2": {0: bytes(40)}}
    added(kept, "newest", bytes(200))
    assert brought(kept)["newest"] == {0: bytes(200)}, "another worker may still lack it"
    assert [key for key, values in brought(kept).items() if values] == ["newest"]


def test_keys_and_answers_are_limited_in_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passed, "MAX_KEPT_ANSWERS", 2)
    monkeypatch.setattr(passed, "MAX_KNOWN_KEYS", 3)
    kept = PassedRendezvous()
    for number in range(6):
        added(kept, f"{number}", b"x")
        assert len(brought(kept)) <= 3
    assert brought(kept) == {"3": None, "4": {0: b"x"}, "5": {0: b"x"}}


def index_of(*keys: object) -> bytes:
    return msgspec.msgpack.encode([list(keys)])


REFUSED: dict[str, tuple[bytes, int, type[PSError], str]] = {
    "no index": (b"\xc1", 0, PSSettingsError, "not an index"),
    "pickle": (b"\x80\x04cos\nsystem\n.", 0, PSSettingsError, "not an index"),
    "an empty key": (index_of(["", [0], [0]]), 0, PSSettingsError, "not an index"),
    "a long key": (index_of(["k" * 257, [0], [0]]), 0, PSSettingsError, "not an index"),
    "a large value": (index_of(["k", [0], [(1 << 20) + 1]]), 0, PSSettingsError, "not an index"),
    "a negative size": (index_of(["k", [0], [-1]]), 0, PSSettingsError, "not an index"),
    "a rank that is not there": (index_of(["k", [4], [0]]), 0, PSSettingsError, "are below 4"),
    "ranks twice": (index_of(["k", [1, 1], [0, 0]]), 0, PSSettingsError, "ascend"),
    "a rank without a size": (index_of(["k", [0, 1], [0]]), 0, PSSettingsError, "one size"),
    "sizes without ranks": (index_of(["k", [], [1]]), 1, PSSettingsError, "one size"),
    "fewer bytes": (index_of(["k", [0], [2]]), 1, ShapeError, "announces 2"),
    "more bytes": (index_of(["k", [0], [2]]), 3, ShapeError, "3 follow"),
    "too many keys": (index_of(*[["k"]] * 8193), 0, PSSettingsError, "not an index"),
}


@pytest.mark.attack("A08")
@pytest.mark.attack("A10")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_list_of_answers_is_refused_before_any_value_is_read(name: str):
    index, values_nbytes, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        read_index(index, values_nbytes, num_workers=4)


@pytest.mark.attack("A10")
def test_all_values_of_a_key_are_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passed, "MAX_OPEN_BYTES", 100)
    with pytest.raises(PSSettingsError, match="120 bytes, the limit is 100"):
        read_index(index_of(["k", [0, 1], [60, 60]]), 120, num_workers=4)


def test_a_key_without_ranks_has_no_values():
    assert PassedKey("k").values(memoryview(b"")) is None
