"""Packing of gradients: the bytes, exactness of what is left out, bounds, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps.compression.format import (
    BLOCK,
    FORMATS,
    Compression,
    num_scales,
    packed_nbytes,
    views_of_packed,
)
from ps.compression.kernels import ALL_KINDS, pack, unpack, warm_client, warm_server
from ps.errors import NonFiniteGradient, PackingError

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.slow
LARGEST = np.finfo(np.float32).max
SIZES = st.integers(1, 3 * BLOCK + 1)
each_kind = pytest.mark.parametrize("kind", ALL_KINDS)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    warm_client(ALL_KINDS)
    warm_server(ALL_KINDS)


def packed(kind: Compression, gradient: Array, left: Array | None = None) -> tuple[Array, Array]:
    """The packed bytes and what they leave out."""
    left = np.zeros_like(gradient) if left is None else left
    data = np.full(packed_nbytes(kind, gradient.size), 0xEE, np.uint8)
    new_left = np.full_like(gradient, np.nan)
    pack(kind, gradient, left, new_left, data)
    return data, new_left


def unpacked(kind: Compression, data: Array, size: int) -> Array:
    out = np.full(size, np.nan, np.float32)
    unpack(kind, data, out)
    return out


def any_floats(seed: int, size: int) -> Array:
    """All finite bit patterns alike: denormals, zeros of both signs, numbers near the largest."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32)
    found = bits.view(np.float32)
    found[~np.isfinite(found)] = -0.0
    return found


def gradients(seed: int, size: int, exponent: int = 0) -> Array:
    """Normal numbers of one magnitude, with some zeros."""
    random = np.random.default_rng(seed)
    found = random.standard_normal(size) * (random.random(size) < 0.9)
    return np.ldexp(found, exponent).astype(np.float32)


@each_kind
@settings(max_examples=80)
@given(st.integers(0, 1 << 40), SIZES)
@example(seed=0, size=1)
@example(seed=1, size=BLOCK)
def test_no_finite_gradient_overflows_and_nothing_is_lost(kind: Compression, seed: int, size: int):
    gradient = any_floats(seed, size)
    data, left = packed(kind, gradient)
    got = unpacked(kind, data, size)
    assert np.isfinite(got).all()
    pairs = zip(got.tolist(), left.tolist(), gradient.tolist(), strict=True)
    assert all(Fraction(a) + Fraction(b) == Fraction(g) for a, b, g in pairs)


@each_kind
@pytest.mark.parametrize("others", [0.0, 1.0, LARGEST])
def test_the_largest_numbers_do_not_round_up_to_infinity(kind: Compression, others: float):
    gradient = np.full(BLOCK + 2, others, np.float32)
    gradient[::3], gradient[1::3] = LARGEST, -np.nextafter(LARGEST, np.float32(0))
    data, left = packed(kind, gradient)
    got = unpacked(kind, data, gradient.size)
    assert np.isfinite(got).all()
    assert np.array_equal(gradient, got.astype(np.float64) + left.astype(np.float64))


@each_kind
@settings(max_examples=40)
@given(st.integers(0, 1 << 40), SIZES, st.integers(-140, 120), st.integers(1, 8))
def test_what_was_unpacked_and_what_is_left_is_the_sum_of_the_gradients(
    kind: Compression, seed: int, size: int, exponent: int, num_pushes: int
):
    """Each addition of what was left rounds once: half a unit in the last place of the total."""
    left = np.zeros(size, np.float32)
    error = np.zeros(size)
    exact = [Fraction(0)] * size
    for push in range(num_pushes):
        gradient = gradients(seed + push, size, exponent)
        total = gradient + left
        error += np.spacing(np.abs(total)).astype(np.float64) / 2
        data, left = packed(kind, gradient, left)
        got = unpacked(kind, data, size)
        assert np.array_equal(total, got.astype(np.float64) + left.astype(np.float64))
        difference = zip(gradient.tolist(), got.tolist(), strict=True)
        exact = [e + Fraction(g) - Fraction(u) for e, (g, u) in zip(exact, difference, strict=True)]
    off = [abs(float(e - Fraction(r))) for e, r in zip(exact, left.tolist(), strict=True)]
    assert (np.array(off) <= error).all()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_sums_of_whole_numbers_come_out_bit_for_bit(kind: Compression):
    """Halves of whole numbers stay on their grid, so no addition rounds."""
    random = np.random.default_rng(5)
    left = np.zeros(1000, np.float32)
    got, pushed = np.zeros(1000), np.zeros(1000)
    for _ in range(40):
        gradient = random.integers(-5000, 5000, 1000).astype(np.float32)
        pushed += gradient
        data, left = packed(kind, gradient, left)
        got += unpacked(kind, data, 1000)
    assert np.abs(left).max() > 0
    assert np.array_equal(got + left, pushed)


@pytest.mark.parametrize(("kind", "share"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 253)])
@pytest.mark.parametrize("exponent", [-100, -24, 0, 100])
def test_what_is_left_out_is_a_small_share_of_the_largest_of_its_block(
    kind: Compression, share: float, exponent: int
):
    gradient = gradients(3, 5 * BLOCK, exponent)
    _, left = packed(kind, gradient)
    largest = np.abs(gradient).reshape(5, BLOCK).max(axis=1, keepdims=True)
    assert (np.abs(left).reshape(5, BLOCK) <= share * largest).all()


def test_small_gradients_keep_their_digits_in_fp16():
    """As halves without a scale, numbers of 1e-9 are zero."""
    gradient = gradients(4, BLOCK, -30)
    assert not gradient.astype(np.float16).any()
    _, left = packed("fp16", gradient)
    assert (np.abs(left) <= 2**-11 * np.abs(gradient)).all()


def test_a_block_too_small_for_a_scale_waits_for_more():
    gradient = np.full(BLOCK, 2**-122, np.float32)
    data, left = packed("int8", gradient)
    assert not data.any()
    assert np.array_equal(left, gradient)
    for _ in range(6):
        data, left = packed("int8", gradient, left)
        assert not data.any()
    data, left = packed("int8", gradient, left)  # 8 * 2**-122 is above 127 * 2**-126
    assert unpacked("int8", data, BLOCK)[0] + left[0] == 8 * gradient[0] > left[0]


def test_the_bytes_of_each_format():
    gradient = np.array([1.0, -0.5, 0.0, 127.0, 3.1], np.float32)
    assert {kind: packed(kind, gradient)[0].tobytes().hex(" ", 2) for kind in ALL_KINDS} == {
        # scale 2**-8 brings 127 to 32512; 0x5c00 is 256, 0xd800 is -128
        "fp16": "0000 803b 005c 00d8 0000 f077 3362 0000",
        "bf16": "803f 00bf 0000 fe42 4640 0000",
        # scale 1.0; -0.5 is a tie and becomes 0
        "int8": "0000 803f 0100 007f 0300 0000",
    }


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_each_block_has_a_scale_of_its_own(kind: Compression):
    gradient = np.concatenate([gradients(1, BLOCK, 20), gradients(2, BLOCK, -20), gradients(3, 9)])
    data, _ = packed(kind, gradient)
    scales, _, _ = views_of_packed(kind, data, gradient.size)
    assert scales.size == num_scales(kind, gradient.size) == 3
    alone, _ = packed(kind, gradient[BLOCK : 2 * BLOCK])
    assert scales[1] == alone[:4].view(np.float32)[0] < scales[2] < scales[0]


def test_every_half_is_unpacked_as_numpy_reads_it():
    halves = np.arange(1 << 16, dtype=np.uint16)
    data = np.zeros(packed_nbytes("fp16", halves.size), np.uint8)
    scales, codes, _ = views_of_packed("fp16", data, halves.size)
    scales[:], codes[:] = 1.0, halves
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(unpacked("fp16", data, halves.size), expected, equal_nan=True)


@each_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
def test_a_gradient_that_is_not_finite_is_refused(kind: Compression, bad: float, at: int):
    gradient = gradients(6, 2 * BLOCK + 7)
    gradient[at] = bad
    with pytest.raises(NonFiniteGradient, match=f"1 of {gradient.size} values are NaN") as refused:
        packed(kind, gradient)
    assert refused.value.details["at"] == str(at)


@each_kind
def test_a_sum_with_what_was_left_that_is_infinite_is_refused(kind: Compression):
    gradient = np.full(3, LARGEST, np.float32)
    with pytest.raises(NonFiniteGradient, match="3 of 3 values, with what earlier packing has"):
        packed(kind, gradient, gradient)


@pytest.mark.attack("A09")
@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, -1e-45])
def test_a_scale_that_no_packer_makes_is_refused_with_its_value(kind: Compression, bad: float):
    data, _ = packed(kind, gradients(7, 3 * BLOCK))
    views_of_packed(kind, data, 3 * BLOCK)[0][2] = bad
    with pytest.raises(PackingError, match="scale 2 of 3 of a gradient packed as") as refused:
        unpacked(kind, data, 3 * BLOCK)
    assert refused.value.details["scale"] == str(np.float32(bad))


@each_kind
def test_sizes_are_whole_words(kind: Compression):
    for size in (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1):
        nbytes = packed_nbytes(kind, size)
        assert nbytes % 4 == 0
        scales, codes, padding = views_of_packed(kind, np.zeros(nbytes, np.uint8), size)
        assert codes.dtype == FORMATS[kind].code
        assert (codes.size, padding.size < 4) == (size, True)
        assert scales.nbytes + codes.nbytes + padding.nbytes == nbytes
