"""TFRecord files: what is written is read again; damage is named, and bounded."""

from __future__ import annotations

import gzip
import io
import itertools
import random
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.config import MIB
from feeding.errors import DataError, FeedSettingsError
from feeding.formats.tfrecord.frame_kernels import _crc_by_instruction, _crc_by_table
from feeding.formats.tfrecord.framing import RecordLimits, RecordReader, RecordWriter, _crc_of
from feeding.reading.bad_records import BadData

pytestmark = pytest.mark.slow  # kernels are compiled at first

SMALL = RecordLimits(block_bytes=64)


def written(records: list[bytes], *, zipped: bool = False) -> bytes:
    file = io.BytesIO()
    writer = RecordWriter(file, gzip=zipped)
    for record in records:
        writer.write(record)
    writer.close()
    assert writer.num_records == len(records)
    return file.getvalue()


def read(data: bytes, **options) -> list[bytes]:
    reader = RecordReader(io.BytesIO(data), "part-0", **options)
    return [record for block in reader.blocks() for record in block.records()]


def test_a_large_record_is_not_held_while_others_are_read():
    """A reader that shuffles has 33 of these, of which one at a time has its turn."""
    data = written([b"a", bytes(40 * MIB), b"b", *[bytes(MIB)] * 20, b"c"])
    tracemalloc.start()
    found = map(len, RecordReader(io.BytesIO(data), "part-0").blocks())
    held, peaks = [], []
    for _ in found:
        held.append(tracemalloc.get_traced_memory()[0])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
    tracemalloc.stop()
    assert max(peaks) > 40 * MIB
    assert max(held) < 6 * MIB
    assert len(held) >= 6  # small records behind a large one come in blocks of the usual size
    records = [b"x" * size for size in (1, 9 * MIB, 3, 6 * MIB, 7 * MIB, 2)]
    assert read(written(records)) == records
    damaged = bytearray(written(records))
    damaged[-5 * MIB] ^= 1  # in the record of 7 MiB
    bad = BadData("skip")
    assert read(bytes(damaged), bad=bad) == [each for each in records if len(each) != 7 * MIB]
    assert bad.num_skipped == 1


@given(st.lists(st.binary(max_size=200), max_size=30), st.booleans())
def test_what_is_written_is_read(records: list[bytes], zipped: bool):
    data = written(records, zipped=zipped)
    assert read(data) == records
    assert read(data, limits=SMALL) == records


def test_blocks_say_where_their_records_are():
    records = [bytes([number]) * number for number in range(40)]
    data = written(records)
    count = 0
    for block in RecordReader(io.BytesIO(data), "part-0", limits=SMALL).blocks():
        assert block.first_record == count
        for start, record in zip(block.starts, block.records(), strict=True):
            assert data[block.first_byte + start :][: len(record)] == record == records[count]
            count += 1
    assert count == 40


@given(
    st.lists(st.binary(max_size=90), max_size=20),
    st.lists(st.integers(0, 2000), max_size=4),
    st.sampled_from([12, 64, 4096]),
)
def test_ranges_that_adjoin_give_every_record_once(records, cuts, block_bytes):
    data = written(records)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), None]
    limits = RecordLimits(block_bytes=block_bytes)
    found = []
    for start, stop in itertools.pairwise(bounds):
        reader = RecordReader(io.BytesIO(data[start:]), "part-0", span=(start, stop), limits=limits)
        found += [record for block in reader.blocks() for record in block.records()]
    assert found == records


def test_the_checksum_is_crc_32c():
    import numpy as np

    check = np.frombuffer(b"123456789", np.uint8)  # the catalogue's check value of CRC-32C
    assert _crc_by_table(check, 0, 9) == _crc_by_instruction(check, 0, 9) == 0xE3069283


def framed(length: int, data: bytes, *, length_crc: bytes | None = None) -> bytes:
    head = struct.pack("<Q", length)
    return head + (length_crc or _crc_of(head)) + data + _crc_of(data)


GOOD = written([b"first", b"second"])
DAMAGED = {
    **{f"cut-{left}": GOOD[:left] for left in (1, 7, 8, 11, 12, 14, 17, 20, 22, 30, len(GOOD) - 1)},
    "length-flipped": bytes([GOOD[0] ^ 1]) + GOOD[1:],
    "length-crc-flipped": GOOD[:8] + bytes([GOOD[8] ^ 1]) + GOOD[9:],
    "data-flipped": GOOD[:12] + bytes([GOOD[12] ^ 1]) + GOOD[13:],
    "data-crc-flipped": GOOD[:17] + bytes([GOOD[17] ^ 128]) + GOOD[18:],
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "text": b"id,label\n1,2\n3,4\n" * 4,
    "length-2^63": GOOD + framed(1 << 63, b""),
    "length-2^64-1": framed((1 << 64) - 1, b"x"),
    "length-2^32": framed(1 << 32, b"x"),
    "length-above-limit": framed((256 << 20) + 1, b"x"),
    "length-too-great": framed(1000, b"x"),
    "length-too-small": framed(1, b"xyz"),
    "gzip-cut": gzip.compress(GOOD)[:-9],
    "gzip-cut-early": gzip.compress(GOOD)[:12],
    "gzip-flipped": gzip.compress(GOOD)[:15] + b"\xff" + gzip.compress(GOOD)[16:],
    "gzip-crc-flipped": gzip.compress(GOOD)[:-8] + b"\0\0\0\0" + gzip.compress(GOOD)[-4:],
    "gzip-then-rubbish": gzip.compress(GOOD) + b"rubbish",
    "gzip-of-text": gzip.compress(b"no records here, only text"),
    "gzip-twice": gzip.compress(gzip.compress(GOOD)),
    "zip": b"PK\x03\x04" + bytes(60),
    "parquet": b"PAR1" + bytes(60) + b"PAR1",
}


@pytest.mark.fault("F44")
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_with_record_and_byte(name: str):
    with pytest.raises(DataError, match=r"^part-0: record \d+ at byte \d+: "):
        read(DAMAGED[name])
    bad = BadData("skip")
    assert set(read(DAMAGED[name], bad=bad)) <= {b"first", b"second", b"x", b"xyz"}
    assert bad.num_skipped >= 1


@pytest.mark.fault("F44")
def test_a_damaged_record_is_skipped_and_those_behind_it_are_read():
    records = [b"one", b"two", b"three"]
    data = bytearray(written(records))
    data[12] ^= 1
    with pytest.raises(DataError, match="record 0 at byte 0: its CRC does not match its 3 bytes"):
        read(bytes(data))
    bad = BadData("skip", max_skipped=1)
    assert read(bytes(data), bad=bad) == records[1:]
    data[12 + 4 + 12 + 3] ^= 1
    bad = BadData("skip", max_skipped=1)
    for _ in range(2):
        with pytest.raises(DataError, match="2 damaged records or files, max_skipped is 1"):
            read(bytes(data), bad=bad)


@pytest.mark.fault("F44")
def test_records_behind_a_lost_one_are_found_again():
    records = [bytes([number]) * 50 for number in range(20)]
    data = bytearray(written(records))
    frame = len(data) // 20
    data[3 * frame] ^= 1  # its length
    data[7 * frame : 9 * frame] = bytes(2 * frame)
    bad = BadData("skip")
    expected = [record for number, record in enumerate(records) if number not in (3, 7, 8)]
    assert read(bytes(data), bad=bad) == expected
    assert bad.num_skipped == 2
    assert read(bytes(data), bad=BadData("skip"), limits=SMALL) == expected


FRAME = 36  # of a record of 20 bytes
TEN = written([bytes([number]) * 20 for number in range(10)])


@pytest.mark.fault("F44")
@pytest.mark.parametrize("cut", [4 * FRAME + 10, 5 * FRAME, 5 * FRAME + 3, 10 * FRAME])
@pytest.mark.parametrize("block_bytes", [64, 4096])
@pytest.mark.parametrize("damage", ["length", "data", "tail"])
def test_damage_where_a_file_is_cut_is_told_once(cut: int, block_bytes: int, damage: str):
    data = bytearray(TEN)
    if damage == "tail":
        data += b"xyz"
        cut += 5 * FRAME
    else:
        data[5 * FRAME + (0 if damage == "length" else 14)] ^= 1
    told = found = 0
    for span in ((0, cut), (cut, len(data))):
        if span[0] < len(data):
            bad, limits = BadData("skip"), RecordLimits(block_bytes=block_bytes)
            found += len(read(bytes(data[span[0] :]), span=span, bad=bad, limits=limits))
            told += bad.num_skipped
    assert (found, told) == (10 if damage == "tail" else 9, 1)


@pytest.mark.fault("F44")
def test_the_largest_limit_does_not_wrap():
    head = framed((1 << 63) - 1, b"x" * 30)
    with pytest.raises(DataError, match="it needs 9223372036854775823 bytes, 46 are left"):
        read(head, limits=RecordLimits(max_record_bytes=(1 << 63) - 1))


@pytest.mark.fault("F44")
@pytest.mark.parametrize("length", [1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_length_is_never_believed_before_its_limit(length: int):
    tracemalloc.start()
    with pytest.raises(DataError, match=r"max_record_bytes is 1048576; .* limits=RecordLimits"):
        read(framed(length, b"x"), limits=RecordLimits(max_record_bytes=MIB))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * MIB


@pytest.mark.attack("A11")
def test_a_decompression_bomb_ends_at_its_ratio():
    record = bytes(MIB)
    data = gzip.compress(written([record] * 64), compresslevel=9)
    with pytest.raises(DataError, match=r"compressed bytes became \d+, max_gzip_ratio is 250"):
        read(data)
    assert read(data, limits=RecordLimits(max_gzip_ratio=1100)) == [record] * 64


@pytest.mark.attack("A12")
def test_random_bytes_end_typed():
    dice = random.Random(7)
    for _ in range(300):
        data = bytearray(written([dice.randbytes(dice.randrange(40)) for _ in range(5)]))
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        bad = BadData("skip")
        assert len(read(bytes(data), bad=bad, limits=SMALL)) <= 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecordLimits(block_bytes=0),
        lambda: RecordLimits(block_bytes=11),  # no record's head fits
        lambda: RecordLimits(max_record_bytes=True),
        lambda: BadData("ignore"),  # type: ignore[arg-type]
        lambda: BadData("skip", max_skipped=-1),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(FeedSettingsError, match="must be"):
        make()
